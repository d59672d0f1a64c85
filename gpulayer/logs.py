"""Reads a job's output: its live tail while it runs, the whole log from the store afterwards.

Pieces come in the order in which they were written, each with its stream, every byte once. Following ends with the job:
its end is told by the queue, not polled, and what was written before it is read first. A tail that was cut, because
the job wrote faster than it was shipped or read, is told in a piece of its own; who wants the output `whole` gets what
comes behind the cut when the job has ended, from the log that is complete.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpulayer.session import Session
from gpulayer_broker import functions
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.job import QUEUED, JobRecord
from gpulayer_broker.units import format_size

OUT, ERR = "out", "err"
# GPUlayer's own: something to know, the worker that an attempt runs on, how far the job says that it is (JSON).
NOTE, STARTED, PROGRESS = "note", "started", "progress"
# Nothing was heard for a while of a job that has not begun: who follows it may want to know why.
WAITS = "waits"
SILENCE_S = 5.0
FIRST_SILENCE_S = 0.2
# So long a job may wait before that is worth a word.
WAITS_S = 2.0
# How often a job's progress is looked at, where it is shown.
PROGRESS_S = 1.0
COUNT = 200
HELD_BACK = "output came faster than it could be followed: what is next comes when the job has ended"
INDEX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one stream: out, err, or GPUlayer's own (note, started, progress, waits)."""

    stream: str
    data: bytes


def read_log(
    session: Session,
    job_id: str,
    *,
    rank: int = 0,
    follow: bool = False,
    progress: bool = False,
    whole: bool = False,
) -> Iterator[Piece]:
    """What the job has written; with `follow`, also what it will write, until it ends, and its `progress` if wanted.

    `whole` misses nothing, at a price: behind a cut nothing more is given before the end.
    """
    record = session.attempt(lambda queue: queue.record(job_id))
    if record.final:
        yield from _finished(session, record, rank)
    elif follow:
        yield from _Follower(session, job_id, rank, progress, whole).pieces(record)
    else:
        yield from _Tail(record.attempt, rank).rest(session, session.queue.link, job_id)


class Lines:
    """One stream's lines out of its pieces; of a line that was redrawn by carriage returns only what was last drawn.

    `\\r\\n` ends a line as `\\n` does. What was drawn over is not kept: a progress bar of any length takes the room of
    one drawing. Each byte is looked at once, however small the pieces of a long line are.
    """

    def __init__(self) -> None:
        self._drawn: list[bytes] = []
        self._returned = False

    def feed(self, data: bytes) -> Iterator[str]:
        """The lines that end in the data."""
        *whole, rest = data.split(b"\n")
        for each in whole:
            self._draw(each)
            yield self._line()
        self._draw(rest)

    def rest(self) -> Iterator[str]:
        """The last line, if no newline ended it."""
        if self._drawn or self._returned:
            yield self._line()

    def _draw(self, data: bytes) -> None:
        text = data.rstrip(b"\r")
        if text:
            _, redrawn, last = text.rpartition(b"\r")
            if redrawn or self._returned:
                self._drawn.clear()
            self._drawn.append(last)
            self._returned = False
        self._returned = self._returned or len(data) > len(text)

    def _line(self) -> str:
        line = b"".join(self._drawn).decode("utf-8", "replace")
        self._drawn, self._returned = [], False
        return line


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


# A finished job -----------------------------------------------------------------------------------------------------


def _finished(session: Session, record: JobRecord, rank: int, begin: int = 0) -> Iterator[Piece]:
    """The last attempt's output, from an offset on."""
    kept = json.loads(record.logs) if record.logs else {}
    named = kept.get(str(rank))
    if named is None:
        yield from _Tail(record.attempt, rank, begin).rest(session, session.queue.link, record.id)
        return
    store = session.store
    data = store.read_bytes(str(named["sha256"]), int(named["size"]))
    index = store.read_bytes(str(named["index_sha256"]), INDEX_BYTES)
    for line in index.splitlines():
        offset, length, stream = json.loads(line)
        if offset + length > begin:
            yield Piece(str(stream), data[max(offset, begin) : offset + length])


# A live tail --------------------------------------------------------------------------------------------------------


