"""`Job`: a handle of one submitted job, to wait for it, read it and end it.

A handle holds no result: `result` reads it when it is asked for. Any process that reaches the queue can have a
handle of the same job (`gl.Client().get(id)`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, cast

from gpulayer.edge import edge
from gpulayer.handing_over import Handle
from gpulayer.opened import Opened, Packable
from gpulayer.outcome import Failure, value_of
from gpulayer.slots import Notice, Slot
from gpulayer.targets import Target
from gpulayer_broker.errors import UsageError, WaitTimeout
from gpulayer_broker.given import Given

if TYPE_CHECKING:
    import asyncio

    from gpulayer.explaining import Explanation
    from gpulayer_broker.job import JobRecord

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", covariant=True)
R = TypeVar("R", covariant=True)

RUNS_FOLDER = "gpulayer_runs"


async def to_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What the function returns, called beside the event loop."""
    import asyncio

    return await asyncio.to_thread(function, *args, **kwargs)


class Remote(Packable, Protocol[P, S]):
    """A remote function, as a continuation takes it."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> S: ...


class Job(Handle, Generic[R]):
    """One job, by its id.

    >>> job = train.delay(0.1)
    >>> job.state, job.result(timeout=60)
    ('running', 0.93)
    """

    __slots__ = ("_opened", "_slot", "id")

    def __init__(self, opened: Opened, job_id: str, slot: Slot) -> None:
        self.id = job_id
        self._opened = opened
        self._slot = slot

    def __repr__(self) -> str:
        return f"<gpulayer.Job {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def record(self) -> JobRecord:
        """What the queue holds of it now: state, worker, attempt, times."""
        return self._opened.record(self.id)

    @property
    def state(self) -> str:
        """queued, scheduled, running, succeeded, failed, cancelled or timed_out."""
        notice = self._slot.notice
        return notice.state if notice is not None else self.record.state

    @property
    def end_reason(self) -> str:
        """Why it ended: '' while it has not and when it succeeded, else user_error, worker_lost, timeout, …"""
        return self.record.end_reason

    def wait(self, timeout: float | None = None) -> str:
        """Its final state, as soon as it has one; WaitTimeout if that takes longer than `timeout` seconds."""
        notice = self._watched(timeout)
        if notice is None:
            raise self._late(timeout)
        return notice.state

    def result(self, timeout: float | None = None) -> R:
        """What the function returned; what it raised is raised here, with the remote traceback as a note.

        JobFailed, JobCancelled, JobTimedOut and WorkerLost tell of a job that came to no end of its own.
        """
        notice = self._watched(timeout)
        if notice is None:
            raise self._late(timeout)
        found = self._found()
        if isinstance(found, Failure):
            raise found.error
        return found

    def _watched(self, timeout: float | None) -> Notice | None:
        """For a person who waits: Ctrl-C ends the wait alone, and says so."""
        try:
            return self._notice(timeout)
        except KeyboardInterrupt as interrupt:
            print(f"detached: job {self.id} goes on; gpulayer cancel {self.id} ends it", file=sys.stderr)
            raise interrupt.with_traceback(None) from None

    def _notice(self, timeout: float | None = None) -> Notice | None:
        """Its end; None if that does not come in time."""
        if self._slot.notice is None:
            self._opened.waiter.wait(self._slot, timeout)
        return self._slot.notice

    def _late(self, timeout: float | None) -> WaitTimeout:
        text = f"job {self.id} has not ended within {timeout or 0:g} s; it goes on"
        return WaitTimeout(text, job_id=self.id)

    def _found(self) -> R | Failure:
        """What came of it, once it has ended."""
        notice = self._notice()
        assert notice is not None, "a wait without an end ends with the job"
        opened = self._opened
        return cast(R, value_of(opened.session, self.id, notice, trusted=opened.trusts_workers))

    @edge
    def then(self, function: Remote[Concatenate[R, P], S], /, *args: P.args, **kwargs: P.kwargs) -> Job[S]:
        """Submits a call of a remote function with what this job returns as its first argument, once it is there.

        >>> load.delay("data.csv").then(clean).then(train, epochs=3).result()
        """
        call = (self, *args), kwargs
        return Job(self._opened, *self._opened.submit_call(function._packed(), call, function._plan))

    def _given(self, place: int | str, target: Target) -> Given:
        refuse_elsewhere(self, self._opened, target)
        return Given(place, self.id)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a job's result is handed over as an argument of its own, f.delay(job), "
            "not inside another value nor to a warm map"
        )

    def __await__(self) -> Generator[None, None, R]:
        return self._awaited().__await__()

    async def _awaited(self) -> R:
        await self._ended()
        found = await to_thread(self._found)
        if isinstance(found, Failure):
            raise found.error
        return found

    async def _ended(self) -> None:
        """Returns when it has ended, without blocking the event loop meanwhile."""
        import asyncio

        if self._slot.notice is not None:
            return
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        waiter, slot = self._opened.waiter, self._slot

        def finish() -> None:
            if not ended.done():
                ended.set_result(None)

        def told(_: Slot) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody awaits any more
                loop.call_soon_threadsafe(finish)

        def listen() -> None:
            waiter.listen(slot, told)
            if ended.done():  # cancelled meanwhile, when there was nothing yet to be taken back
                waiter.ignore(slot, told)

        try:
            await to_thread(listen)
            await ended
        finally:
            ended.cancel()
            waiter.ignore(slot, told)

    def logs(self, follow: bool = False, rank: int = 0) -> Iterator[str]:
        """The lines of its output, stdout and stderr in the order they were written; `follow` until it ends."""
        from gpulayer.logs import lines, read_log

        return lines(read_log(self._opened.session, self.id, rank=rank, follow=follow))

    @edge
    def outputs(self, to: str | Path | None = None) -> Path:
        """Fetches the files that it returned into a folder, `gpulayer_runs/<id>` if none is named; the folder."""
        from gpulayer.fetching import fetch_outputs

        folder = Path(to) if to is not None else Path(RUNS_FOLDER, self.id)
        fetch_outputs(self._opened.session, self.record, folder)
        return folder

    @edge
    def cancel(self) -> bool:
        """Asks for its end; False if it had ended already."""
        return self._opened.cancel(self.id)

    @edge
    def explain(self) -> Explanation:
        """Which workers can run it, and of each other one why not."""
        return self._opened.explain(self.id)


def refuse_elsewhere(handle: Handle, opened: Opened, target: Target) -> None:
    """UsageError for a handle whose queue is not the one that the call goes to."""
    if opened.session.target != target:
        raise UsageError(f"{handle!r} is of another target: give its result() instead")
