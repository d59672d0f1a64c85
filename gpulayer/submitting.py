"""From what is to run to the jobs that the queue takes: specs, submissions, and sending them many at a time.

An id is drawn before the first try, so that a submit whose answer was lost is repeated without a second job.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from math import ceil
from typing import NamedTuple

from gpulayer.advising import Adviser
from gpulayer.groups import SIZE, is_group, member_id, members, new_group_id
from gpulayer.handing_over import Arguments, taken_out, waiting_for
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
from gpulayer.unchanged import MOST_BYTES
from gpulayer_broker.functions import Stencil, Stencilled, Submission
from gpulayer_broker.given import Given
from gpulayer_broker.items import pack_items
from gpulayer_broker.job import new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.recent import Recent
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.spec import Frame, Payload, Spec, encode, frame, lane_of, request_digest

BATCH = 500
BATCH_BYTES = 4 * 1024 * 1024
SHARED_KEPT = 256
# A group may have a million members, whose ids are kept while further jobs come after it.
GROUPS_KEPT = 8

ARRAY_ITEMS = 1_000_000
ARRAY_BYTES = 16 * 1024 * 1024
PACKED_AT_ONCE = 256


@dataclass(frozen=True)
class Order:
    """What is to be submitted, and how; `count` calls in one record if that is not 0. `id` is drawn if it is empty."""

    spec: Spec
    plan: Plan
    count: int = 0
    id: str = ""


class Shared(NamedTuple):
    """What a client's calls of one function under one plan share: all but their id, time and arguments."""

    plan: Plan
    placed: Plan
    function: Payload
    frame: Frame
    stencil: Stencil


def as_group(orders: Iterable[Order], total: int) -> tuple[str, Iterator[Order]]:
    """(the group's id, the orders as its members)."""
    group_id = new_group_id()
    return group_id, (_as_member(order, group_id, n, total) for n, order in enumerate(orders, 1))


def _as_member(order: Order, group_id: str, number: int, total: int) -> Order:
    spec = replace(order.spec, extra={**order.spec.extra, SIZE: total})
    return replace(order, spec=spec, id=member_id(group_id, number))


def _with_given(order: Order, given: tuple[Given, ...]) -> Order:
    call = order.spec.call
    assert call is not None
    return replace(order, spec=replace(order.spec, call=replace(call, given=given)))


