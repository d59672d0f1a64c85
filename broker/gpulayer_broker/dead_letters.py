"""Messages of an app that ended badly: read a page at a time, and sent again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dramatiq.errors import DecodeError
from dramatiq.message import Message

from gpulayer_broker.consumer import loads
from gpulayer_broker.job import JobRecord
from gpulayer_broker.queue import Queue

PAGE = 100
# What retries left in a message's options: sent again, it has all its retries before it.
_LEFT_BEHIND = ("retries", "traceback", "requeue_timestamp")


@dataclass(frozen=True)
class DeadLetter:
    """A message that ended badly. `message` is None where its bytes cannot be read; `reason` is the end reason."""

    id: str
    message: Message[Any] | None
    died_ms: int
    reason: str
    error_type: str
    error: str
    traceback: str


def read(queue: Queue, queue_name: str, *, most: int, skip: int = 0) -> list[DeadLetter]:
    """Dead letters of a queue, those that died first coming first."""
    key = queue.keys.dead(queue_name)
    ids = [raw.decode() for raw in queue.link.call("ZRANGE", key, skip, skip + most - 1)]
    return [_letter(record) for record in queue.records(ids) if record is not None]


def all_of(queue: Queue, queue_name: str) -> Iterator[DeadLetter]:
    """Those that are there now, a page at a time. What the reader requeues leaves; what dies meanwhile is left out."""
    left, skip = int(queue.link.call("ZCARD", queue.keys.dead(queue_name))), 0
    while left > 0 and (page := read(queue, queue_name, most=min(PAGE, left), skip=skip)):
        yield from page
        left -= len(page)
        skip += sum(letter.message is None for letter in page)


def _letter(record: JobRecord) -> DeadLetter:
    error = loads(record.error) if record.error else {}
    return DeadLetter(
        id=record.id,
        message=_message(record),
        died_ms=record.ended_ms or 0,
        reason=record.end_reason,
        error_type=str(error.get("type", "")),
        error=str(error.get("message", "")),
        traceback=str(error.get("traceback", "")),
    )


def _message(record: JobRecord) -> Message[Any] | None:
    try:
        message: Message[Any] = Message.decode(record.spec)
    except DecodeError:
        return None
    return message.copy(
        options={name: value for name, value in message.options.items() if name not in _LEFT_BEHIND}
    )