class _Tail:
    """One attempt's live tail, read from where the last reading ended; `begin` is the offset of what is wanted.

    With `whole` it gives nothing behind a cut, and `cut` is the offset where it stopped.
    """

    def __init__(self, attempt: int, rank: int, begin: int = 0, *, whole: bool = False) -> None:
        self.attempt = attempt
        self.rank = rank
        self.ended = False
        self.cut: int | None = None
        self._whole = whole
        self._last = "0-0"
        self._offset = begin

    def key(self, session: Session, job_id: str) -> str:
        return session.queue.keys.log(job_id, self.attempt, self.rank)

    @property
    def last(self) -> str:
        """The id of the last entry that was read."""
        return self._last

    def take(self, entries: Sequence[Any]) -> Iterator[Piece]:
        """The pieces of entries as XREAD gives them."""
        for entry_id, values in entries:
            self._last = entry_id.decode()
            fields = dict(zip(values[::2], values[1::2], strict=True))
            if b"end" in fields:
                self.ended = True
                continue
            if self.cut is None:
                top = int(entry_id.partition(b"-")[0])
                yield from self._taken(fields[b"s"].decode(), fields[b"d"], top)

    def _taken(self, stream: str, data: bytes, top: int) -> Iterator[Piece]:
        """The bytes that end at the offset `top`, without those that are known."""
        lost = top - len(data) - self._offset
        if lost > 0 and self._whole:
            self.cut = self._offset
            yield Piece(NOTE, HELD_BACK.encode())
            return
        if lost > 0:
            yield Piece(NOTE, f"{format_size(lost)} of output are not in the live tail".encode())
        if top > self._offset:
            yield Piece(stream, data[max(0, -lost) :])
            self._offset = top

    def rest(self, session: Session, link: Link, job_id: str) -> Iterator[Piece]:
        """What is there now."""
        while not self.ended:
            reply = link.call("XREAD", "COUNT", COUNT, "STREAMS", self.key(session, job_id), self._last)
            if not reply:
                return
            yield from self.take(reply[0][1])


class _Follower:
    """Follows one job through its attempts; a notice of the queue's says when it has ended."""

    def __init__(self, session: Session, job_id: str, rank: int, progress: bool, whole: bool) -> None:
        self._session = session
        self._job_id = job_id
        self._rank = rank
        self._whole = whole
        self._client = f"follow-{secrets.token_hex(8)}"
        self._over = False
        self._announced = 0
        self._silence_s = FIRST_SILENCE_S
        self._most_silence_s = PROGRESS_S if progress else SILENCE_S
        self._with_progress = progress
        self._progress = ""
        self._looked_s = 0.0
        self._begun_s = time.monotonic()

    def pieces(self, record: JobRecord) -> Iterator[Piece]:
        tail = self._tail(max(1, record.attempt + (record.state == QUEUED)))
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

    def _remaining(self, link: Link, tail: _Tail) -> Iterator[Piece]:
        """What was written before the end: by the attempt that was followed, and by any after it."""
        record = self._record()
        yield from self._announce(record)
        yield from tail.rest(self._session, link, self._job_id)
        yield from self._behind_the_cut(link, tail)
        for attempt in range(tail.attempt + 1, record.attempt + 1):
            tail = self._tail(attempt)
            yield from tail.rest(self._session, link, self._job_id)
            yield from self._behind_the_cut(link, tail)

    def _tail(self, attempt: int) -> _Tail:
        return _Tail(attempt, self._rank, whole=self._whole)

    def _behind_the_cut(self, link: Link, tail: _Tail) -> Iterator[Piece]:
        """What an attempt that is over wrote behind a cut: all of it, if the job ended with this attempt."""
        if tail.cut is None:
            return
        begin, tail.cut = tail.cut, None
        record = self._record()
        if record.final and record.attempt == tail.attempt:
            yield from _finished(self._session, record, self._rank, begin)
        else:
            yield from _Tail(tail.attempt, self._rank, begin).rest(self._session, link, self._job_id)

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
        if self._with_progress and record.progress != self._progress:
            self._progress = record.progress
            yield Piece(PROGRESS, record.progress.encode())

    def _turn(self, link: Link, tail: _Tail) -> Iterator[Piece]:
        """Waits for output or the end, whichever comes first."""
        keys = self._session.queue.keys
        log_key, done_key = tail.key(self._session, self._job_id), keys.done(self._client)
        block = ("XREAD", "COUNT", COUNT, "BLOCK", int(self._silence_s * 1000))
        reply = link.block(*block, "STREAMS", log_key, done_key, tail.last, "0-0", timeout_s=self._silence_s)
        if not reply:
            yield from self._after_silence(tail)
            return
        if self._announced < tail.attempt or (
            self._with_progress and time.monotonic() - self._looked_s > PROGRESS_S
        ):
            yield from self._announce(self._record())
        for key, entries in reply:
            if key == log_key.encode():
                yield from tail.take(entries)
            else:
                # An array tells of its pages too, which are no end of it.
                self._over = any(b"items" not in values[1::2] for _, values in entries)

    def _after_silence(self, tail: _Tail) -> Iterator[Piece]:
        """Looks again, less and less often; an attempt that wrote nothing has no end in its log."""
        self._watch()
        record = self._record()
        yield from self._announce(record)
        if record.state == QUEUED and time.monotonic() - self._begun_s > WAITS_S:
            yield Piece(WAITS, b"")
        tail.ended = tail.ended or record.attempt > tail.attempt
        self._silence_s = min(self._most_silence_s, self._silence_s * 2)

    def _next_attempt(self, tail: _Tail) -> _Tail:
        record = self._record()
        self._silence_s = FIRST_SILENCE_S
        if record.final:
            self._over = True
            return tail
        return self._tail(tail.attempt + 1)
