"""Reads a job's output: its live tail while it runs, the whole log from the store afterwards.

Pieces come in the order in which they were written, each with its stream, every byte once. Following ends with the job:
its end is told by the queue, not polled, and what was written before it is read first. A tail that was cut, because
the job wrote faster than it was shipped or read, is told in a piece of its own; who wants the output `whole` gets what
comes behind the cut when the job has ended, from the log that is complete.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator

from gpulayer.groups import refuse_group
from gpulayer.log_tail import (
    COUNT,
    ERR,
    FIRST_SILENCE_S,
    HELD_BACK,
    HERE,
    NOTE,
    OUT,
    PROGRESS,
    PROGRESS_S,
    STARTED,
    WAITS,
    WAITS_S,
    Piece,
    Reading,
    Tail,
    finished,
    kept_log,
)
from gpulayer.session import Session
from gpulayer_broker import functions
from gpulayer_broker.connection import Link
from gpulayer_broker.damage import whole as number
from gpulayer_broker.errors import QueueUnreachable, UsageError
from gpulayer_broker.job import QUEUED, JobRecord
from gpulayer_broker.log_lines import Lines

__all__ = [
    "ERR",
    "HELD_BACK",
    "HERE",
    "NOTE",
    "OUT",
    "PROGRESS",
    "STARTED",
    "WAITS",
    "Lines",
    "Piece",
    "Reading",
    "lines",
    "read_log",
]

SILENCE_S = 5.0


def read_log(
    session: Session,
    job_id: str,
    *,
    rank: int = 0,
    follow: bool = False,
    progress: bool = False,
    whole: bool = False,
    marked: bool = False,
    since_ms: int = 0,
) -> Iterator[Piece]:
    """What the job has written; with `follow`, also what it will write, until it ends. See Reading."""
    refuse_group(job_id)
    reading = Reading(rank, follow, progress, whole, marked, since_ms)
    record = session.attempt(lambda queue: queue.record(job_id))
    if rank:
        _refuse_rank(session, record, rank)
    if record.is_array:
        from gpulayer.array_logs import read_array_log

        yield from read_array_log(session, record, reading)
    elif record.final:
        if follow and record.worker:  # as whoever was there in time has been told
            yield Piece(STARTED, record.worker.encode())
        yield from finished(session, record, rank, since_ms=since_ms)
    elif follow:
        yield from _Follower(session, job_id, reading).pieces(record)
    else:
        key = session.queue.keys.log(job_id, record.attempt, rank)
        yield from Tail(key, since_ms=since_ms).rest(session.queue.link)


def _refuse_rank(session: Session, record: JobRecord, rank: int) -> None:
    raw = session.attempt(lambda queue: queue.link.call("HGET", queue.keys.job(record.id), "ranks"))
    ranks = number(raw) or 1
    if rank >= ranks:
        raise UsageError(
            f"job {record.id} has no rank {rank}: it has {ranks}, counted from 0",
            job_id=record.id,
            value=rank,
        )


def lines(pieces: Iterable[Piece]) -> Iterator[str]:
    """The output as lines, each stream's own, and GPUlayer's notes where they belong."""
    streams: dict[str, Lines] = {}
    for piece in pieces:
        if piece.stream == NOTE:
            yield piece.data.decode()
        elif piece.stream in (OUT, ERR):
            yield from streams.setdefault(piece.stream, Lines()).feed(piece.data)
    for stream in streams.values():
        yield from stream.rest()


class _Follower:
    """Follows one job through its attempts; a notice of the queue's says when it has ended."""

    def __init__(self, session: Session, job_id: str, reading: Reading) -> None:
        self._session = session
        self._job_id = job_id
        self._reading = reading
        self._client = f"follow-{secrets.token_hex(8)}"
        self._over = False
        self._marked = not reading.marked
        self._announced = 0
        self._silence_s = FIRST_SILENCE_S
        self._most_silence_s = PROGRESS_S if reading.progress else SILENCE_S
        self._progress = ""
        self._looked_s = 0.0
        self._begun_s = time.monotonic()

    def pieces(self, record: JobRecord) -> Iterator[Piece]:
        self._attempt = max(1, record.attempt + (record.state == QUEUED))
        tail = self._tail()
        link = self._session.link()
        try:
            self._watch()
            yield from self._announce(record)
            while not self._over:
                try:
                    yield from self._turn(link, tail)
                except QueueUnreachable:
                    link.close()
                    link = self._reconnected()
                if tail.ended and not self._over:
                    yield from self._behind_the_cut(link, tail)
                    tail = self._next_attempt(tail)
            yield from self._remaining(link, tail)
        finally:
            link.close()

    def _remaining(self, link: Link, tail: Tail) -> Iterator[Piece]:
        """What was written before the end: by the attempt that was followed, and by any after it."""
        record = self._record()
        yield from self._announce(record)
        yield from tail.rest(link)
        yield from self._behind_the_tail(link, tail, record)
        while self._attempt < record.attempt:
            self._attempt += 1
            tail = self._tail()
            yield from tail.rest(link)
            yield from self._behind_the_tail(link, tail, record)

    def _behind_the_tail(self, link: Link, tail: Tail, record: JobRecord) -> Iterator[Piece]:
        """What the tail does not have: behind a cut, or written while the queue was away until the job's end."""
        if tail.cut is not None:
            yield from self._behind_the_cut(link, tail)
            return
        wanted = self._reading
        kept = kept_log(record, wanted.rank)
        if kept and record.final and record.attempt == self._attempt and int(kept["size"]) > tail.offset:
            yield from finished(self._session, record, wanted.rank, tail.offset, since_ms=wanted.since_ms)

    def _tail(self, begin: int = 0, *, whole: bool = True) -> Tail:
        """The tail of the attempt that is followed."""
        wanted = self._reading
        key = self._session.queue.keys.log(self._job_id, self._attempt, wanted.rank)
        return Tail(key, begin, whole=whole and wanted.whole, since_ms=wanted.since_ms)

    def _behind_the_cut(self, link: Link, tail: Tail) -> Iterator[Piece]:
        """What an attempt that is over wrote behind a cut: all of it, if the job ended with this attempt."""
        if tail.cut is None:
            return
        begin, tail.cut = tail.cut, None
        record, wanted = self._record(), self._reading
        if record.final and record.attempt == self._attempt:
            yield from finished(self._session, record, wanted.rank, begin, since_ms=wanted.since_ms)
        else:
            yield from self._tail(begin, whole=False).rest(link)

    def _reconnected(self) -> Link:
        self._session.healed()
        self._watch()
        return self._session.link()

    def _record(self) -> JobRecord:
        return self._session.attempt(lambda queue: queue.record(self._job_id))

    def _watch(self) -> None:
        call = functions.watch(self._client, [self._job_id])
        self._over = bool(self._session.attempt(lambda queue: queue.run(call)))

    def _announce(self, record: JobRecord) -> Iterator[Piece]:
        """Says once an attempt on which worker it runs, and how far it is when that has changed."""
        self._looked_s = time.monotonic()
        if record.state != QUEUED and record.attempt > self._announced:
            self._announced = record.attempt
            yield Piece(STARTED, record.worker.encode())
        if self._reading.progress and record.progress != self._progress:
            self._progress = record.progress
            yield Piece(PROGRESS, record.progress.encode())

    def _turn(self, link: Link, tail: Tail) -> Iterator[Piece]:
        """Waits for output or the end, whichever comes first."""
        if not self._marked:
            yield from tail.rest(link)
            self._marked = True
            yield Piece(HERE, b"")
        done_key = self._session.queue.keys.done(self._client)
        block = ("XREAD", "COUNT", COUNT, "BLOCK", int(self._silence_s * 1000))
        reply = link.block(*block, "STREAMS", tail.key, done_key, tail.last, "0-0", timeout_s=self._silence_s)
        if not reply:
            yield from self._after_silence(tail)
            return
        if self._announced < self._attempt or (
            self._reading.progress and time.monotonic() - self._looked_s > PROGRESS_S
        ):
            yield from self._announce(self._record())
        for key, entries in reply:
            if key == tail.key.encode():
                yield from tail.take(entries)
            else:
                self._over = True

    def _after_silence(self, tail: Tail) -> Iterator[Piece]:
        """Looks again, less and less often; an attempt that wrote nothing has no end in its log."""
        self._session.tend()
        self._watch()
        record = self._record()
        yield from self._announce(record)
        if record.state == QUEUED and time.monotonic() - self._begun_s > WAITS_S:
            yield Piece(WAITS, b"")
        tail.ended = tail.ended or record.attempt > self._attempt
        self._silence_s = min(self._most_silence_s, self._silence_s * 2)

    def _next_attempt(self, tail: Tail) -> Tail:
        record = self._record()
        self._silence_s = FIRST_SILENCE_S
        if record.final:
            self._over = True
            return tail
        self._attempt += 1
        return self._tail()
