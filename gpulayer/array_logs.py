"""Reads what the calls of a warm map have written: the output of all of them, a range of calls at a time.

Workers take ranges of an array's calls; each range has a live tail of its own, kept for an hour after its end. They are
read in the order in which they were taken; of those that run meanwhile output comes as it is written. Every byte comes
once. A call has no log of its own. Following costs the queue a few commands in a turn, and turns are never closer
together than `TURN_S`, however fast the calls end.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from gpulayer.log_tail import (
    COUNT,
    FIRST_SILENCE_S,
    HERE,
    NOTE,
    PROGRESS,
    PROGRESS_S,
    WAITS,
    WAITS_S,
    Piece,
    Reading,
    Tail,
)
from gpulayer.session import Session
from gpulayer_broker import functions
from gpulayer_broker.connection import Link
from gpulayer_broker.damage import words
from gpulayer_broker.errors import GpulayerError, QueueUnreachable
from gpulayer_broker.job import FINAL, QUEUED, JobRecord

PAGE = 500
# No turn begins sooner after another: a map of tiny calls ends a range each millisecond.
TURN_S = 0.05
KEPT_S = 3600.0
NOT_KEPT = "what calls wrote that ended more than an hour ago is not kept"


def read_array_log(session: Session, record: JobRecord, reading: Reading) -> Iterator[Piece]:
    """What the calls have written; with `follow`, also what they will write, until the array ends."""
    if time.time() - record.created_ms / 1000 > KEPT_S:
        yield Piece(NOTE, NOT_KEPT.encode())
    tails = _Tails(session, record.id, reading.since_ms)
    if reading.follow and not record.final:
        yield from _Follower(session, record.id, reading, tails).pieces()
    else:
        yield from tails.look(session.queue.link)


class _Tails:
    """The tails of an array's ranges: each is opened once, and left when its range has ended and it is read."""

    def __init__(self, session: Session, array_id: str, since_ms: int) -> None:
        self._keys = session.queue.keys
        self._id = array_id
        self._since_ms = since_ms
        self._known = 0
        self.open: dict[int, Tail] = {}
        self.state = QUEUED
        self.progress = ""

    @property
    def over(self) -> bool:
        """Whether the array has ended, or is gone: then the look that saw it has read all there was."""
        return not self.state or self.state in FINAL

    def look(self, link: Link) -> Iterator[Piece]:
        """What was written since the last look."""
        keys, job = self._keys, self._keys.job(self._id)
        # In this order: a range that is counted is then among those that run, or has ended.
        facts, running, ended = _answers(
            link,
            [
                ("HMGET", job, "attempt", "state", "count"),
                ("SMEMBERS", keys.named(f"chunks:{self._id}")),
                ("HGET", keys.array(self._id), "done"),
            ],
        )
        self.state = words(facts[1])
        self.progress = json.dumps({"done": int(ended or 0), "total": int(facts[2] or 0)})
        runs = {int(chunk.rpartition(b"/")[2]) for chunk in running}
        self._open(link, int(facts[0] or 0), runs)
        for number, tail in list(self.open.items()):
            yield from tail.rest(link)
            if tail.ended or number not in runs:
                del self.open[number]

    def _open(self, link: Link, upto: int, runs: set[int]) -> None:
        """Opens the tails of ranges that are new and have written something, or may do so still."""
        for first in range(self._known + 1, upto + 1, PAGE):
            numbers = range(first, min(upto + 1, first + PAGE))
            found = _answers(link, [("EXISTS", self._key(number)) for number in numbers])
            for number, exists in zip(numbers, found, strict=True):
                if exists or number in runs:
                    self.open[number] = Tail(self._key(number), since_ms=self._since_ms)
        self._known = max(self._known, upto)

    def _key(self, number: int) -> str:
        return self._keys.log(f"{self._id}/{number}", number, 0)

    def take(self, reply: Sequence[Any]) -> Iterator[Piece]:
        """The pieces of what was read of several tails at once."""
        tails = {tail.key.encode(): tail for tail in self.open.values()}
        for key, entries in reply:
            if key in tails:
                yield from tails[key].take(entries)


class _Follower:
    """Follows an array to its end, which the queue tells."""

    def __init__(self, session: Session, array_id: str, reading: Reading, tails: _Tails) -> None:
        self._session = session
        self._id = array_id
        self._reading = reading
        self._tails = tails
        self._client = f"follow-{secrets.token_hex(8)}"
        self._done_key = session.queue.keys.done(self._client)
        self._last = "0-0"
        self._marked = not reading.marked
        self._progress = ""
        self._silence_s = FIRST_SILENCE_S
        self._begun_s = time.monotonic()

    def pieces(self) -> Iterator[Piece]:
        link = self._session.link()
        try:
            self._watch()
            while True:
                try:
                    begun_s = time.monotonic()
                    yield from self._look(link)
                    if self._tails.over:
                        return
                    yield from self._wait(link)
                    time.sleep(max(0.0, TURN_S - (time.monotonic() - begun_s)))
                except QueueUnreachable:
                    link.close()
                    self._session.healed()
                    self._watch()
                    link = self._session.link()
        finally:
            link.close()

    def _watch(self) -> None:
        call = functions.watch(self._client, [self._id])
        self._session.attempt(lambda queue: queue.run(call))

    def _look(self, link: Link) -> Iterator[Piece]:
        yield from self._tails.look(link)
        if not self._marked:
            self._marked = True
            yield Piece(HERE, b"")
        if self._reading.progress and self._tails.progress != self._progress:
            self._progress = self._tails.progress
            yield Piece(PROGRESS, self._progress.encode())

    def _wait(self, link: Link) -> Iterator[Piece]:
        """Until a running range writes, a range or the array ends, or nothing is heard for a moment."""
        tails = self._tails.open.values()
        keys, lasts = [tail.key for tail in tails], [tail.last for tail in tails]
        block = ("XREAD", "COUNT", COUNT, "BLOCK", int(self._silence_s * 1000), "STREAMS")
        reply = link.block(*block, *keys, self._done_key, *lasts, self._last, timeout_s=self._silence_s)
        if not reply:
            yield from self._after_silence()
            return
        self._silence_s = FIRST_SILENCE_S
        for key, entries in reply:
            if key == self._done_key.encode():
                self._hear(link, entries)
        yield from self._tails.take(reply)

    def _hear(self, link: Link, entries: Sequence[Any]) -> None:
        """Notices, of ends of ranges and of the array's: there is something to look at. They are not kept."""
        self._last = entries[-1][0].decode()
        link.call("XTRIM", self._done_key, "MINID", self._last)

    def _after_silence(self) -> Iterator[Piece]:
        self._session.tend()
        self._watch()
        if self._tails.state == QUEUED and time.monotonic() - self._begun_s > WAITS_S:
            yield Piece(WAITS, b"")
        self._silence_s = min(PROGRESS_S, self._silence_s * 2)


def _answers(link: Link, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
    replies = link.pipeline(commands)
    for reply in replies:
        if isinstance(reply, GpulayerError):
            raise reply
    return replies
