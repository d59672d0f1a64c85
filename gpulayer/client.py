"""`Client`: everything that the SDK and the command line do with one target.

It connects when it is first used, may be shared by threads and inherited by forks, and closes its connections at
the end of a `with` or by `close`. `default_client` is the one that `gl.remote` uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from gpulayer.commands import command_spec
from gpulayer.edge import edged
from gpulayer.groups import refuse_group
from gpulayer.handing_over import Arguments
from gpulayer.handle import Job
from gpulayer.opened import Opened, Packable
from gpulayer.options import KNOWN, JobOptions, Plan, plan_of, refuse_unknown
from gpulayer.payload import PackedFunction, pack_function
from gpulayer.submitting import Order
from gpulayer.targets import Target, resolve_target
from gpulayer_broker.damage import document
from gpulayer_broker.errors import UsageError
from gpulayer_broker.job import ACTIVE, STATES, JobRecord
from gpulayer_broker.spec import Spec

if TYPE_CHECKING:
    from gpulayer.explaining import Explanation
    from gpulayer.manner import Manner, MapOptions
    from gpulayer.mapping import MapResult
    from gpulayer.session import Session
    from gpulayer_broker.workers import WorkerRecord

R = TypeVar("R")


@edged
class Client:
    """A connection to a target: `local` is this user's private set-up.

    >>> with gl.Client() as client:
    ...     job = client.submit(["python", "train.py"], source=".", accelerator="cuda")
    ...     job.wait()
    """

    def __init__(
        self, target: str | None = None, *, redis: str | None = None, trust_workers: bool = False
    ) -> None:
        """`redis` is a queue's address; `trust_workers` lets pickles from its workers be loaded here."""
        self._given = (target, redis, trust_workers)
        self._lock = threading.Lock()
        self._parts: Opened | None = None

    def __repr__(self) -> str:
        return f"Client({self.target.name})"

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; jobs go on."""
        if self._parts is not None:
            self._parts.close()

    @property
    def target(self) -> Target:
        """Where this client submits."""
        return self._session.target

    @property
    def trusts_workers(self) -> bool:
        """Whether what workers send is unpickled here."""
        return self._opened.trusts_workers

    @property
    def _opened(self) -> Opened:
        parts = self._parts
        if parts is None:
            with self._lock:
                if self._parts is None:
                    target, redis, trust_workers = self._given
                    self._parts = Opened(resolve_target(target, redis=redis), trusts_workers=trust_workers)
                parts = self._parts
        return parts

    @property
    def _session(self) -> Session:
        return self._opened.session

    # Submitting -----------------------------------------------------------------------------------------------------

    @overload
    def submit(
        self,
        what: str | Sequence[str],
        /,
        *,
        source: str | Path | None = None,
        inputs: Mapping[str, str | Path] | None = None,
        outputs: Iterable[str] = (),
        **options: Unpack[JobOptions],
    ) -> Job[None]: ...

    @overload
    def submit(
        self,
        what: Callable[..., R],
        /,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        source: str | Path | None = None,
        inputs: Mapping[str, str | Path] | None = None,
        outputs: Iterable[str] = (),
        **options: Unpack[JobOptions],
    ) -> Job[R]: ...

    def submit(
        self,
        what: str | Sequence[str] | Callable[..., Any],
        /,
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        source: str | Path | None = None,
        inputs: Mapping[str, str | Path] | None = None,
        outputs: Iterable[str] = (),
        **options: Unpack[JobOptions],
    ) -> Job[Any]:
        """Submits a command (a list, or a text that is split as a shell would, but run by none) or a function.

        To a remote function's own options those that are given here are added.
        `source` is a folder whose files become the job's folder; `inputs` maps paths there to files here;
        `outputs` are patterns of files to return beside those of `$GPULAYER_OUTPUTS`.
        """
        refuse_unknown("submit", options, KNOWN)
        own: Mapping[str, Any] = what._options if isinstance(what, Packable) else {}
        plan = plan_of({**own, **options})
        if callable(what):
            packed = what._packed() if isinstance(what, Packable) else pack_function(what)
            call = (tuple(args), dict(kwargs or {}))
            order = self._opened.submitter.function_order(packed, call, plan)
        elif args or kwargs:
            raise UsageError("args and kwargs belong to a function; a command's are part of it")
        else:
            order = Order(command_spec(what, plan), plan)
        spec = self._with_files(order.spec, source, inputs or {}, outputs)
        return self.submit_order(replace(order, spec=spec))

    def submit_order(self, order: Order) -> Job[Any]:
        """Submits what was put together already."""
        return Job(self._opened, *self._opened.submit(order))

    def _with_files(
        self,
        spec: Spec,
        source: str | Path | None,
        inputs: Mapping[str, str | Path],
        outputs: Iterable[str],
    ) -> Spec:
        if source is None and not inputs and not outputs:
            return spec
        from gpulayer.shipping import with_files

        if not isinstance(inputs, Mapping):
            raise UsageError("inputs: write a mapping of paths in the job's folder to files here")
        files = {dest: Path(path) for dest, path in inputs.items()}
        patterns = [outputs] if isinstance(outputs, str) else outputs
        return with_files(spec, self._session, Path(source) if source is not None else None, files, patterns)

    def submit_call(self, packed: PackedFunction, call: Arguments, plan: Plan) -> Job[Any]:
        """Submits one call of a packed function."""
        return Job(self._opened, *self._opened.submit_call(packed, call, plan))

    def submit_group(self, orders: Iterable[Order], total: int, manner: Manner) -> MapResult[Any]:
        """Submits jobs as a group, whose id leads to all of them (`results.ids`)."""
        from gpulayer.maps import submit_group

        return submit_group(self._opened, orders, total, manner)

    def submit_map(
        self,
        packed: PackedFunction,
        calls: Iterable[Arguments],
        plan: Plan,
        total: int | None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[MapOptions],
    ) -> MapResult[Any]:
        """Submits the calls of a map, of which there are `total`, if that is known."""
        from gpulayer.maps import submit_map

        return submit_map(
            self._opened, packed, calls, plan, total, return_exceptions=return_exceptions, **options
        )

    # Jobs and workers -----------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job[Any]:
        """The handle of a job that anybody submitted; JobNotFound if there is none."""
        refuse_group(job_id)
        self._opened.record(job_id)
        return self.handle(job_id)

    def map_result(
        self, *job_ids: str, return_exceptions: bool = False, progress: bool = True
    ) -> MapResult[Any]:
        """The results of a map, taken up again by its `ids`, or by those of its jobs.

        >>> gl.Client().map_result("g_0123456789ab").results()
        """
        from gpulayer.maps import map_result

        return map_result(self._opened, job_ids, return_exceptions=return_exceptions, progress=progress)

    def handle(self, job_id: str) -> Job[Any]:
        """The handle of a job that is known to exist."""
        return Job(self._opened, job_id, self._opened.waiter.slot(job_id))

    def jobs(self, state: str | None = None, limit: int = 100) -> list[JobRecord]:
        """The newest jobs, of one state or of all; those that are not final come first."""
        if state is not None and state not in STATES:
            raise UsageError(f"state {state!r} is not known: it is one of {', '.join(STATES)}", value=state)
        found: list[JobRecord] = []
        for one in [state] if state else STATES:
            found += self._opened.newest(one, limit)
        found.sort(key=lambda record: (record.state not in ACTIVE, -record.created_ms))
        return found[:limit]

    def workers(self) -> list[WorkerRecord]:
        """The workers that the queue knows, by name."""
        return self._opened.workers()

    def worker_name(self, worker_id: str) -> str:
        """What people call a worker; its id where it is no longer known."""
        raw = self._session.attempt(
            lambda queue: queue.link.call("HGET", queue.keys.worker(worker_id), "info")
        )
        return str(document(raw).get("name") or worker_id)

    def cancel(self, job_id: str) -> bool:
        """Asks for the end of a job, or of all jobs of a group; False if all had ended already."""
        return self._opened.cancel(job_id)

    def interrupt(self, job_id: str) -> bool:
        """Sends a running job what Ctrl-C sends (SIGINT); False if it does not run."""
        (asked,) = self._opened.interrupt_each([job_id])
        return asked

    def retry(self, job_id: str) -> Job[Any]:
        """Submits what an ended job was again, as a new job."""
        from gpulayer.again import orders_again

        refuse_group(job_id)
        (order,) = orders_again(self._session, self._opened.records([job_id]))
        return self.submit_order(order)

    def retry_map(self, map_id: str, *, failed: bool = False) -> MapResult[Any]:
        """Submits a map or a group again, by its id, as a new one: all of it, or what did not succeed.

        >>> gl.Client().retry_map("g_0123456789ab", failed=True).results()
        """
        from gpulayer.maps import retry_map

        return retry_map(self._opened, map_id, failed=failed)

    def logs(self, job_id: str, follow: bool = False, rank: int = 0) -> Iterator[str]:
        """The lines of a job's output."""
        return self.get(job_id).logs(follow, rank)

    def outputs(self, job_id: str, to: str | Path | None = None) -> Path:
        """Fetches the files that a job returned; the folder that they are in."""
        return self.get(job_id).outputs(to)

    def explain(self, job_id: str) -> Explanation:
        """Which workers can run a job, and of each other one why not."""
        return self._opened.explain(job_id)


_defaults: dict[str | None, Client] = {}
_defaults_lock = threading.Lock()


def default_client(target: str | None = None) -> Client:
    """The client that this process shares for a target."""
    with _defaults_lock:
        client = _defaults.get(target)
        if client is None:
            client = _defaults[target] = Client(target)
        return client
