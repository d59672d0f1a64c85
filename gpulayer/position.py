"""How many waiting jobs a worker would take before this one, and how long the first of them has waited.

Counted are the jobs that some worker which could run this one could run too, of a higher priority or of the same and
older. Owners take turns, so that a job may start sooner than that.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gpulayer_broker.damage import LAST_MS, whole
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.job import QUEUED, JobRecord
from gpulayer_broker.queue import Queue

# Of a longer queue only so many are looked at, the oldest; then `more` is set. A list of jobs looks at fewer.
MOST = 5000
OF_A_LIST = 500
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
        """The number alone; nothing where nobody is known to be ahead, nor that nobody is."""
        if not self.ahead:
            return "" if self.more else "next"
        return f"{'≥' if self.more else ''}{self.ahead} ahead"

    def __str__(self) -> str:
        from gpulayer_broker.units import format_duration

        if not self.ahead:
            return "none of the oldest jobs is ahead" if self.more else "next"
        jobs = "1 job" if self.ahead == 1 else f"{self.ahead} jobs"
        least = "at least " if self.more else ""
        oldest = (
            f", the oldest has waited {format_duration(self.oldest_s)}" if self.oldest_s is not None else ""
        )
        return f"{least}{jobs} ahead{oldest}"


def position_of(queue: Queue, record: JobRecord) -> Position | None:
    """Where the job stands; None for one that does not wait for a worker."""
    return _positions(queue, [record], MOST).get(record.id)


def positions_of(queue: Queue, records: Collection[JobRecord]) -> dict[str, Position]:
    """Where each of the jobs of a list stands that wait for a worker; the queue is looked at once.

    What that costs is bounded by the list, however long the queue is.
    """
    return _positions(queue, records, min(MOST, max(OF_A_LIST, len(records))))


def _positions(queue: Queue, records: Iterable[JobRecord], most: int) -> dict[str, Position]:
    asked = [each for each in records if each.state == QUEUED and each.phase.encode() in _RUNNABLE]
    if not asked:
        return {}
    line = Line(queue, {each.signature for each in asked}, most)
    return {each.id: line.position(each) for each in asked}


class Line:
    """The jobs that wait, as they were when it was read: the oldest `most`."""

    def __init__(self, queue: Queue, signatures: set[str], most: int) -> None:
        key, named = queue.keys.jobs(QUEUED), queue.keys.named
        self._more = int(queue.link.call("ZCARD", key)) > most
        flat = queue.link.call("ZRANGE", key, 0, most - 1, "WITHSCORES")
        self._ages = dict(zip(map(bytes.decode, flat[::2]), map(float, flat[1::2]), strict=True))
        rows = _answers(queue, [("HMGET", queue.keys.job(each), *_FIELDS) for each in self._ages])
        self._waiting = [each for each in map(_waiting, rows) if each is not None]
        known = [*({each.signature for each in self._waiting} | signatures)]
        sets = _answers(queue, [("SMEMBERS", named(f"classes:{signature}")) for signature in known])
        self._classes = dict(zip(known, map(set, sets), strict=True))
        self._rivals: dict[str, list[_Waiting]] = {}
        self._now_ms = time.time() * 1000

    def position(self, record: JobRecord) -> Position:
        """Where this job stands, whose signature was among those that were named."""
        rivals = self._rivals_of(record.signature)
        own = (record.priority, self._ages.get(record.id, math.inf))
        ahead = rivals[: bisect_left(rivals, own, key=lambda each: each.turn)]
        begun_ms = [each.begun_ms for each in ahead if each.begun_ms]
        oldest_s = max(0.0, (self._now_ms - min(begun_ms)) / 1000) if begun_ms else None
        return Position(len(ahead), oldest_s, self._more)

    def _rivals_of(self, signature: str) -> list[_Waiting]:
        """Those that a worker could take in place of a job of this signature, in the order of their turns."""
        if (found := self._rivals.get(signature)) is None:
            mine = self._classes[signature]
            rivals = (each for each in self._waiting if self._classes[each.signature] & mine)
            found = self._rivals[signature] = sorted(rivals, key=lambda each: each.turn)
        return found


@dataclass(frozen=True, slots=True)
class _Waiting:
    """One that waits: its turn is its priority and its age."""

    turn: tuple[int, float]
    signature: str
    begun_ms: int


def _waiting(row: Sequence[bytes | None]) -> _Waiting | None:
    """None for one of which this cannot be read: it is nobody's predecessor."""
    priority, signature, phase, begun, age = row
    turn = whole(priority), whole(age)
    if phase not in _RUNNABLE or not signature or turn[0] is None or turn[1] is None:
        return None
    return _Waiting((turn[0], turn[1]), _text(signature), whole(begun, LAST_MS) or 0)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _answers(queue: Queue, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    replies = queue.link.pipeline(commands)
    for reply in replies:
        if isinstance(reply, GpulayerError):
            raise reply
    return replies
