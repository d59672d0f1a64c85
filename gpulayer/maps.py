"""Makes maps: submits many calls as jobs of a group or as arrays, and takes up by its ids what was submitted before.

A map can be taken up in any process, and run again as a whole or as far as it did not succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Unpack

from gpulayer.again import failed_items_again, orders_again
from gpulayer.arrays import ArrayResult
from gpulayer.groups import expanded, is_group, states
from gpulayer.handing_over import Arguments
from gpulayer.handle import Job
from gpulayer.manner import IN_FLIGHT, Manner, MapOptions, Window
from gpulayer.mapping import JobsResult, MapResult
from gpulayer.opened import Opened
from gpulayer.options import WARM, Plan
from gpulayer.payload import PackedFunction
from gpulayer.submitting import ARRAY_ITEMS, BATCH, Order, as_group
from gpulayer_broker.errors import UsageError
from gpulayer_broker.job import FINAL, SUCCEEDED

# Submitting -----------------------------------------------------------------------------------------------------------


def submit_map(
    opened: Opened,
    packed: PackedFunction,
    calls: Iterable[Arguments],
    plan: Plan,
    total: int | None,
    *,
    return_exceptions: bool = False,
    **options: Unpack[MapOptions],
) -> MapResult[Any]:
    """Submits the calls of a map: as arrays if they are warm, else as jobs of their own, a group of `total`."""
    if plan.idempotency_key:
        raise UsageError("idempotency_key names one job: a map has many, so submit them one by one")
    window = Window(options.get("max_in_flight", IN_FLIGHT))
    manner = Manner(plan.name or packed.label, return_exceptions, options.get("progress", True))
    max_parallel = options.get("max_parallel")
    if max_parallel is not None:
        plan = plan.taking_turns(max_parallel)
    sized = total is not None
    # An item of an array has no retries of its own, and takes no turns.
    if plan.isolation == WARM and not (plan.retries or plan.permit or plan.rate):
        orders = opened.submitter.array_orders(packed, calls, plan, ARRAY_ITEMS if sized else window.step)
        arrays = ((Job[Any](opened, *opened.submit(order)), order.count) for order in orders)
        return ArrayResult(opened, arrays, manner, sized=sized, window=window)
    orders = opened.submitter.function_orders(packed, calls, plan)
    if total:
        return submit_group(opened, orders, total, manner)
    batches = submit_jobs(opened, orders, BATCH if sized else window.step)
    return JobsResult(opened, batches, manner, sized=sized, window=window)


def submit_group(opened: Opened, orders: Iterable[Order], total: int, manner: Manner) -> MapResult[Any]:
    """Submits jobs as a group, whose id leads to all of them (`results.ids`)."""
    group_id, members = as_group(orders, total)
    batches = submit_jobs(opened, members)
    return JobsResult(opened, batches, manner, sized=True, window=Window(1), group=group_id)


def submit_jobs(opened: Opened, orders: Iterable[Order], most: int = BATCH) -> Iterator[list[Job[Any]]]:
    """Submits jobs of their own, a batch each time that the next is asked for."""
    waiter = opened.waiter
    for ids in opened.submitter.submit_many(orders, lambda: waiter.client, most):
        yield [Job(opened, job_id, waiter.slot(job_id, submitted=True)) for job_id in ids]


# By ids ---------------------------------------------------------------------------------------------------------------


def map_result(
    opened: Opened, map_ids: Sequence[str], *, return_exceptions: bool, progress: bool
) -> MapResult[Any]:
    """The results of a map: of a group, of arrays, or of single calls."""
    job_ids = opened.session.attempt(partial(expanded, job_ids=map_ids))
    records = opened.records(job_ids)
    if not records:
        raise UsageError("map_result takes the ids of a map or of its jobs")
    manner = Manner(records[0].name or "map", return_exceptions, progress)
    jobs = [Job[Any](opened, job_id, opened.waiter.slot(job_id)) for job_id in job_ids]
    counts = [record.count for record in records]
    if all(counts):
        return ArrayResult(opened, zip(jobs, counts, strict=True), manner)
    if any(counts):
        raise UsageError("some of these jobs are maps and some are single calls: take them up apart")
    group = map_ids[0] if len(map_ids) == 1 and is_group(map_ids[0]) else ""
    return JobsResult(opened, iter([jobs]), manner, sized=True, window=Window(1), group=group)


def retry_map(opened: Opened, map_id: str, *, failed: bool) -> MapResult[Any]:
    """A new map of the same calls, or of those that have ended without success."""
    if is_group(map_id):
        return _retry_group(opened, map_id, failed)
    (record,) = opened.records([map_id])
    if not record.is_array:
        raise UsageError(f"job {map_id} is no map: gpulayer retry {map_id} runs it again", value=map_id)
    if failed:
        order = failed_items_again(opened.session, opened.submitter.courier, record)
    else:
        (order,) = orders_again(opened.session, [record])
    arrays = [(Job[Any](opened, *opened.submit(order)), order.count)] if order is not None else []
    return ArrayResult(opened, iter(arrays), Manner(record.name or "map"))


def _retry_group(opened: Opened, group_id: str, failed: bool) -> MapResult[Any]:
    job_ids = opened.session.attempt(partial(expanded, job_ids=[group_id]))
    if failed:
        ends = opened.session.attempt(lambda queue: list(states(queue, job_ids)))
        job_ids = [job_id for job_id, state in ends if state in FINAL and state != SUCCEEDED]
    records = opened.records(job_ids)
    manner = Manner(records[0].name if records else "map")
    return submit_group(opened, orders_again(opened.session, records), len(records), manner)
