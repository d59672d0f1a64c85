"""A map whose calls are items of arrays: one record in the queue for many calls, their outcomes told a page at a time.

The waiter's thread only puts pages down; they are taken apart by whoever reads the map, a page in one loop. What may
have been missed is read from the queue, so that a map can be taken up again by its array's id in any process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from gpulayer.attentive import attentive
from gpulayer.handle import Job
from gpulayer.manner import Manner, Window
from gpulayer.mapping import Item, MapResult
from gpulayer.opened import Opened
from gpulayer.outcome import Failure, item_missing, item_value
from gpulayer.slots import Slot
from gpulayer_broker.items import ItemOutcome, read_outcomes
from gpulayer_broker.job import FAILED, SUCCEEDED

R = TypeVar("R", covariant=True)


class Part:
    """One array and what came of its items so far; `first` is its first item's place in the map."""

    def __init__(self, job: Job[Any], first: int, count: int, news: threading.Condition) -> None:
        self.job = job
        self.first = first
        self.count = count
        self.outcomes: list[ItemOutcome | None] = [None] * count
        self.order: list[int] = []
        self.over = False
        self.read = 0
        self._news = news
        self._starts: set[int] = set()
        self._arrived: deque[tuple[int, bytes]] = deque()
        self._unsure = False
        self._ended = False

    # Called by the waiter's thread ------------------------------------------------------------------------------------

    def page(self, start: int, data: bytes) -> None:
        with self._news:
            self._arrived.append((start, data))
            self._news.notify_all()

    def missed(self) -> None:
        with self._news:
            self._unsure = True
            self._news.notify_all()

    def told(self, _: Slot) -> None:
        """The array has ended, or waiting for it was given up."""
        with self._news:
            self._ended = True
            self._news.notify_all()

    # Called by who reads ----------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether `take` would learn something."""
        return not self.over and bool(self._arrived or self._unsure or self._ended)

    def expect(self) -> None:
        """An end is waited for, where waiting was given up before."""
        with self._news:
            self._ended = self._ended and self.job._slot.notice is not None

    def knows(self, number: int) -> bool:
        """Whether nothing more will be learned of an item."""
        return self.over or self.outcomes[number] is not None

    def take(self, opened: Opened) -> None:
        """Takes in what has arrived, and reads from the queue what did not arrive."""
        slot = self.job._slot
        with self._news:
            if self._ended and slot.notice is None:
                assert slot.error is not None, "a slot is told when its end is known or waiting is given up"
                raise slot.error
            ended, missing, self._unsure = self._ended, self._unsure, False
            arrived, self._arrived = self._arrived, deque()
        try:
            self._take_in(opened, arrived, ended, missing)
        except BaseException:
            self.missed()  # what was taken is read again
            raise

    def _take_in(
        self, opened: Opened, arrived: Iterable[tuple[int, bytes]], ended: bool, missing: bool
    ) -> None:
        for start, data in arrived:
            if data:
                self._keep(start, data)
            else:
                missing = True
        if missing or (ended and len(self.order) < self.count):
            self._fetch(opened)
        if len(self.order) == self.count:
            self.over = True
        elif ended:
            self._give_up()

    def _fetch(self, opened: Opened) -> None:
        pages = opened.session.attempt(lambda queue: queue.pages(self.job.id, self._starts))
        for start in sorted(pages):
            self._keep(start, pages[start])

    def _keep(self, start: int, page: bytes) -> None:
        if start in self._starts:
            return
        outcomes = self.outcomes
        for number, outcome in read_outcomes(start, page):
            if outcomes[number] is None:  # Ctrl-C may have come in the middle of the same page
                outcomes[number] = outcome
                self.order.append(number)
        self._starts.add(start)

    def _give_up(self) -> None:
        """The array is over: what has no outcome now has none."""
        self.order += [number for number, outcome in enumerate(self.outcomes) if outcome is None]
        self.over = True

    def value(self, opened: Opened, number: int) -> Any:
        """What an item came to, once that is known: its value, or Failure."""
        outcome = self.outcomes[number]
        if outcome is None:
            return Failure(item_missing(self.job.record, number))
        return item_value(opened.session, self.job.id, number, outcome, trusted=opened.trusts_workers)

    def state(self, number: int) -> str:
        """How an item ended; as its array did where nothing is known of it."""
        outcome = self.outcomes[number]
        if outcome is None:
            return self.job.state
        return SUCCEEDED if outcome.ok else FAILED


