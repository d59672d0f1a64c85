"""From what is to run to the jobs that the queue takes: specs, submissions, and sending them many at a time.

An id is drawn before the first try, so that a submit whose answer was lost is repeated without a second job.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import Any

from gpulayer.options import Plan
from gpulayer.payload import (
    Courier,
    PackedFunction,
    holds_code,
    minor_version,
    pack_arguments,
    pack_many,
)
from gpulayer.session import Session
from gpulayer_broker import requirements
from gpulayer_broker.errors import BlobMissing, UsageError
from gpulayer_broker.functions import Submission
from gpulayer_broker.items import pack_items
from gpulayer_broker.job import JobRecord, new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.spec import Payload, Spec, decode, encode, message_options, request_digest

BATCH = 500
BATCH_BYTES = 4 * 1024 * 1024

ARRAY_ITEMS = 1_000_000
ARRAY_BYTES = 16 * 1024 * 1024
PACKED_AT_ONCE = 256

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Order:
    """What is to be submitted, and how; `count` calls in one record if that is not 0."""

    spec: Spec
    plan: Plan
    count: int = 0


def owner() -> str:
    """Who submits, for fair share: the user on this machine; inside a job, who submitted that."""
    if os.environ.get("GPULAYER_JOB_ID") and os.environ.get("GPULAYER_OWNER"):
        return os.environ["GPULAYER_OWNER"]
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

    def function_orders(
        self, packed: PackedFunction, calls: Iterable[Arguments], plan: Plan
    ) -> Iterator[Order]:
        """An order for each call of one function, which is sent once."""
        function, coded = self._courier.function(packed), plan.on_python(minor_version())
        for args, kwargs in calls:
            data = pack_arguments(packed.label, args, kwargs)
            arguments = self._courier.arguments(data, packed.label)
            placed = coded if packed.holds_code or holds_code(data) else plan
            yield self._order(packed, function, arguments, placed)

    def array_orders(
        self, packed: PackedFunction, calls: Iterable[Arguments], plan: Plan, most: int = ARRAY_ITEMS
    ) -> Iterator[Order]:
        """An order for each array of at most so many calls, and of a size that a worker fetches in a moment."""
        function, coded = self._courier.function(packed), plan.on_python(minor_version())
        for items in _item_batches(packed.label, iter(calls), most):
            arguments = self._courier.items(pack_items(items), packed.label)
            placed = coded if packed.holds_code or any(map(holds_code, items)) else plan
            yield self._order(packed, function, arguments, placed, len(items))

    def _order(
        self, packed: PackedFunction, function: Payload, arguments: Payload, plan: Plan, count: int = 0
    ) -> Order:
        spec = Spec(
            kind="function",
            name=plan.name or packed.label,
            call=self._courier.call(packed, function, arguments),
            requirements=plan.needs.canonical(),
            env=plan.env,
            timeout_s=plan.timeout_s,
            isolation=plan.isolation,
            on_outage=plan.on_outage,
            retry_on=plan.retry_on,
        )
        return Order(spec, plan, count)

    def submit(self, order: Order, client: str) -> tuple[str, bool]:
        """(the job's id, whether it is new and not an earlier one of the same idempotency key)."""
        job = self._submission(order, client)
        job_id = self._session.attempt(lambda queue: queue.submit(job, order.plan.needs))
        return job_id, job_id == job.id

    def submit_again(self, record: JobRecord, client: str) -> str:
        """The id of a new job that is what an ended one was; BlobMissing if its files are no longer kept."""
        if not record.final:
            raise UsageError(
                f"job {record.id} is {record.state}: only what has ended can be run again", job_id=record.id
            )
        spec, needs = decode(record.spec), requirements.decode(decode(record.spec).requirements)
        missing = self._session.store.has(_blobs_of(spec))
        if missing:
            raise BlobMissing(
                f"job {record.id} cannot be run again: its files are no longer kept; submit it anew",
                job_id=record.id,
            )
        plan = Plan(
            needs,
            name=record.name,
            priority=record.priority,
            on_outage=spec.on_outage,
            retries=int(message_options(record.spec).get("max_retries") or 0),
            permit=record.permit,
            rate=record.rate,
            keep_ms=record.keep_ms,
        )
        again = replace(spec, extra={**spec.extra, "retry_of": record.id})
        return self.submit(Order(again, plan, record.count), client)[0]

    def submit_many(
        self, orders: Iterable[Order], client: Callable[[], str], most: int = BATCH
    ) -> Iterator[list[str]]:
        """The ids, in order, a batch at a time; a batch is sent when it is asked for."""
        jobs = ((self._submission(order, client()), order.plan.needs) for order in orders)
        for batch, needs in _batches(jobs, min(most, BATCH)):
            yield self._session.attempt(partial(Queue.submit_many, jobs=batch, needs=needs))

    def _submission(self, order: Order, client: str) -> Submission:
        spec, plan, job_id = order.spec, order.plan, new_job_id()
        # A job's own jobs say whose they are; a process may run several jobs one after another.
        if parent := os.environ.get("GPULAYER_JOB_ID"):
            spec = replace(spec, extra={**spec.extra, "parent": parent})
        return Submission(
            id=job_id,
            signature=plan.needs.signature,
            spec=encode(job_id, int(time.time() * 1000), spec, plan.message_options),
            owner=self._owner,
            priority=plan.priority,
            client=client,
            delay_ms=plan.waits_ms(),
            prepare=spec.needs_preparation,
            on_outage=plan.on_outage,
            idempotency_key=plan.idempotency_key,
            digest=request_digest(spec) if plan.idempotency_key else "",
            kind=spec.kind,
            name=spec.name,
            count=order.count,
            after=plan.after,
            after_policy=plan.after_policy,
            permit=plan.permit,
            rate=plan.rate,
            keep_ms=plan.keep_ms,
        )


def _blobs_of(spec: Spec) -> set[str]:
    """The blobs without which the job cannot begin, those that its manifests name apart."""
    payloads = (spec.call.function, spec.call.arguments) if spec.call else ()
    return {sha for sha in (spec.source, spec.inputs, *(payload.sha256 for payload in payloads)) if sha}


def _batches(
    jobs: Iterator[tuple[Submission, Requirements]], most: int
) -> Iterator[tuple[Sequence[Submission], Requirements]]:
    """Batches of equal needs, bounded by number and, so that one send stays within its time, by bytes."""
    for _, group in groupby(jobs, key=lambda pair: pair[0].signature):
        batch: list[Submission] = []
        size_bytes = 0
        for job, needs in group:
            batch.append(job)
            size_bytes += len(job.spec)
            if len(batch) >= most or size_bytes >= BATCH_BYTES:
                yield batch, needs
                batch, size_bytes = [], 0
        if batch:
            yield batch, needs


def _item_batches(label: str, calls: Iterator[Arguments], most: int) -> Iterator[list[bytes]]:
    """Packed calls in batches that are bounded by number and by bytes."""
    batch: list[bytes] = []
    size_bytes = 0
    while some := list(islice(calls, min(most - len(batch), PACKED_AT_ONCE))):
        items = pack_many(label, some)
        batch += items
        size_bytes += sum(map(len, items))
        if len(batch) >= most or size_bytes >= ARRAY_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
