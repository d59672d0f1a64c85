"""How many waiting jobs a worker would take before this one, and how long the first of them has waited.

Counted are the jobs that some worker which could run this one could run too, of a higher priority or of the same and
older. Owners take turns, so that a job may start sooner than that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpulayer_broker.damage import LAST_MS, whole
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.job import QUEUED, JobRecord
from gpulayer_broker.queue import Queue

# Of a longer queue only so many are looked at, the oldest; then `more` is set.
MOST = 5000
_FIELDS = ("prio", "sig", "phase", "queued_ms", "seq")
_RUNNABLE = (b"ready", b"retrying")


@dataclass(frozen=True)
class Position:
    """`ahead` jobs come first, of which the one that has waited longest has waited `oldest_s`."""

    ahead: int
    oldest_s: float | None
    more: bool

    @property
    def brief(self) -> str:
        """The number alone."""
        return f"{'≥' if self.more else ''}{self.ahead} ahead" if self.ahead else "next"

    def __str__(self) -> str:
        from gpulayer_broker.units import format_duration

        if not self.ahead:
            return "next"
        jobs = "1 job" if self.ahead == 1 else f"{self.ahead} jobs"
        least = "at least " if self.more else ""
        oldest = (
            f", the oldest has waited {format_duration(self.oldest_s)}" if self.oldest_s is not None else ""
        )
        return f"{least}{jobs} ahead{oldest}"


def position_of(queue: Queue, record: JobRecord) -> Position | None:
    """Where the job stands; None for one that does not wait for a worker."""
    return positions_of(queue, [record]).get(record.id)


def positions_of(queue: Queue, records: Iterable[JobRecord]) -> dict[str, Position]:
    """Where each of the jobs stands that wait for a worker; the queue is looked at once."""
    asked = [each for each in records if each.state == QUEUED and each.phase.encode() in _RUNNABLE]
    if not asked:
        return {}
    line = Line(queue, {each.signature for each in asked})
    return {each.id: line.position(each) for each in asked}


class Line:
    """The jobs that wait, as they were when it was read."""

    def __init__(self, queue: Queue, signatures: set[str]) -> None:
        key, named = queue.keys.jobs(QUEUED), queue.keys.named
        self._total = int(queue.link.call("ZCARD", key))
        flat = queue.link.call("ZRANGE", key, 0, MOST - 1, "WITHSCORES")
        self._ages = dict(zip(map(bytes.decode, flat[::2]), map(float, flat[1::2]), strict=True))
        rows = _answers(queue, [("HMGET", queue.keys.job(each), *_FIELDS) for each in self._ages])
        self._rows = dict(zip(self._ages, rows, strict=True))
        known = [*({_text(row[1]) for row in rows if row[1]} | signatures)]
        sets = _answers(queue, [("SMEMBERS", named(f"classes:{signature}")) for signature in known])
        self._classes = dict(zip((each.encode() for each in known), map(set, sets), strict=True))
        self._now_ms = time.time() * 1000

    def position(self, record: JobRecord) -> Position:
        own, mine = self._ages.get(record.id, math.inf), self._classes[record.signature.encode()]
        ahead = [
            row
            for job_id, row in self._rows.items()
            if job_id != record.id and _is_ahead(row, record, own) and self._classes.get(row[1], set()) & mine
        ]
        begun_ms = [begun for row in ahead if (begun := whole(row[3], LAST_MS))]
        waits_s = [(self._now_ms - begun) / 1000 for begun in begun_ms]
        return Position(len(ahead), max(0.0, *waits_s) if waits_s else None, self._total > MOST)


def _is_ahead(row: Sequence[bytes | None], record: JobRecord, own_age: float) -> bool:
    """One of which this cannot be read is nobody's predecessor."""
    priority, age = whole(row[0]), whole(row[4])
    if row[2] not in _RUNNABLE or priority is None or age is None:
        return False
    return priority < record.priority or (priority == record.priority and age < own_age)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _answers(queue: Queue, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    replies = queue.link.pipeline(commands)
    for reply in replies:
        if isinstance(reply, GpulayerError):
            raise reply
    return replies
