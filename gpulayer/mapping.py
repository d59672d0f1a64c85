"""`MapResult`: what becomes of the calls of one `.map`, in order or as they end.

Of an input with a length everything is submitted before `.map` returns. Of one without, at most `max_in_flight` calls
are unfinished or unread at a time, and reading on submits more; such a result is read once. `JobsResult` is a map whose
calls are jobs of their own; `arrays.py` has the other kind.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from queue import SimpleQueue
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

from gpulayer.attentive import read_for, taken
from gpulayer.edge import edge
from gpulayer.groups import is_group
from gpulayer.handing_over import Handle
from gpulayer.handle import Job, Remote, refuse_elsewhere, to_thread
from gpulayer.manner import Manner, Window
from gpulayer.opened import Opened
from gpulayer.outcome import Failure
from gpulayer.slots import Slot
from gpulayer.targets import Target
from gpulayer.watching import watched
from gpulayer_broker.errors import UsageError
from gpulayer_broker.given import Given

P = ParamSpec("P")
S = TypeVar("S", covariant=True)
R = TypeVar("R", covariant=True)


class Item(Generic[R]):
    """One ended call of a map: `index` is its place among the inputs, `job` the job that ran it.

    >>> for item in square.map(range(3)).as_completed():
    ...     print(item.index, item.state, item.result())
    """

    __slots__ = ("_read", "index", "job", "state")

    def __init__(self, index: int, job: Job[R], state: str, read: Callable[[], R | Failure]) -> None:
        self.index = index
        self.job = job
        self.state = state
        self._read = read

    def __repr__(self) -> str:
        return f"<gpulayer.Item {self.index} of {self.job.id} {self.state}>"

    def result(self) -> R:
        """What the call returned, at once; what it raised is raised here."""
        found = self._read()
        if isinstance(found, Failure):
            raise found.error
        return found


class MapResult(Handle, Generic[R]):
    """The results of a `.map`: iterate for them in order, or take them `.as_completed()`.

    Ctrl-C while it is read only stops the reading: the jobs go on, and a line says how to come back to them. A second
    Ctrl-C within two seconds cancels them.

    >>> squares = square.map(range(3))
    >>> len(squares), squares.results()
    (3, [0, 1, 4])
    """

    def __init__(self, opened: Opened, manner: Manner, *, sized: bool) -> None:
        self._opened = opened
        self._manner = manner
        self._sized = sized

    @property
    @abstractmethod
    def jobs(self) -> list[Job[R]]:
        """The jobs of the calls: one for each, or an array for many; of an input without a length the open ones."""

    @property
    @abstractmethod
    def ids(self) -> list[str]:
        """What `gl.Client().map_result(*ids)` takes it up again by, in any process."""

    @abstractmethod
    def cancel(self) -> int:
        """Asks for the end of all calls that have not ended; how many those were."""

    @abstractmethod
    def _calls(self) -> int:
        """How many calls there are so far."""

    @abstractmethod
    def _ended(self) -> int:
        """How many calls are known to have ended."""

    @abstractmethod
    def _in_order(self) -> Iterator[Callable[[], R | Failure]]:
        """A reader for each call in the order of the inputs, once it has ended."""

    @abstractmethod
    def _as_ended(self) -> Iterator[Item[R]]:
        """Each call as it ends."""

    @abstractmethod
    def _way_back(self) -> str:
        """How a person comes back to the jobs."""

    def __repr__(self) -> str:
        whole = "" if self._sized else " so far"
        ids = "".join(f" {each}" for each in self.ids[:1]) + (" …" if len(self.ids) > 1 else "")
        return f"<gpulayer.MapResult{ids}: {self._calls()} calls of {self._manner.name}{whole}>"

    def __len__(self) -> int:
        if not self._sized:
            raise TypeError("the input of this map has no length, so its result has none")
        return self._calls()

    def __iter__(self) -> Iterator[R]:
        """The results in the order of the inputs; the first error is raised, unless return_exceptions was given."""
        tolerant = self._manner.return_exceptions
        for read in watched(self, self._in_order()):
            found = read()
            if not isinstance(found, Failure):
                yield found
            elif tolerant:
                yield cast(R, found.error)
            else:
                raise found.error

    def results(self) -> list[R]:
        """All results, in the order of the inputs."""
        return list(self)

    @edge
    def then(
        self, function: Remote[Concatenate[list[R], P], S], /, *args: P.args, **kwargs: P.kwargs
    ) -> Job[S]:
        """Submits a call of a remote function with the list of all results, once all calls have succeeded.

        >>> score.map(rates).then(best).result()
        """
        call = (self, *args), kwargs
        return Job(self._opened, *self._opened.submit_call(function._packed(), call, function._plan))

    def _given(self, place: int | str, target: Target) -> Given:
        refuse_elsewhere(self, self._opened, target)
        ids = self.ids
        if len(ids) != 1 or not self._sized:
            raise UsageError(
                "only the whole result of one map with a length can be an argument: give its results()"
            )
        return Given(place, ids[0], many=True, size=len(self) if is_group(ids[0]) else 0)

    def __await__(self) -> Generator[None, None, list[R]]:
        """All results, without blocking the event loop: `await square.map(range(3))`."""
        return self._awaited().__await__()

    async def _awaited(self) -> list[R]:
        if self._sized:
            for job in self.jobs:
                await job._ended()
        gone = threading.Event()
        try:
            return await to_thread(read_for, gone, self)
        finally:
            gone.set()

    def as_completed(self) -> Iterator[Item[R]]:
        """The calls in the order in which they end; `.result()` of each is there at once."""
        return watched(self, self._as_ended())


class JobsResult(MapResult[R]):
    """A map whose calls are jobs of their own."""

    def __init__(
        self,
        opened: Opened,
        batches: Iterator[list[Job[R]]],
        manner: Manner,
        *,
        sized: bool,
        window: Window,
        group: str = "",
    ) -> None:
        super().__init__(opened, manner, sized=sized)
        self._group = group
        self._batches = batches
        self._window = window
        self._known: list[Job[R]] = [job for batch in batches for job in batch] if sized else []
        self._open: deque[Job[R]] = deque()
        self._elsewhere = 0
        self._submitted = len(self._known)
        self._read = 0

    @property
    def jobs(self) -> list[Job[R]]:
        return list(self._known) if self._sized else list(self._open)

    @property
    def ids(self) -> list[str]:
        return [self._group] if self._group and self._known else [job.id for job in self.jobs]

    def cancel(self) -> int:
        return self._opened.cancel_many([job.id for job in self.jobs])

    def _calls(self) -> int:
        return self._submitted

    def _ended(self) -> int:
        if self._sized:
            return sum(job._slot.notice is not None for job in self._known)
        return self._read

    def _way_back(self) -> str:
        if self._group:
            return f"gl.Client().map_result('{self._group}') gives their results, gpulayer wait {self._group} waits"
        return "gpulayer jobs lists them, and reading this result again waits for them"

    def _in_order(self) -> Iterator[Callable[[], R | Failure]]:
        if self._sized:
            for job in self._known:
                job._notice()
                yield job._found
            return
        self._fill()
        while self._open:
            job = self._open.popleft()
            job._notice()
            self._read += 1
            yield job._found
            self._fill()

    def _as_ended(self) -> Iterator[Item[R]]:
        waiter = self._opened.waiter
        ended: SimpleQueue[Slot] = SimpleQueue()
        waiting: dict[str, list[tuple[int, Job[R]]]] = {}
        tell, added = ended.put, 0
        try:
            added = self._add(waiting, tell, self._known, added)
            while True:
                self._fill()
                added = self._add(
                    waiting, tell, [self._open.popleft() for _ in range(len(self._open))], added
                )
                if not waiting:
                    return
                slot = taken(ended)
                if slot.notice is None:
                    assert slot.error is not None, (
                        "a slot is told when its end is known or waiting is given up"
                    )
                    raise slot.error
                for index, job in waiting.pop(slot.job_id, ()):
                    self._read += 1
                    self._elsewhere -= 1
                    yield Item(index, job, slot.notice.state, job._found)
        finally:
            self._elsewhere = 0
            for job in (job for pairs in waiting.values() for _, job in pairs):
                waiter.ignore(job._slot, tell)

    def _add(
        self,
        waiting: dict[str, list[tuple[int, Job[R]]]],
        tell: Callable[[Slot], None],
        jobs: Iterable[Job[R]],
        first: int,
    ) -> int:
        """Listens to further jobs; how many there are now."""
        for job in jobs:
            waiting.setdefault(job.id, []).append((first, job))
            self._elsewhere += 1
            self._opened.waiter.listen(job._slot, tell)
            first += 1
        return first

    def _fill(self) -> None:
        """Submits further batches until as many are open as may be."""
        if self._sized:
            return
        while len(self._open) + self._elsewhere + self._window.step <= self._window.most:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._open.extend(batch)
            self._submitted += len(batch)
