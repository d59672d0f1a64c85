"""`MapResult`: the jobs of one `.map`, in order or as they end.

Of an input with a length every job is submitted before `.map` returns. Of one without, at most `max_in_flight` jobs are
unfinished or unread at a time, and reading on submits more; such a result is read once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from gpulayer.handle import Job
from gpulayer_broker.errors import BadRequirement

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer.waiter import Slot

R = TypeVar("R", covariant=True)


@dataclass(frozen=True)
class Window:
    """How many jobs of an input without a length may be open, and how many are submitted at once."""

    most: int

    def __post_init__(self) -> None:
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise BadRequirement(f"max_in_flight={self.most!r}: it must be 1 or more", value=self.most)

    @property
    def step(self) -> int:
        return max(1, self.most // 2)


class MapResult(Generic[R]):
    """The results of a `.map`: iterate for them in order, or take them `.as_completed()`.

    >>> squares = square.map(range(3))
    >>> len(squares), squares.results()
    (3, [0, 1, 4])
    """

    def __init__(
        self,
        client: Client,
        batches: Iterator[list[Job[R]]],
        *,
        sized: bool,
        return_exceptions: bool,
        window: Window,
    ) -> None:
        self._client = client
        self._batches = batches
        self._return_exceptions = return_exceptions
        self._window = window
        self._sized = sized
        self._known: list[Job[R]] = [job for batch in batches for job in batch] if sized else []
        self._open: deque[Job[R]] = deque()
        self._elsewhere = 0

    @property
    def jobs(self) -> list[Job[R]]:
        """The jobs that were submitted and, of an input without a length, not yet read."""
        return list(self._known) if self._sized else list(self._open)

    def __len__(self) -> int:
        if not self._sized:
            raise TypeError("the input of this map has no length, so its result has none")
        return len(self._known)

    def __iter__(self) -> Iterator[R]:
        """The results in the order of the inputs; the first error is raised, unless return_exceptions was given."""
        if self._sized:
            yield from (self._value(job) for job in self._known)
            return
        self._fill()
        while self._open:
            yield self._value(self._open.popleft())
            self._fill()

    def results(self) -> list[R]:
        """All results, in the order of the inputs."""
        return list(self)

    def as_completed(self) -> Iterator[Job[R]]:
        """The jobs in the order in which they end; `.result()` of each is there at once."""
        waiter = self._client._waiter
        ended: SimpleQueue[Slot] = SimpleQueue()
        waiting: dict[str, list[Job[R]]] = {}
        tell = ended.put
        try:
            self._add(waiting, tell, self._known)
            while True:
                self._elsewhere = sum(map(len, waiting.values())) if not self._sized else 0
                self._fill()
                self._add(waiting, tell, [self._open.popleft() for _ in range(len(self._open))])
                if not waiting:
                    return
                slot = ended.get()
                if slot.notice is None and slot.error is not None:
                    raise slot.error
                yield from waiting.pop(slot.job_id, ())
        finally:
            self._elsewhere = 0
            for job in (job for jobs in waiting.values() for job in jobs):
                waiter.ignore(job._slot, tell)

    def cancel(self) -> int:
        """Asks for the end of all jobs that have not ended; how many those were."""
        return self._client._cancel_many([job.id for job in self.jobs])

    def _add(
        self, waiting: dict[str, list[Job[R]]], tell: Callable[[Slot], None], jobs: Iterable[Job[R]]
    ) -> None:
        for job in jobs:
            waiting.setdefault(job.id, []).append(job)
            self._client._waiter.listen(job._slot, tell)

    def _fill(self) -> None:
        """Submits further batches until as many are open as may be."""
        if self._sized:
            return
        while len(self._open) + self._elsewhere + self._window.step <= self._window.most:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._open.extend(batch)

    def _value(self, job: Job[R]) -> R:
        if not self._return_exceptions:
            return job.result()
        try:
            return job.result()
        except Exception as error:  # noqa: BLE001 - asked for: whatever a job raised stands in its place
            return cast(R, error)
