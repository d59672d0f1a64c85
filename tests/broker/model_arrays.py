"""The model's arrays: one record for many calls, handed out in ranges; each item in one place."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from gpulayer_broker.job import CANCELLED, FAILED, FINAL, QUEUED, RUNNING, SUCCEEDED
from tests.broker.model import Job, Worker
from tests.broker.model_gates import GatedModel
from tests.checker import MAX_LOSSES

CHUNK_US, CHUNK_MOST, TURN_ITEMS = 20_000, 1000, 64
TURN_US = 1_000_000
KEPT_MS = 60_000


@dataclass
class Items:
    """Where the items of an array are: from `cursor` on not begun, come back, or with an outcome."""

    cursor: int = 0
    back: list[tuple[int, int, int]] = field(default_factory=list)
    pages: dict[int, tuple[int, str]] = field(default_factory=dict)
    failed: int = 0
    since: int = 0
    mean_us: float | None = None

    @property
    def done(self) -> int:
        return sum(stop - start for start, (stop, _) in self.pages.items())

    @property
    def size(self) -> int:
        """How many are worth about twenty milliseconds; one, before any has told."""
        if self.mean_us is None:
            return 1
        return max(1, min(CHUNK_MOST, int(CHUNK_US / max(1.0, self.mean_us))))


@dataclass
class Chunk(Job):
    """A range [start, stop) of an array's items, as an attempt."""

    parent: str = ""
    start: int = 0
    stop: int = 0
    gone_ms: int | None = None


