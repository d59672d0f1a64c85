"""Ends an actor whose message was cancelled, or whose attempt this worker no longer holds.

As Dramatiq's time limit does, it raises an exception in the actor's thread: code that does not come back to Python is
not interrupted, and its report is refused by the queue.
"""

from __future__ import annotations

import threading
from typing import Any

from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Middleware, SkipMessage
from dramatiq.middleware.threading import Interrupt, raise_thread_exception

from gpulayer_broker.consumer import CapabilityMessage


class Interrupted(Interrupt):
    """The message is cancelled, or another worker has it by now."""


class Interrupts(Middleware):
    """While an actor runs, its attempt's end interrupts it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        if not isinstance(message, CapabilityMessage):
            return
        thread_id, attempt = threading.get_ident(), message.attempt

        def interrupt(reason: str) -> None:
            with self._lock:
                if attempt.on_stop is interrupt:
                    attempt.on_stop = None
                    raise_thread_exception(thread_id, Interrupted)

        attempt.on_stop = interrupt
        if attempt.stopped.is_set():
            message.fail()
            raise SkipMessage(f"the message is {attempt.stop_reason}")

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        if isinstance(message, CapabilityMessage):
            with (
                self._lock
            ):  # whoever holds it may be raising here, which then comes before anything is committed
                message.attempt.on_stop = None

    after_skip_message = after_process_message


__all__ = ["Interrupted", "Interrupts"]
