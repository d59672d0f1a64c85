"""Maps and groups by their ids: results taken up again in any process, and the whole or its failures run again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gpulayer.again import failed_items_again, orders_again
from gpulayer.arrays import ArrayResult
from gpulayer.groups import expanded, is_group, states
from gpulayer.mapping import JobsResult, Manner, MapResult, Window
from gpulayer_broker.errors import UsageError
from gpulayer_broker.job import FINAL, SUCCEEDED

if TYPE_CHECKING:
    from gpulayer.client import Client


def map_result(
    client: Client, map_ids: Sequence[str], *, return_exceptions: bool, progress: bool
) -> MapResult[Any]:
    """The results of a map: of a group, of arrays, or of single calls."""
    job_ids = client._session.attempt(partial(expanded, job_ids=map_ids))
    records = client._records(job_ids)
    if not records:
        raise UsageError("map_result takes the ids of a map or of its jobs")
    manner = Manner(records[0].name or "map", return_exceptions, progress)
    jobs = [client.handle(job_id) for job_id in job_ids]
    counts = [record.count for record in records]
    if all(counts):
        return ArrayResult(client, zip(jobs, counts, strict=True), manner)
    if any(counts):
        raise UsageError("some of these jobs are maps and some are single calls: take them up apart")
    group = map_ids[0] if len(map_ids) == 1 and is_group(map_ids[0]) else ""
    return JobsResult(client, iter([jobs]), manner, sized=True, window=Window(1), group=group)


def retry_map(client: Client, map_id: str, *, failed: bool) -> MapResult[Any]:
    """A new map of the same calls, or of those that have ended without success."""
    if is_group(map_id):
        return _retry_group(client, map_id, failed)
    (record,) = client._records([map_id])
    if not record.is_array:
        raise UsageError(f"job {map_id} is no map: gpulayer retry {map_id} runs it again", value=map_id)
    if failed:
        order = failed_items_again(client._session, client._submitter.courier, record)
    else:
        (order,) = orders_again(client._session, [record])
    arrays = [(client.submit_order(order), order.count)] if order is not None else []
    return ArrayResult(client, iter(arrays), Manner(record.name or "map"))


def _retry_group(client: Client, group_id: str, failed: bool) -> MapResult[Any]:
    job_ids = client._session.attempt(partial(expanded, job_ids=[group_id]))
    if failed:
        ends = client._session.attempt(lambda queue: list(states(queue, job_ids)))
        job_ids = [job_id for job_id, state in ends if state in FINAL and state != SUCCEEDED]
    records = client._records(job_ids)
    manner = Manner(records[0].name if records else "map")
    return client.submit_group(orders_again(client._session, records), len(records), manner)