def _in_its_job(order: Order) -> Order:
    """A job's own jobs say whose they are; a process may run several jobs one after another."""
    parent = os.environ.get("GPULAYER_JOB_ID")
    if not parent:
        return order
    return replace(order, spec=replace(order.spec, extra={**order.spec.extra, "parent": parent}))


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
        self.courier = Courier(session)
        self.adviser = Adviser(session)
        self._owner = owner()
        self._shared: dict[tuple[PackedFunction, int, str, str | None], Shared | Plan] = {}
        self._members: Recent[str, list[str]] = Recent(GROUPS_KEPT)

    def function_orders(
        self, packed: PackedFunction, calls: Iterable[Arguments], plan: Plan, *, of_map: bool = True
    ) -> Iterator[Order]:
        """An order for each call of one function, which is sent once."""
        function, coded = self.courier.function(packed), plan.on_python(minor_version())
        numbered: Iterable[tuple[int | None, Arguments]] = enumerate(calls)
        for item, call in numbered if of_map else ((None, call) for call in calls):
            (args, kwargs), given = taken_out(self._session.target, call)
            data = pack_arguments(packed.label, args, kwargs, item)
            arguments = self.courier.arguments(data, packed.label)
            placed = coded if packed.holds_code or holds_code(data) else plan
            order = self._order(packed, function, arguments, waiting_for(placed, given) if given else placed)
            yield _with_given(order, given) if given else order

    def function_order(self, packed: PackedFunction, call: Arguments, plan: Plan) -> Order:
        """An order for one call."""
        return next(self.function_orders(packed, [call], plan, of_map=False))

    def array_orders(
        self, packed: PackedFunction, calls: Iterable[Arguments], plan: Plan, most: int = ARRAY_ITEMS
    ) -> Iterator[Order]:
        """An order for each array of at most so many calls, and of a size that a worker fetches in a moment."""
        function, coded = self.courier.function(packed), plan.on_python(minor_version())
        for items in _item_batches(packed.label, iter(calls), most):
            arguments = self.courier.items(pack_items(items), packed.label)
            placed = coded if packed.holds_code or any(map(holds_code, items)) else plan
            yield self._order(packed, function, arguments, placed, len(items))

    def _order(
        self, packed: PackedFunction, function: Payload, arguments: Payload, plan: Plan, count: int = 0
    ) -> Order:
        spec = Spec(
            kind="function",
            name=plan.name or packed.label,
            call=self.courier.call(packed, function, arguments),
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
        return self._sent(self._submission(order, client), order.plan.needs)

    def submit_call(
        self, packed: PackedFunction, call: Arguments, plan: Plan, client: str
    ) -> tuple[str, bool]:
        """As `submit` of the call's order; what it shares with other calls is put together once."""
        (args, kwargs), given = taken_out(self._session.target, call)
        shared = None if given else self._shared_by(packed, plan, client)
        if shared is None:
            return self.submit(self.function_order(packed, call, plan), client)
        data = pack_arguments(packed.label, args, kwargs)
        if shared.placed is plan and holds_code(data):
            return self.submit(self.function_order(packed, call, plan), client)
        self.courier.renew(shared.function, packed.data)
        job_id, arguments = new_job_id(), self.courier.arguments(data, packed.label)
        spec = shared.frame.filled(job_id, int(time.time() * 1000), arguments)
        return self._sent(Stencilled(job_id, spec, shared.stencil), shared.placed.needs)

    def _shared_by(self, packed: PackedFunction, plan: Plan, client: str) -> Shared | None:
        """None where calls differ in more than their arguments, and at the first call: it may be the only one."""
        # Each of these is a call's own: a moment, the jobs before it, the digest of its arguments.
        if plan.eta_s is not None or plan.after or plan.idempotency_key or len(packed.data) > MOST_BYTES:
            return None
        key = packed, id(plan), client, os.environ.get("GPULAYER_JOB_ID")
        known = self._shared.get(key)
        if isinstance(known, Shared):
            return known
        if len(self._shared) >= SHARED_KEPT:
            self._shared.clear()
        # A plan that is held keeps its id to itself.
        shared = None if known is None else self._put_together(packed, plan, client)
        self._shared[key] = shared or plan
        return shared

    def _put_together(self, packed: PackedFunction, plan: Plan, client: str) -> Shared:
        function = self.courier.function(packed)
        placed = plan.on_python(minor_version()) if packed.holds_code else plan
        order = _in_its_job(self._order(packed, function, Payload(b""), placed))
        stencil = Stencil.of(self._submission(order, client), self._session.queue.keys.root)
        return Shared(plan, placed, function, frame(order.spec, placed.message_options), stencil)

    def _sent(self, job: Submission | Stencilled, needs: Requirements) -> tuple[str, bool]:
        job_id = self._session.attempt(lambda queue: queue.submit(job, needs))
        self.adviser.submitted(needs)
        return job_id, job_id == job.id

    def submit_many(
        self, orders: Iterable[Order], client: Callable[[], str], most: int = BATCH
    ) -> Iterator[list[str]]:
        """The ids, in order, a batch at a time; a batch is sent when it is asked for."""
        jobs = ((self._submission(order, client()), order.plan.needs) for order in orders)
        for batch, needs in _batches(jobs, min(most, BATCH)):
            ids = self._session.attempt(partial(Queue.submit_many, jobs=batch, needs=needs))
            self.adviser.submitted(needs)
            yield ids

    def _predecessors(self, plan: Plan) -> tuple[str, ...]:
        """The jobs that have to end first, a group's members in its place; these never change."""
        return tuple(job_id for each in plan.after for job_id in self._jobs_of(each))

    def _jobs_of(self, job_id: str) -> list[str]:
        if not is_group(job_id):
            return [job_id]
        return self._members.get(job_id, lambda: self._session.attempt(partial(members, group_id=job_id)))

    def _submission(self, order: Order, client: str) -> Submission:
        order = _in_its_job(order)
        spec, plan, job_id = order.spec, order.plan, order.id or new_job_id()
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
            after=self._predecessors(plan),
            after_policy=plan.after_policy,
            permit=plan.permit,
            rate=plan.rate,
            keep_ms=plan.keep_ms,
            timeout_ms=ceil((spec.timeout_s or 0) * 1000),
            lane="" if order.count or plan.retries else lane_of(spec),
        )


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
    size_bytes = packed = 0
    while some := list(islice(calls, min(most - len(batch), PACKED_AT_ONCE))):
        items = pack_many(label, some, packed)
        packed += len(items)
        batch += items
        size_bytes += sum(map(len, items))
        if len(batch) >= most or size_bytes >= ARRAY_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch
