"""What a client has opened, and what its handles share: a target's queue, the waiting for jobs, and the submitting.

Everything here takes and gives ids and records: handles of jobs and maps are made above.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from gpulayer.groups import is_group, members, refuse_group, refuse_part
from gpulayer.handing_over import Arguments
from gpulayer.options import WARM, Plan, RemoteOptions
from gpulayer.payload import PackedFunction
from gpulayer.session import Session
from gpulayer.slots import Slot
from gpulayer.submitting import Order, Submitter
from gpulayer.targets import Target
from gpulayer.waiter import Waiter
from gpulayer_broker import functions
from gpulayer_broker.errors import JobNotFound, UsageError
from gpulayer_broker.functions import Call
from gpulayer_broker.job import MESSAGE, JobRecord
from gpulayer_broker.queue import Queue, granted
from gpulayer_broker.spec import decode

if TYPE_CHECKING:
    from gpulayer.explaining import Explanation
    from gpulayer_broker.workers import WorkerRecord

PAGE = 500
MISSING = "missing"
# What a job that had not ended answers to a cancel.
HEARD = ("cancelled", "asked")


@runtime_checkable
class Packable(Protocol):
    """A remote function, seen from below: what it runs, and with which options."""

    @property
    def _plan(self) -> Plan: ...

    @property
    def _options(self) -> RemoteOptions: ...

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

    def submit_call(self, packed: PackedFunction, call: Arguments, plan: Plan) -> tuple[str, Slot]:
        """The id and the slot of one call of a function."""
        job_id, new = self.submitter.submit_call(packed, call, plan, self.waiter.client)
        return job_id, self.waiter.slot(job_id, submitted=new)

    # By ids ---------------------------------------------------------------------------------------------------------

    def record(self, job_id: str) -> JobRecord:
        """The job's record; JobNotFound if there is none."""
        return self.session.attempt(lambda queue: queue.record(job_id))

    def records(self, job_ids: Sequence[str]) -> list[JobRecord]:
        """The records of all these jobs; JobNotFound for one that is not kept."""
        for job_id in job_ids:
            refuse_part(job_id)
        found = self.found(job_ids)
        missing = [job_id for job_id, record in zip(job_ids, found, strict=True) if record is None]
        if missing:
            raise JobNotFound.named(*missing)
        return [record for record in found if record is not None]

    def found(self, job_ids: Sequence[str]) -> list[JobRecord | None]:
        """The records of these jobs, None for one that is not kept."""
        found: list[JobRecord | None] = []
        for page in _pages(job_ids):
            found += self.session.attempt(partial(Queue.records, job_ids=page))
        return found

    def newest(self, state: str, limit: int) -> list[JobRecord]:
        """The newest jobs of a state."""
        ids = self.session.attempt(lambda queue: queue.newest(state, limit))
        return [record for record in self.found(ids) if record is not None]

    def cancel(self, job_id: str) -> bool:
        """Asks for the end of a job, or of all jobs of a group; False if all had ended already."""
        if is_group(job_id):
            return self.cancel_many(self.session.attempt(lambda queue: members(queue, job_id))) > 0
        refuse_part(job_id)
        (outcome,) = self.cancel_each([job_id])
        if outcome == MISSING:
            raise JobNotFound.named(job_id)
        return outcome in HEARD

    def cancel_many(self, job_ids: Sequence[str]) -> int:
        """Asks for the end of all these jobs; how many had not ended."""
        return sum(outcome in HEARD for outcome in self.cancel_each(job_ids))

    def cancel_each(self, job_ids: Sequence[str]) -> list[str]:
        """Asks for the end of each job: 'cancelled' at once, 'asked' of who runs it, 'too_late' or 'missing'."""
        return [outcome for outcome, _ in self._asked(functions.cancel, job_ids)]

    def interrupt_each(self, job_ids: Sequence[str]) -> list[bool]:
        """Whether each job runs and its worker is told; none is, if one has no process of its own (UsageError)."""
        for job_id in job_ids:
            refuse_group(job_id)
        for record in self.records(job_ids):
            _refuse_shared(record)
        return [outcome == "asked" for outcome, _ in self._asked(functions.interrupt, job_ids)]

    def _asked(
        self, call: Callable[[str], Call[tuple[str, str]]], job_ids: Sequence[str]
    ) -> Iterator[tuple[str, str]]:
        """The answers to a call for each job, many in one send."""
        for page in _pages(job_ids):
            yield from granted(
                self.session.attempt(partial(Queue.run_many, calls=[call(job_id) for job_id in page]))
            )

    def workers(self) -> list[WorkerRecord]:
        """The workers that the queue knows, by name."""
        from gpulayer_broker.workers import read_workers

        return self.session.attempt(read_workers)

    def explain(self, job_id: str) -> Explanation:
        """Which workers can run a job, and of each other one why not."""
        from gpulayer.explaining import Asker, explain
        from gpulayer.needs import needs_of

        refuse_group(job_id)
        record = self.record(job_id)
        return explain(needs_of(self.session, record), self.workers(), Asker.of(record))


def _pages(job_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (job_ids[start : start + PAGE] for start in range(0, len(job_ids), PAGE))


def _refuse_shared(record: JobRecord) -> None:
    if record.kind == MESSAGE or record.is_array or decode(record.spec).isolation == WARM:
        raise UsageError(
            f"job {record.id} has no process of its own: gpulayer cancel {record.id} ends it",
            value=record.id,
        )
