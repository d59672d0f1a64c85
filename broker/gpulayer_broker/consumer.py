"""How granted messages reach Dramatiq's threads, and how their acknowledgement becomes one commit.

One claimer serves all consumers of a process; each consumer waits on the messages of its own logical queue and never
spins. What a message's attempt came to (a result, an error, an end reason) is put on its proxy by whoever ran it.
"""

from __future__ import annotations

import logging
import queue
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from dramatiq.broker import Consumer, MessageProxy
from dramatiq.errors import ConnectionFailed
from dramatiq.message import Message

from gpulayer_broker.attempts import Attempt
from gpulayer_broker.connection import ReplyError
from gpulayer_broker.errors import GpulayerError, NotAllowed, QueueUnreachable, Unavailable
from gpulayer_broker.functions import AnyEnding, Arg, CallsEnding, Ending, ItemsEnding
from gpulayer_broker.member import Member
from gpulayer_broker.outbox import Outbox

log = logging.getLogger("gpulayer")


@dataclass(frozen=True)
class Calls:
    """Attempts of one ride that end together, and how."""

    attempts: tuple[Attempt, ...]
    ending: CallsEnding


@dataclass
class Outcome:
    """What the attempt came to, where the one who ran it says more than success or exception.

    verdict: a final state, or `released` with the way as its reason (returned, lost, unfit). `items`: how a chunk of an
    array ended, `calls`: how these attempts of one ride ended. `kinds` are the classes of what the job raised.
    """

    verdict: str = ""
    reason: str = ""
    fields: dict[str, Arg] = field(default_factory=dict)
    items: ItemsEnding | None = None
    calls: Calls | None = None
    kinds: tuple[str, ...] = ()


