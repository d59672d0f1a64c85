"""What a client has opened, and what its handles share: a target's queue, the waiting for jobs, and the submitting.

Everything here takes and gives ids and records: handles of jobs and maps are made above.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from gpulayer.groups import is_group, members, refuse_group
from gpulayer.options import WARM, Plan
from gpulayer.payload import PackedFunction
from gpulayer.session import Session
from gpulayer.slots import Slot
from gpulayer.submitting import Order, Submitter
from gpulayer.targets import Target
from gpulayer.waiter import Waiter
from gpulayer_broker import functions
from gpulayer_broker.errors import GpulayerError, JobNotFound, UsageError
from gpulayer_broker.job import MESSAGE, RUNNING, SCHEDULED, JobRecord
from gpulayer_broker.queue import Queue
from gpulayer_broker.spec import decode

if TYPE_CHECKING:
    from gpulayer.explaining import Explanation
    from gpulayer_broker.workers import WorkerRecord

PAGE = 500


class Packable(Protocol):
    """A remote function, seen from below: what it runs, and with which options."""

    @property
    def _plan(self) -> Plan: ...

    def _packed(self) -> PackedFunction: ...


class Opened:
    """The open parts of one client. Safe between threads and across a fork, as its parts are."""

    def __init__(self, target: Target, *, trusts_workers: bool) -> None:
        self.session = Session(target)
        self.waiter = Waiter(self.session)
        self.submitter = Submitter(self.session)
        self.trusts_workers = trusts_workers or target.is_trusted

    def close(self) -> None:
        """Ends the waiting and closes the connections."""
        self.waiter.close()
        self.session.close()

    def submit(self, order: Order) -> tuple[str, Slot]:
        """The id and the slot of the job that was put together."""
        job_id, new = self.submitter.submit(order, self.waiter.client)
        return job_id, self.waiter.slot(job_id, submitted=new)

    def submit_call(
        self, function: Packable, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, Slot]:
        """The id and the slot of one call of a remote function."""
        return self.submit(self.submitter.function_order(function._packed(), (args, kwargs), function._plan))

    # By ids ---------------------------------------------------------------------------------------------------------

    def record(self, job_id: str) -> JobRecord:
        """The job's record; JobNotFound if there is none."""
        return self.session.attempt(lambda queue: queue.record(job_id))

    def records(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """The records of all these jobs; JobNotFound for one that is not kept."""
        found: list[JobRecord] = []
        for start in range(0, len(job_ids), PAGE):
            page = job_ids[start : start + PAGE]
            records = self.session.attempt(partial(Queue.records, job_ids=page))
            for job_id, record in zip(page, records, strict=True):
                if record is None:
                    raise JobNotFound.named(job_id)
                found.append(record)
        return found

    def newest(self, state: str, limit: int) -> list[JobRecord]:
        """The newest jobs of a state."""
        ids = self.session.attempt(lambda queue: queue.newest(state, limit))
        found: list[JobRecord] = []
        for start in range(0, len(ids), PAGE):
            page = ids[start : start + PAGE]
            records = self.session.attempt(partial(Queue.records, job_ids=page))
            found += [record for record in records if record is not None]
        return found

    def cancel(self, job_id: str) -> bool:
        """Asks for the end of a job, or of all jobs of a group; False if all had ended already."""
        if is_group(job_id):
            return self.cancel_many(self.session.attempt(lambda queue: members(queue, job_id))) > 0
        outcome, _ = self.session.attempt(lambda queue: queue.run(functions.cancel(job_id)))
        if outcome == "missing":
            raise JobNotFound.named(job_id)
        return outcome != "too_late"

    def cancel_many(self, job_ids: Sequence[str]) -> int:
        """Asks for the end of all these jobs; how many had not ended."""
        asked = 0
        for start in range(0, len(job_ids), PAGE):
            calls = [functions.cancel(job_id) for job_id in job_ids[start : start + PAGE]]
            for answer in self.session.attempt(partial(Queue.run_many, calls=calls)):
                if isinstance(answer, GpulayerError):
                    raise answer
                asked += answer[0] in ("cancelled", "asked")
        return asked

    def interrupt(self, job_id: str) -> bool:
        """Whether the job runs and its worker is told; UsageError for one without a process of its own."""
        refuse_group(job_id)
        record = self.record(job_id)
        if record.kind == MESSAGE or record.is_array or decode(record.spec).isolation == WARM:
            raise UsageError(
                f"job {job_id} has no process of its own: gpulayer cancel {job_id} ends it", value=job_id
            )
        outcome, _ = self.session.attempt(lambda queue: queue.run(functions.interrupt(job_id)))
        return outcome == "asked"

    def workers(self) -> list[WorkerRecord]:
        """The workers that the queue knows, by name."""
        from gpulayer_broker.workers import read_workers

        return self.session.attempt(read_workers)

    def explain(self, job_id: str) -> Explanation:
        """Which workers can run a job, and of each other one why not."""
        from gpulayer.explaining import explain
        from gpulayer.needs import needs_of

        refuse_group(job_id)
        record = self.record(job_id)
        runs_on = record.worker if record.state in (SCHEDULED, RUNNING) else ""
        return explain(needs_of(self.session, record), self.workers(), runs_on)
