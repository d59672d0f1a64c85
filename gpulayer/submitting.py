"""From what is to run to the jobs that the queue takes: specs, submissions, and sending them many at a time.

An id is drawn before the first try, so that a submit whose answer was lost is repeated without a second job.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpulayer.options import Plan
from gpulayer.payload import Courier, PackedFunction, pack_arguments
from gpulayer.session import Session
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.spec import Spec, encode, request_digest

BATCH = 500
BATCH_BYTES = 4 * 1024 * 1024

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def owner() -> str:
    """Who submits, for fair share: the user on this machine."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a uid without an entry, as in containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}".replace(":", "_")


class Submitter:
    """Makes jobs of specs and sends them, under one client's name."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._courier = Courier(session)
        self._owner = owner()

    def function_specs(
        self, packed: PackedFunction, calls: Iterable[Arguments], plan: Plan
    ) -> Iterator[Spec]:
        """A spec for each call of one function, which is sent once."""
        function = self._courier.function(packed)
        for args, kwargs in calls:
            data = pack_arguments(packed.label, args, kwargs)
            arguments = self._courier.arguments(data, packed.label)
            yield Spec(
                kind="function",
                name=plan.name or packed.label,
                call=self._courier.call(packed, function, arguments),
                requirements=plan.needs.canonical(),
                env=plan.env,
                timeout_s=plan.timeout_s,
                on_outage=plan.on_outage,
            )

    def submit(self, spec: Spec, plan: Plan, client: str) -> tuple[str, bool]:
        """(the job's id, whether it is new and not an earlier one of the same idempotency key)."""
        job = self._submission(spec, plan, client)
        job_id = self._session.attempt(lambda queue: queue.submit(job, plan.needs))
        return job_id, job_id == job.id

    def submit_many(
        self, specs: Iterable[Spec], plan: Plan, client: Callable[[], str], most: int = BATCH
    ) -> Iterator[list[str]]:
        """The ids, in order, a batch at a time; a batch is sent when it is asked for."""
        jobs = (self._submission(spec, plan, client()) for spec in specs)
        for batch in _batches(jobs, min(most, BATCH)):
            yield self._session.attempt(partial(Queue.submit_many, jobs=batch, needs=plan.needs))

    def _submission(self, spec: Spec, plan: Plan, client: str) -> Submission:
        job_id = new_job_id()
        return Submission(
            id=job_id,
            signature=plan.needs.signature,
            spec=encode(job_id, int(time.time() * 1000), spec, plan.message_options),
            owner=self._owner,
            priority=plan.priority,
            client=client,
            delay_ms=plan.delay_ms,
            prepare=spec.needs_preparation,
            on_outage=plan.on_outage,
            idempotency_key=plan.idempotency_key,
            digest=request_digest(spec) if plan.idempotency_key else "",
            kind=spec.kind,
            name=spec.name,
        )


def _batches(jobs: Iterator[Submission], most: int) -> Iterator[Sequence[Submission]]:
    """Batches bounded by number and, so that one send stays within its time, by bytes."""
    batch: list[Submission] = []
    size_bytes = 0
    for job in jobs:
        batch.append(job)
        size_bytes += len(job.spec)
        if len(batch) >= most or size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