class CapabilityMessage(MessageProxy):
    """A message together with the attempt under which this worker holds it."""

    def __init__(self, message: Message[Any], attempt: Attempt) -> None:
        super().__init__(message)
        # Middleware asks for these again and again, and a proxy looks for what is its message's in the slowest way.
        self.message_id, self.queue_name = message.message_id, message.queue_name
        self.actor_name, self.options = message.actor_name, message.options
        self.attempt = attempt
        self.outbox = Outbox(message.message_id)
        self.outcome = Outcome()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Its own, and those that ride with it."""
        return (self.attempt, *self.attempt.riders)


class Delivery:
    """Between the claimer and the consumers: messages by logical queue, and the way back."""

    def __init__(self, queues: Collection[str], *, keep_dead_ms: int = 0) -> None:
        self.queues, self.keep_dead_ms = queues, keep_dead_ms
        self.member: Member | None = None
        # Set when the process is to end at once: what cannot be told is then let go, not tried again.
        self.hurried = False
        self._waiting: defaultdict[str, queue.SimpleQueue[CapabilityMessage]] = defaultdict(queue.SimpleQueue)
        self._is_paused: Callable[[], bool] = lambda: False
        self._resting = False

    def open(self, member: Member, is_paused: Callable[[], bool] = lambda: False) -> None:
        self.member, self._is_paused, self._resting = member, is_paused, False

    def put(self, attempt: Attempt) -> None:
        """A grant arrives; one that cannot be read is set aside at once and the queue goes on."""
        try:
            message = decode(attempt)
            if message.queue_name not in self.queues:
                raise ValueError(f"the record names queue {message.queue_name!r}, which nobody here consumes")
        except Exception as error:  # noqa: BLE001 - a decoder meets any bytes and may raise anything
            self._set_aside(attempt, error)
            if attempt.riders:
                first, *others = attempt.riders
                first.riders = tuple(others)
                self.put(first)
            return
        self._waiting[message.queue_name].put(CapabilityMessage(message, attempt))

    def take(self, queue_name: str, timeout_s: float) -> CapabilityMessage | None:
        try:
            message = self._waiting[queue_name].get(timeout=timeout_s)
        except queue.Empty:
            return None
        if not self._is_paused():
            return message
        self._rest(message)
        return None

    def _rest(self, *messages: CapabilityMessage) -> None:
        """A paused worker takes nothing and gives back what has not started, so that it runs elsewhere."""
        assert self.member is not None
        if self.member.claims.is_open:
            self._resting = True
            self.member.claims.close()
        for message in messages:
            self.release(message.attempts)

    def consumer_left(self, queue_name: str) -> None:
        """Nobody waits for the queue's messages for now: the worker is paused, or another consumer comes."""
        if self.member is not None and self._is_paused():
            self._rest(*self._drained(queue_name))

    def _drained(self, queue_name: str) -> Iterator[CapabilityMessage]:
        while True:
            try:
                yield self._waiting[queue_name].get_nowait()
            except queue.Empty:
                return

    def consumer_came(self) -> None:
        """A worker that was paused takes messages again."""
        if self._resting and self.member is not None:
            self._resting = False
            self.member.claims.open(self.member.claims.capacity)
            with as_dramatiq():
                self.member.claims.claim()

    def stop(self) -> None:
        """Nothing new is taken, whatever consumers come; what runs goes on."""
        self._resting = False
        if self.member is not None:
            self.member.drain()

    def _set_aside(self, attempt: Attempt, error: Exception) -> None:
        """Ends it without claiming: a queue full of such records must not be walked by recursion."""
        assert self.member is not None
        log.error("job %s cannot be read and is set aside: %s", attempt.id, error)
        fields = {"error": error_field(type(error).__name__, str(error))}
        ending = Ending(attempt.id, attempt.token, "failed", "undecodable", fields=fields)
        try:
            self.member.claims.commit((attempt,), ending, claim_next=False)
        except GpulayerError as refused:
            self._let_go((attempt,), refused)

    def commit(self, attempts: Sequence[Attempt], ending: AnyEnding, needs: Iterable[Any] = ()) -> None:
        """Ends attempts, several where they are calls of one ride. What the queue refuses to write ends as a failure
        that says so."""
        assert self.member is not None
        try:
            with self._worth_another_try():
                self.member.claims.commit(attempts, ending, needs)
        except (Unavailable, NotAllowed) as error:
            self._let_go(attempts, error)
        except ReplyError as error:
            for attempt in attempts:
                self._end_plainly(attempt, error)

    def commit_some(self, calls: Calls) -> bool:
        """Ends calls of a ride that goes on; False where that is to be told again with its other calls."""
        assert self.member is not None
        try:
            self.member.claims.commit(calls.attempts, calls.ending, claim_next=False)
        except GpulayerError:
            return False
        return True

    def _end_plainly(self, attempt: Attempt, refusal: ReplyError) -> None:
        assert self.member is not None
        log.error("job %s: the queue refuses its report: %s", attempt.id, refusal)
        fields = {"error": error_field("ReportRefused", str(refusal))}
        plain = Ending(attempt.id, attempt.token, "failed", "result_error", fields=fields)
        try:
            with self._worth_another_try():
                self.member.claims.commit((attempt,), plain)
        except GpulayerError as error:
            self._let_go((attempt,), error)

    def release(self, attempts: Iterable[Attempt], how: str = "returned") -> None:
        """Gives attempts back; those that are not held any more are left alone."""
        assert self.member is not None
        held = [each for each in attempts if self.member.attempts.get(each.id) is each]
        if not held:
            return
        try:
            with self._worth_another_try():
                answers = self.member.claims.release(held, how)
        except GpulayerError as error:
            self._let_go(held, error)
            return
        for attempt, answer in zip(held, answers, strict=True):
            if isinstance(answer, GpulayerError):
                self._let_go((attempt,), answer)

    @contextmanager
    def _worth_another_try(self) -> Iterator[None]:
        """What passes, or an operator can mend, is what Dramatiq calls a failed connection: it tries again."""
        try:
            yield
        except (Unavailable, NotAllowed) as error:
            if self.hurried:
                raise
            raise ConnectionFailed(str(error)) from error

    def _let_go(self, attempts: Iterable[Attempt], error: GpulayerError) -> None:
        """No longer listed in a heartbeat, so that the queue takes them back."""
        assert self.member is not None
        for attempt in attempts:
            log.error("job %s: its end cannot be told and it will run again: %s", attempt.id, error)
            self.member.attempts.remove(attempt)


