"""One attempt's output: its live tail in the queue while it runs, its whole log from the store afterwards.

Pieces come in the order in which they were written, each with its stream, every byte once. What a tail has lost is told
in a piece of its own. What is older than `since_ms` is left out, as far as the queue and the store know when it came.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpulayer.session import Session
from gpulayer_broker.connection import Link
from gpulayer_broker.damage import whole as number
from gpulayer_broker.damage import words
from gpulayer_broker.errors import BlobCorrupt
from gpulayer_broker.job import JobRecord
from gpulayer_broker.units import format_size

OUT, ERR = "out", "err"
# GPUlayer's own: something to know, the worker that an attempt runs on, how far the job says that it is (JSON).
NOTE, STARTED, PROGRESS = "note", "started", "progress"
# Nothing was heard for a while of a job that has not begun: who follows it may want to know why.
WAITS = "waits"
# Everything that was there when the following began has been given.
HERE = "here"
COUNT = 200
HELD_BACK = "output came faster than it could be followed: what is next comes when the job has ended"
INDEX_BYTES = 64 * 1024 * 1024
FIRST_SILENCE_S = 0.2
# So long a job may wait before that is worth a word.
WAITS_S = 2.0
# How often a job's progress is looked at, where it is shown.
PROGRESS_S = 1.0


@dataclass(frozen=True)
class Reading:
    """What is wanted of a job's output.

    `progress` tells how far a followed job is. `whole` misses nothing, at a price: behind a cut nothing more is given
    before the end. `marked` has a piece HERE between what was there and what came while it was followed.
    """

    rank: int = 0
    follow: bool = False
    progress: bool = False
    whole: bool = False
    marked: bool = False
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of one stream: out, err, or GPUlayer's own (note, started, progress, waits, here)."""

    stream: str
    data: bytes


class Tail:
    """One attempt's live tail, read from where the last reading ended; `begin` is the offset of what is wanted.

    With `whole` it gives nothing behind a cut, and `cut` is the offset where it stopped.
    """

    def __init__(self, key: str, begin: int = 0, *, whole: bool = False, since_ms: int = 0) -> None:
        self.key = key
        self.ended = False
        self.cut: int | None = None
        self._whole = whole
        self._since_ms = since_ms
        self._last = "0-0"
        self._offset = begin

    @property
    def last(self) -> str:
        """The id of the last entry that was read."""
        return self._last

    @property
    def offset(self) -> int:
        """Where in the attempt's output the reading stands."""
        return self._offset

    def take(self, entries: Sequence[Any]) -> Iterator[Piece]:
        """The pieces of entries as XREAD gives them."""
        for entry_id, values in entries:
            self._last = entry_id.decode()
            fields = dict(zip(values[::2], values[1::2], strict=True))
            if b"end" in fields:
                self.ended = True
                continue
            top = int(entry_id.partition(b"-")[0])
            if (number(fields.get(b"t")) or self._since_ms) < self._since_ms:
                self._offset = max(self._offset, top)
            elif self.cut is None:
                yield from self._taken(words(fields[b"s"]), fields[b"d"], top)

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

    def rest(self, link: Link) -> Iterator[Piece]:
        """What is there now."""
        while not self.ended:
            reply = link.call("XREAD", "COUNT", COUNT, "STREAMS", self.key, self._last)
            if not reply:
                return
            yield from self.take(reply[0][1])


def kept_log(record: JobRecord, rank: int) -> dict[str, Any] | None:
    """What the store has of a rank's whole log."""
    named: dict[str, Any] | None = (json.loads(record.logs) if record.logs else {}).get(str(rank))
    return named


def finished(
    session: Session, record: JobRecord, rank: int, begin: int = 0, *, since_ms: int = 0
) -> Iterator[Piece]:
    """The last attempt's output, from an offset on; BlobCorrupt where the record or the index of its log is damaged."""
    try:
        yield from _finished(session, record, rank, begin, since_ms)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BlobCorrupt(
            f"the log of job {record.id} cannot be read: its record or its index is damaged ({type(error).__name__})",
            job_id=record.id,
        ) from None


def _finished(session: Session, record: JobRecord, rank: int, begin: int, since_ms: int) -> Iterator[Piece]:
    named = kept_log(record, rank)
    if named is None:
        key = session.queue.keys.log(record.id, record.attempt, rank)
        yield from Tail(key, begin, since_ms=since_ms).rest(session.queue.link)
        return
    store = session.store
    data = store.read_bytes(str(named["sha256"]), int(named["size"]))
    index = store.read_bytes(str(named["index_sha256"]), INDEX_BYTES)
    for line in index.splitlines():
        offset, length, stream, time_ms = json.loads(line)
        if offset + length > begin and time_ms >= since_ms:
            yield Piece(str(stream), data[max(offset, begin) : offset + length])
