"""How many waiting jobs a worker would take before this one, and how long the first of them has waited.

Counted are the jobs that some worker which could run this one could run too, of a higher priority or of the same and
older. Owners take turns, so that a job may start sooner than that.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    if record.state != QUEUED or record.phase.encode() not in _RUNNABLE:
        return None
    named, total = queue.keys.named, int(queue.link.call("ZCARD", queue.keys.jobs(QUEUED)))
    ids = queue.link.call("ZRANGE", queue.keys.jobs(QUEUED), 0, MOST - 1)
    own = float(queue.link.call("ZSCORE", queue.keys.jobs(QUEUED), record.id) or 0)
    waiting = _answers(queue, [("HMGET", queue.keys.job(each.decode()), *_FIELDS) for each in ids])
    signatures = {row[1] for row in waiting if row[1]} | {record.signature.encode()}
    sets = _answers(queue, [("SMEMBERS", named(f"classes:{sig.decode()}")) for sig in signatures])
    classes = dict(zip(signatures, map(set, sets), strict=True))
    mine = classes[record.signature.encode()]
    ahead = [
        row
        for job_id, row in zip(ids, waiting, strict=True)
        if job_id.decode() != record.id and _is_ahead(row, record, own) and classes[row[1]] & mine
    ]
    now_ms = time.time() * 1000
    waits_s = [(now_ms - int(row[3])) / 1000 for row in ahead if row[3]]
    return Position(len(ahead), max(0.0, *waits_s) if waits_s else None, total > MOST)


def _is_ahead(row: Sequence[bytes | None], record: JobRecord, own_age: float) -> bool:
    priority, _, phase, _, age = row
    if phase not in _RUNNABLE or priority is None or age is None:
        return False
    return int(priority) < record.priority or (int(priority) == record.priority and float(age) < own_age)


def _answers(queue: Queue, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    replies = queue.link.pipeline(commands)
    for reply in replies:
        if isinstance(reply, GpulayerError):
            raise reply
    return replies
