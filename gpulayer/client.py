"""`Client`: everything that the SDK and the command line do with one target.

It connects when it is first used, may be shared by threads and inherited by forks, and closes its connections at
the end of a `with` or by `close`. `default_client` is the one that `gl.remote` uses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from gpulayer.commands import command_spec
from gpulayer.groups import is_group, members, refuse_group
from gpulayer.handing_over import Arguments
from gpulayer.handle import Job
from gpulayer.options import KNOWN, WARM, JobOptions, Plan, plan_of, refuse_unknown
from gpulayer.payload import PackedFunction, pack_function
from gpulayer.session import Session
from gpulayer.submitting import ARRAY_ITEMS, BATCH, Order, Submitter, as_group
from gpulayer.targets import Target, resolve_target
from gpulayer.waiter import Waiter
from gpulayer_broker import functions
from gpulayer_broker.errors import GpulayerError, JobNotFound, UsageError
from gpulayer_broker.job import ACTIVE, RUNNING, SCHEDULED, STATES, JobRecord
from gpulayer_broker.queue import Queue
from gpulayer_broker.spec import Spec

if TYPE_CHECKING:
    from gpulayer.explaining import Explanation
    from gpulayer.mapping import Manner, MapResult
    from gpulayer.remote_function import RemoteFunction
    from gpulayer_broker.workers import WorkerRecord

R = TypeVar("R")
PAGE = 500


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
        self._parts: tuple[Session, Waiter, Submitter] | None = None

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
        parts = self._parts
        if parts is not None:
            session, waiter, _ = parts
            waiter.close()
            session.close()

    @property
    def target(self) -> Target:
        """Where this client submits."""
        return self._session.target

    @property
    def trusts_workers(self) -> bool:
        """Whether what workers send is unpickled here."""
        return self._given[2] or self.target.is_trusted

    def _opened(self) -> tuple[Session, Waiter, Submitter]:
        parts = self._parts
        if parts is None:
            with self._lock:
                if self._parts is None:
                    session = Session(resolve_target(self._given[0], redis=self._given[1]))
                    self._parts = (session, Waiter(session), Submitter(session))
                parts = self._parts
        return parts

    @property
    def _session(self) -> Session:
        return self._opened()[0]

    @property
    def _waiter(self) -> Waiter:
        return self._opened()[1]

    @property
    def _submitter(self) -> Submitter:
        return self._opened()[2]

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

        `source` is a folder whose files become the job's folder; `inputs` maps paths there to files here;
        `outputs` are patterns of files to return beside those of `$GPULAYER_OUTPUTS`.
        """
        refuse_unknown("submit", options, KNOWN)
        plan = plan_of(options)
        if callable(what):
            order = self._function_order(what, (tuple(args), dict(kwargs or {})), plan)
        elif args or kwargs:
            raise UsageError("args and kwargs belong to a function; a command's are part of it")
        else:
            order = Order(command_spec(what, plan), plan)
        spec = self._with_files(order.spec, source, inputs or {}, outputs)
        return self.submit_order(replace(order, spec=spec))

    def submit_order(self, order: Order) -> Job[Any]:
        """Submits what was put together already."""
        job_id, new = self._submitter.submit(order, self._waiter.client)
        return Job(self, job_id, self._waiter.slot(job_id, submitted=new))

    def _function_order(self, function: Callable[..., Any], call: Arguments, plan: Plan) -> Order:
        packed = pack_function(getattr(function, "__wrapped_by_remote__", function))
        return next(self._submitter.function_orders(packed, [call], plan))

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

        files = {dest: Path(path) for dest, path in inputs.items()}
        return with_files(spec, self._session, Path(source) if source is not None else None, files, outputs)

    def submit_call(self, packed: PackedFunction, call: Arguments, plan: Plan) -> Job[Any]:
        """Submits one call of a packed function."""
        return self.submit_order(next(self._submitter.function_orders(packed, [call], plan)))

    def _submit_then(
        self, function: RemoteFunction[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Job[R]:
        return self.submit_call(function._packed(), (args, kwargs), function._plan)

    def submit_calls(
        self, packed: PackedFunction, calls: Iterable[Arguments], plan: Plan, most: int = BATCH
    ) -> Iterator[list[Job[Any]]]:
        """Submits many calls as jobs, a batch each time that the next is asked for."""
        return self._submit_all(self._submitter.function_orders(packed, calls, plan), most)

    def _submit_all(self, orders: Iterable[Order], most: int = BATCH) -> Iterator[list[Job[Any]]]:
        for ids in self._submitter.submit_many(orders, lambda: self._waiter.client, most):
            yield [Job(self, job_id, self._waiter.slot(job_id, submitted=True)) for job_id in ids]

    def submit_arrays(
        self, packed: PackedFunction, calls: Iterable[Arguments], plan: Plan, most: int = ARRAY_ITEMS
    ) -> Iterator[tuple[Job[Any], int]]:
        """Submits many calls as arrays, one each time that the next is asked for; each with its number of calls."""
        for order in self._submitter.array_orders(packed, calls, plan, most):
            yield self.submit_order(order), order.count

    def submit_group(self, orders: Iterable[Order], total: int, manner: Manner) -> MapResult[Any]:
        """Submits jobs as a group, whose id leads to all of them (`results.ids`)."""
        from gpulayer.mapping import JobsResult, Window

        group_id, members = as_group(orders, total)
        batches = self._submit_all(members)
        return JobsResult(self, batches, manner, sized=True, window=Window(1), group=group_id)

    def submit_map(
        self,
        packed: PackedFunction,
        calls: Iterable[Arguments],
        plan: Plan,
        *,
        sized: bool,
        total: int | None = None,
        return_exceptions: bool = False,
        max_parallel: int | None = None,
        max_in_flight: int = 1000,
        progress: bool = True,
    ) -> MapResult[Any]:
        """Submits the calls of a map: as arrays if they are warm, else as jobs of their own, a group of `total`."""
        from gpulayer.arrays import ArrayResult
        from gpulayer.mapping import JobsResult, Manner, Window

        if plan.idempotency_key:
            raise UsageError("idempotency_key names one job: a map has many, so submit them one by one")
        window = Window(max_in_flight)
        manner = Manner(plan.name or packed.label, return_exceptions, progress)
        if max_parallel is not None:
            plan = plan.taking_turns(max_parallel)
        # An item of an array has no retries of its own, and takes no turns.
        if plan.isolation == WARM and not (plan.retries or plan.permit or plan.rate):
            arrays = self.submit_arrays(packed, calls, plan, ARRAY_ITEMS if sized else window.step)
            return ArrayResult(self, arrays, manner, sized=sized, window=window)
        if sized and total:
            return self.submit_group(self._submitter.function_orders(packed, calls, plan), total, manner)
        batches = self.submit_calls(packed, calls, plan, BATCH if sized else window.step)
        return JobsResult(self, batches, manner, sized=sized, window=window)

    # Jobs and workers -----------------------------------------------------------------------------------------------

    def get(self, job_id: str) -> Job[Any]:
        """The handle of a job that anybody submitted; JobNotFound if there is none."""
        refuse_group(job_id)
        self._session.attempt(lambda queue: queue.record(job_id))
        return self.handle(job_id)

    def map_result(
        self, *job_ids: str, return_exceptions: bool = False, progress: bool = True
    ) -> MapResult[Any]:
        """The results of a map, taken up again by its `ids`, or by those of its jobs.

        >>> gl.Client().map_result("g_0123456789ab").results()
        """
        from gpulayer.taking_up import map_result

        return map_result(self, job_ids, return_exceptions=return_exceptions, progress=progress)

    def _records(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """The records of all these jobs; JobNotFound for one that is not kept."""
        found: list[JobRecord] = []
        for start in range(0, len(job_ids), PAGE):
            page = job_ids[start : start + PAGE]
            for job_id, record in zip(
                page, self._session.attempt(partial(Queue.records, job_ids=page)), strict=True
            ):
                if record is None:
                    raise JobNotFound.named(job_id)
                found.append(record)
        return found

    def handle(self, job_id: str) -> Job[Any]:
        """The handle of a job that is known to exist."""
        return Job(self, job_id, self._waiter.slot(job_id))

    def jobs(self, state: str | None = None, limit: int = 100) -> list[JobRecord]:
        """The newest jobs, of one state or of all; those that are not final come first."""
        if state is not None and state not in STATES:
            raise UsageError(f"state {state!r} is not known: it is one of {', '.join(STATES)}", value=state)
        found: list[JobRecord] = []
        for one in [state] if state else STATES:
            found += self._newest(one, limit)
        found.sort(key=lambda record: (record.state not in ACTIVE, -record.created_ms))
        return found[:limit]

    def _newest(self, state: str, limit: int) -> list[JobRecord]:
        ids = self._session.attempt(lambda queue: queue.newest(state, limit))
        found: list[JobRecord] = []
        for start in range(0, len(ids), PAGE):
            page = ids[start : start + PAGE]
            records = self._session.attempt(partial(Queue.records, job_ids=page))
            found += [record for record in records if record is not None]
        return found

    def workers(self) -> list[WorkerRecord]:
        """The workers that the queue knows, by name."""
        from gpulayer_broker.workers import read_workers

        return self._session.attempt(read_workers)

    def worker_name(self, worker_id: str) -> str:
        """What people call a worker; its id where it is no longer known."""
        import json

        raw = self._session.attempt(
            lambda queue: queue.link.call("HGET", queue.keys.worker(worker_id), "info")
        )
        return str(json.loads(raw or b"{}").get("name") or worker_id)

    def cancel(self, job_id: str) -> bool:
        """Asks for the end of a job, or of all jobs of a group; False if all had ended already."""
        if is_group(job_id):
            return self._cancel_many(self._session.attempt(lambda queue: members(queue, job_id))) > 0
        outcome, _ = self._session.attempt(lambda queue: queue.run(functions.cancel(job_id)))
        if outcome == "missing":
            raise JobNotFound.named(job_id)
        return outcome != "too_late"

    def interrupt(self, job_id: str) -> bool:
        """Sends a running job what Ctrl-C sends (SIGINT); False if it does not run."""
        from gpulayer.interrupting import interrupt

        return interrupt(self, job_id)

    def retry(self, job_id: str) -> Job[Any]:
        """Submits what an ended job was again, as a new job."""
        from gpulayer.again import orders_again

        refuse_group(job_id)
        (order,) = orders_again(self._session, self._records([job_id]))
        return self.submit_order(order)

    def retry_map(self, map_id: str, *, failed: bool = False) -> MapResult[Any]:
        """Submits a map or a group again, by its id, as a new one: all of it, or what did not succeed.

        >>> gl.Client().retry_map("g_0123456789ab", failed=True).results()
        """
        from gpulayer.taking_up import retry_map

        return retry_map(self, map_id, failed=failed)

    def _cancel_many(self, job_ids: Sequence[str]) -> int:
        asked = 0
        for start in range(0, len(job_ids), PAGE):
            calls = [functions.cancel(job_id) for job_id in job_ids[start : start + PAGE]]
            for answer in self._session.attempt(partial(Queue.run_many, calls=calls)):
                if isinstance(answer, GpulayerError):
                    raise answer
                asked += answer[0] in ("cancelled", "asked")
        return asked

    def logs(self, job_id: str, follow: bool = False, rank: int = 0) -> Iterator[str]:
        """The lines of a job's output."""
        return self.get(job_id).logs(follow, rank)

    def outputs(self, job_id: str, to: str | Path | None = None) -> Path:
        """Fetches the files that a job returned; the folder that they are in."""
        return self.get(job_id).outputs(to)

    def explain(self, job_id: str) -> Explanation:
        """Which workers can run a job, and of each other one why not."""
        from gpulayer.explaining import explain
        from gpulayer.needs import needs_of

        refuse_group(job_id)
        record = self._session.attempt(lambda queue: queue.record(job_id))
        runs_on = record.worker if record.state in (SCHEDULED, RUNNING) else ""
        return explain(needs_of(self._session, record), self.workers(), runs_on)


_defaults: dict[str | None, Client] = {}
_defaults_lock = threading.Lock()


def default_client(target: str | None = None) -> Client:
    """The client that this process shares for a target."""
    with _defaults_lock:
        client = _defaults.get(target)
        if client is None:
            client = _defaults[target] = Client(target)
        return client