class ArrayResult(MapResult[R]):
    """A map of one array, or of several one after another."""

    def __init__(
        self,
        opened: Opened,
        arrays: Iterator[tuple[Job[R], int]],
        manner: Manner,
        *,
        sized: bool = True,
        window: Window | None = None,
    ) -> None:
        """`arrays` gives each array with the number of its items; of a map without a length, when it is asked for."""
        super().__init__(opened, manner, sized=sized)
        self._arrays = arrays
        self._window = window or Window(1)
        self._news = threading.Condition()
        self._taking = threading.Lock()
        self._parts: deque[Part] = deque()
        self._total = self._gone = 0
        while sized and self._add():
            pass

    def _add(self) -> bool:
        """One more array; False if there is none."""
        found = next(self._arrays, None)
        if found is None:
            return False
        job, count = found
        part = Part(job, self._total, count, self._news)
        self._opened.waiter.follow(job._slot, part)
        self._parts.append(part)
        self._total += count
        return True

    @property
    def jobs(self) -> list[Job[R]]:
        return [part.job for part in self._parts]

    @property
    def ids(self) -> list[str]:
        return [part.job.id for part in self._parts]

    def cancel(self) -> int:
        left = sum(part.count - len(part.order) for part in self._parts if not part.over)
        asked = self._opened.cancel_many([part.job.id for part in self._parts if not part.over])
        return left if asked else 0

    def _calls(self) -> int:
        return self._total

    def _ended(self) -> int:
        return self._gone + sum(len(part.order) for part in list(self._parts))

    def _way_back(self) -> str:
        if not self._sized:
            return "gpulayer jobs lists them, and reading this result again waits for them"
        return f"gl.Client().map_result({', '.join(repr(part.job.id) for part in self._parts)}) gives their results"

    # Reading ----------------------------------------------------------------------------------------------------------

    def _in_order(self) -> Iterator[Callable[[], R | Failure]]:
        listening: set[Part] = set()
        try:
            for part in self._walk(listening):
                for number in range(part.count):
                    if part.outcomes[number] is None:
                        self._until(partial(part.knows, number))
                    part.read += 1
                    yield partial(part.value, self._opened, number)
        finally:
            self._ignore(listening)

    def _walk(self, listening: set[Part]) -> Iterator[Part]:
        """The arrays in order; of a map without a length further ones are submitted, and read ones forgotten."""
        if self._sized:
            self._listen(listening, self._parts)
            yield from self._parts
            return
        while self._fill(listening):
            part = self._parts[0]
            yield part
            self._forget(part, listening)

    def _as_ended(self) -> Iterator[Item[R]]:
        listening: set[Part] = set()
        given: dict[Part, int] = {}
        try:
            self._listen(listening, self._parts if self._sized else ())
            while self._sized or self._fill(listening):
                if all(given.get(part) == part.count for part in self._parts):
                    return
                self._until(lambda: any(given.get(part, 0) < len(part.order) for part in self._parts))
                for part in list(self._parts):
                    yield from self._new_items(part, given)
                    if not self._sized and given[part] == part.count:
                        self._forget(part, listening)
                        del given[part]
        finally:
            self._ignore(listening)

    def _new_items(self, part: Part, given: dict[Part, int]) -> Iterator[Item[R]]:
        """Items of one array that ended since it was last looked at."""
        at = given.setdefault(part, 0)
        while at < len(part.order):
            number = part.order[at]
            at += 1
            given[part] = part.read = at
            read = partial(part.value, self._opened, number)
            yield Item(part.first + number, part.job, part.state(number), read)

    def _fill(self, listening: set[Part]) -> bool:
        """Submits further arrays until as many items are open as may be; whether any array is open."""
        window = self._window
        while sum(part.count - part.read for part in self._parts) + window.step <= window.most:
            if not self._add():
                break
        self._listen(listening, [part for part in self._parts if part not in listening])
        return bool(self._parts)

    def _forget(self, part: Part, listening: set[Part]) -> None:
        """Keeps nothing of an array that was read to its end: a map without a length may have no end."""
        self._parts.remove(part)
        self._gone += part.count
        listening.remove(part)
        self._ignore([part])

    def _until(self, known: Callable[[], object]) -> None:
        """Waits for pages until enough is known."""
        while not known():
            with self._news:
                while not (known() or any(part.has_news for part in self._parts)):
                    attentive(self._news.wait, None)
            self._take()

    def _take(self) -> None:
        """Takes in what has arrived, one thread at a time; the others look again."""
        try:
            with self._taking:
                for part in self._parts:
                    if part.has_news:
                        part.take(self._opened)
        finally:
            with self._news:
                self._news.notify_all()

    def _listen(self, listening: set[Part], parts: Iterable[Part]) -> None:
        for part in parts:
            listening.add(part)
            if part.over:
                continue
            part.expect()
            if not part.job._slot.watched:
                part.missed()
            self._opened.waiter.listen(part.job._slot, part.told)

    def _ignore(self, listening: Iterable[Part]) -> None:
        for part in listening:
            self._opened.waiter.ignore(part.job._slot, part.told)
