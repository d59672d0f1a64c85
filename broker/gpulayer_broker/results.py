"""Results of a Dramatiq app's messages, kept by the queue itself: written by the commit that ends the message.

A result is there exactly when its message has succeeded: a crash, or an attempt that has lost its message, leaves none.
A message that failed gives its exception without any further write. Results live as long as `result_ttl` says.

    broker.add_middleware(Results(backend=QueueResults(broker)))
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from dramatiq.encoder import Encoder
from dramatiq.results import ResultBackend, ResultFailure, ResultMissing, ResultTimeout
from dramatiq.results.backend import DEFAULT_TIMEOUT

from gpulayer_broker import functions
from gpulayer_broker.connection import Link
from gpulayer_broker.consumer import CapabilityMessage, as_dramatiq, loads
from gpulayer_broker.errors import UsageError
from gpulayer_broker.job import FINAL

if TYPE_CHECKING:
    from dramatiq.broker import MessageProxy
    from dramatiq.message import Message

    from gpulayer_broker.broker import CapabilityBroker

KIND = "dramatiq"
# How long one blocking read lasts, and how soon a message that is not there yet (a pipeline's last) is asked for.
BLOCK_S = 5.0
LOOK_AGAIN_S = 0.05
_FIELDS = ("state", "result_kind", "result", "error")


class QueueResults(ResultBackend):
    """A result backend on the broker's own queue. Safe between threads, and after a fork."""

    def __init__(self, broker: CapabilityBroker, *, encoder: Encoder | None = None) -> None:
        super().__init__(encoder=encoder)
        self.broker = broker
        self._listening = _Listening()

    # Writing --------------------------------------------------------------------------------------------------------

    def store_result(self, message: MessageProxy, result: Any, ttl: int) -> None:
        """Puts the result into the commit that is about to end the message."""
        if not isinstance(message, CapabilityMessage):
            raise UsageError(
                "a result is kept while its message is being processed by this broker's worker only"
            )
        message.outcome.fields.update(result=self.encoder.encode(result), result_kind=KIND, keep_ms=ttl)

    def store_exception(self, message: MessageProxy, exception: Exception, ttl: int) -> None:
        """The commit of a message that failed has written its exception already."""

    # Reading --------------------------------------------------------------------------------------------------------

    def get_result(self, message: Message[Any], *, block: bool = False, timeout: int | None = None) -> Any:
        """The result, as Dramatiq gives it; `timeout` in milliseconds.

        A wait that cannot be answered any more (the actor keeps no results) ends at once, as ResultTimeout.
        """
        end_s = time.monotonic() + (DEFAULT_TIMEOUT if timeout is None else timeout) / 1000
        with as_dramatiq():
            state, *found = self._read(message.message_id)
            if block and state not in FINAL:
                state, *found = self._await(message.message_id, end_s) or ("", b"", b"", b"")
        return self._judge(message, block, state, *found)

    def _read(self, message_id: str) -> tuple[str, bytes, bytes, bytes]:
        queue = self.broker.queue
        state, kind, result, error = queue.link.call("HMGET", queue.keys.job(message_id), *_FIELDS)
        return (state or b"").decode(), kind or b"", result or b"", error or b""

    def _judge(
        self, message: Message[Any], block: bool, state: str, kind: bytes, result: bytes, error: bytes
    ) -> Any:
        if state == "succeeded" and kind == KIND.encode():
            return self.encoder.decode(result)
        if state in FINAL and state != "succeeded":
            told = (
                loads(error) if error else {"type": state.capitalize(), "message": f"the message is {state}"}
            )
            raise ResultFailure(
                f"actor raised {told['type']}: {told['message']}", told["type"], told["message"]
            )
        raise (ResultTimeout if block else ResultMissing)(message)

    def _await(self, message_id: str, end_s: float) -> tuple[str, bytes, bytes, bytes] | None:
        """What the record holds once the message has ended; None if it has not by then."""
        queue, own = self.broker.queue, self._listening.to(self.broker)
        while (left_s := end_s - time.monotonic()) > 0:
            state = queue.run(functions.watch(own.client, [message_id])).get(message_id, "")
            if state in FINAL:
                return self._read(message_id)
            if state:  # it is not in the queue yet
                time.sleep(min(left_s, LOOK_AGAIN_S))
            elif (told := own.next_end(message_id, min(left_s, BLOCK_S))) is not None:
                return told if told[1] != b"fetch" else self._read(message_id)
        return None


class _Listening(threading.local):
    """One connection and one stream for each thread that waits."""

    listener: _Listener | None = None

    def to(self, broker: CapabilityBroker) -> _Listener:
        if self.listener is None or self.listener.pid != os.getpid():
            self.listener = _Listener(broker)
        return self.listener


class _Listener:
    def __init__(self, broker: CapabilityBroker) -> None:
        self.pid = os.getpid()
        self.client = f"results-{secrets.token_hex(8)}"
        self.key = broker.queue.keys.done(self.client)
        self.link = Link(broker.endpoint)
        self.last: bytes = b"0-0"

    def next_end(self, message_id: str, most_s: float) -> tuple[str, bytes, bytes, bytes] | None:
        """State, kind and result of the message if it ends within `most_s`; what else has ended is passed over."""
        wait_ms = max(1, int(most_s * 1000))
        reply = self.link.block("XREAD", "BLOCK", wait_ms, "STREAMS", self.key, self.last, timeout_s=most_s)
        found = None
        for entry_id, values in reply[0][1] if reply else ():
            self.last = entry_id
            told = dict(zip(values[::2], values[1::2], strict=True))
            if told[b"job"].decode() == message_id:
                kind = told[b"kind"] if told[b"state"] == b"succeeded" else b"fetch"
                found = (told[b"state"].decode(), kind, told[b"result"], b"")
        return found


__all__ = ["QueueResults"]