class ArrayModel(GatedModel):
    """The queue with arrays."""

    def __init__(self, fits: dict[str, dict[str, tuple[int, ...]]]) -> None:
        super().__init__(fits)
        self.items: dict[str, Items] = {}
        self.chunks: dict[str, Chunk] = {}

    def attempts(self) -> dict[str, Job]:
        """An ended range is remembered for a minute, for those who report it twice."""
        kept = {id_: c for id_, c in self.chunks.items() if c.gone_ms is None or c.gone_ms > self.now_ms}
        return self.jobs | kept

    def out(self, array: str) -> list[Chunk]:
        return [c for c in self.chunks.values() if c.parent == array and c.runs]

    # Functions ------------------------------------------------------------------------------------------------------

    def commit_items(self, chunk: str, token: str, upto: int, failed: int, took_us: int, page: str) -> str:
        c = self.attempts().get(chunk)
        if not isinstance(c, Chunk) or not self.holds(chunk, token):
            return self._refused(c, token)
        self._forgive(c.worker)
        c.reported = True
        self._drop(c)
        items = self.items[c.parent]
        if upto > c.start:
            each_us = took_us / (upto - c.start)
            items.mean_us = round(each_us if items.mean_us is None else (items.mean_us + each_us) / 2, 1)
            self._page(c, upto, failed, page)
        if upto < c.stop:
            self._give_back(c.parent, upto, c.stop, 0)
        self._settle(c.parent)
        return "ok"

    def cancel(self, job_id: str) -> str:
        if job_id in self.chunks:
            return "missing"
        j = self.jobs[job_id]
        if not j.s.count or j.state in FINAL:
            return super().cancel(job_id)
        if not j.cancel:
            j.cancel, j.entry = True, None
            for c in self.out(job_id):
                c.cancel = True
            self._settle(job_id)
        return CANCELLED if j.state in FINAL else "asked"

    def watch(self, client: str, job_id: str) -> dict[str, str]:
        return {job_id: "missing"} if job_id in self.chunks else super().watch(client, job_id)

    # Parts ----------------------------------------------------------------------------------------------------------

    def _grant(self, j: Job, w: Worker, lots: tuple[tuple[str, int], ...], token: str) -> None:
        if not j.s.count:
            super()._grant(j, w, lots, token)
            return
        items = self.items.setdefault(j.s.id, Items())
        start, stop, losses = self._next_range(j, items)
        s = replace(j.s, id=f"{j.s.id}/{j.attempt}", count=0, client="", after=(), permit="", rate="")
        c = Chunk(
            s, j.seq, RUNNING, "", attempt=j.attempt, losses=losses, parent=j.s.id, start=start, stop=stop
        )
        self.chunks[s.id] = c
        self._hold(c, w, lots, token)
        if j.state == QUEUED:
            j.state, j.phase = RUNNING, ""
            self._event(j)
        entry, j.entry = j.entry, None
        if items.back or items.cursor < j.s.count:
            j.entry = self._next_age(j, items, stop - start, entry)

    def _next_range(self, j: Job, items: Items) -> tuple[int, int, int]:
        if not items.back:
            start = items.cursor
            items.cursor = min(j.s.count, start + items.size)
            return start, items.cursor, 0
        start, end, losses = items.back.pop(0)
        stop = start + 1 if losses else min(end, start + items.size)
        if stop < end:
            items.back.insert(0, (stop, end, losses))
        return start, stop, losses

    def _next_age(self, j: Job, items: Items, taken: int, entry: int | None) -> int | None:
        """Its own, until it took its turn while others of its importance waited."""
        items.since += taken
        others = [o for o in self.jobs.values() if o.waits and o.s.priority == j.s.priority]
        took_us = items.since * (TURN_US if items.mean_us is None else items.mean_us)
        if items.since < TURN_ITEMS or took_us < TURN_US or not others:
            return entry
        items.since = 0
        self.seq += 1
        return self.seq

    def _drop(self, c: Chunk) -> None:
        self._detach(c)
        c.state, c.gone_ms = "ended", self.now_ms + KEPT_MS

    def _page(self, c: Chunk, stop: int, failed: int, page: str) -> None:
        items = self.items[c.parent]
        items.pages[c.start] = stop, page
        items.failed += failed
        j = self.jobs[c.parent]
        for client in sorted(j.watchers | ({j.s.client} - {""})):
            self.told.append((client, j.s.id, "items"))

    def _give_back(self, array: str, start: int, stop: int, losses: int) -> None:
        j = self.jobs[array]
        if j.state in FINAL or j.cancel:
            return
        self.items[array].back.append((start, stop, losses))
        if j.entry is None:
            self.seq += 1
            j.entry = self.seq

    def _settle(self, array: str) -> None:
        j, items = self.jobs[array], self.items.get(array, Items())
        if j.state in FINAL:
            return
        if items.done == j.s.count:
            self._finish(j, FAILED if items.failed else SUCCEEDED)
        elif j.cancel and not self.out(array):
            self._finish(j, CANCELLED)

    # How a range ends without a report of its items -----------------------------------------------------------------

    def _finish(self, j: Job, state: str) -> None:
        if not isinstance(j, Chunk):
            super()._finish(j, state)
            return
        self._drop(j)
        if state == CANCELLED:
            self._give_back(j.parent, j.start, j.stop, 0)
        else:
            self._page(j, j.stop, j.stop - j.start, f"!{j.stop}")
        self._settle(j.parent)

    def _later(self, j: Job, delay_ms: int) -> None:
        if isinstance(j, Chunk):
            self._back_again(j, 0)
        else:
            super()._later(j, delay_ms)

    def _again(self, j: Job, phase: str) -> None:
        if not isinstance(j, Chunk):
            super()._again(j, phase)
        elif j.cancel:
            self._finish(j, CANCELLED)
        else:
            self._back_again(j, 0)

    def _lost(self, j: Job) -> None:
        if not isinstance(j, Chunk) or j.cancel:
            super()._lost(j)
            return
        j.losses += 1
        if j.losses >= MAX_LOSSES and j.stop - j.start == 1:
            self._finish(j, FAILED)
        else:
            self._back_again(j, j.losses)

    def _back_again(self, c: Chunk, losses: int) -> None:
        self._drop(c)
        self._give_back(c.parent, c.start, c.stop, losses)
        self._settle(c.parent)