class CapabilityConsumer(Consumer):
    """Dramatiq's view of one logical queue. It keeps no state: a newer consumer can end what an older one fetched."""

    def __init__(self, delivery: Delivery, queue_name: str, timeout_ms: int) -> None:
        self.delivery, self.queue_name, self.timeout_s = delivery, queue_name, timeout_ms / 1000
        delivery.consumer_came()

    def __next__(self) -> MessageProxy | None:
        return self.delivery.take(self.queue_name, self.timeout_s)

    def ack(self, message: MessageProxy) -> None:
        self._end(message)

    def nack(self, message: MessageProxy) -> None:
        self._end(message)

    def _end(self, message: MessageProxy) -> None:
        assert isinstance(message, CapabilityMessage)
        if message.outcome.verdict == "released":
            self.delivery.release(message.attempts, message.outcome.reason)
            return
        if calls := message.outcome.calls:
            self.delivery.commit(calls.attempts, calls.ending)
        else:
            ending = ending_of(message, self.delivery.keep_dead_ms)
            self.delivery.commit((message.attempt,), ending, message.outbox.needs)
        self.delivery.release(message.attempts)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        for message in messages:
            assert isinstance(message, CapabilityMessage)
            self.delivery.release(message.attempts)

    def close(self) -> None:
        """Messages that were granted and not fetched stay for the next consumer of the queue, unless that is paused."""
        self.delivery.consumer_left(self.queue_name)


@contextmanager
def as_dramatiq() -> Iterator[None]:
    """A queue that cannot be reached is what Dramatiq calls a failed connection; it knows how to retry that."""
    try:
        yield
    except QueueUnreachable as error:
        raise ConnectionFailed(str(error)) from error


def decode(attempt: Attempt) -> Message[Any]:
    """The message of a grant, with the options that its retries have left."""
    message: Message[Any] = Message.decode(attempt.grant.spec)
    if message.message_id != _message_id(attempt.id):
        raise ValueError(f"the record names job {message.message_id}")
    types = {"args": (list, tuple), "kwargs": dict, "options": dict, "actor_name": str, "queue_name": str}
    for name, kind in types.items():
        if not isinstance(getattr(message, name), kind):  # type: ignore[arg-type]
            raise TypeError(f"its {name} is a {type(getattr(message, name)).__name__}")
    if attempt.grant.options:
        message.options.update(loads(attempt.grant.options))
    return message


def _message_id(attempt_id: str) -> str:
    """A chunk of an array is `<id>/<n>`; a message that was enqueued again while it ran is `<id>~<n>`."""
    return attempt_id.partition("/")[0].partition("~")[0]


def ending_of(message: CapabilityMessage, keep_dead_ms: int) -> Ending | ItemsEnding:
    """How the attempt ends: a retry if middleware asked for one, else what its runner said, else success or failure."""
    outbox, outcome, attempt = message.outbox, message.outcome, message.attempt
    if outcome.items is not None:
        return outcome.items
    blocks = [entry.submission(attempt.grant.owner) for entry in outbox.entries]
    fields = dict(outcome.fields)
    if outbox.callbacks:
        fields["barrier"] = f"{outbox.barrier} {len(outbox.callbacks)}"
    if outbox.retry is not None:
        options = outbox.retry.message.options
        fields.update(options=dumps(options), retries=int(options.get("retries", 0)))
        return Ending(
            attempt.id,
            attempt.token,
            "retry",
            delay_ms=outbox.retry.delay_ms,
            fields=fields,
            outbox=blocks,
        )
    if outcome.verdict:
        verdict, reason = outcome.verdict, outcome.reason
    elif message.failed or message._exception is not None:
        verdict, reason = "failed", "user_error"
        fields.setdefault("error", _error_of(message))
        fields["keep_ms"] = keep_dead_ms
    else:
        verdict, reason = "succeeded", ""
    return Ending(attempt.id, attempt.token, verdict, reason, fields=fields, outbox=blocks)


def _error_of(message: CapabilityMessage) -> bytes:
    exception = message._exception
    if exception is None:
        return error_field("Failed", "the message was rejected", message.options.get("traceback", ""))
    return error_field(type(exception).__name__, str(exception), message.options.get("traceback", ""))


def error_field(type_name: str, text: str, traceback: str = "", **more: Any) -> bytes:
    """An error as a job's record keeps it: type name, message and traceback, never an object."""
    return dumps({"type": type_name, "message": text, "traceback": traceback, **more})


def dumps(value: Mapping[str, Any]) -> bytes:
    import orjson

    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS, default=str)


def loads(data: bytes) -> dict[str, Any]:
    import orjson

    return dict(orjson.loads(data))
