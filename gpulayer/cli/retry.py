"""`gpulayer retry`: what ended is run again, as a new job or a new group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say
from gpulayer_broker.errors import UsageError

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer_broker.job import JobRecord


def retry_jobs(
    job: opt.JobsArgument,
    failed: Annotated[
        bool, typer.Option("--failed", help="Of a group or a map, only what ended without success.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the new job; its exit code is this command's.")
    ] = False,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Run ended jobs, groups and maps again with the same files, arguments and options; print the new ids.

    Example: gpulayer retry g_0123456789ab --failed
    """
    if follow and (len(job) > 1 or json):
        raise UsageError("--follow is for one job or group, and prints no document")
    with opt.open_client(target, redis) as client:
        again = _again(client, list(dict.fromkeys(job)), failed)
        if json:
            print_json([_document(old, new, count) for old, new, count in again])
        elif follow and again[0][1]:
            return _follow(client, *again[0])
        for old, new, _ in again:
            if not new:
                say(f"{old}: nothing ended without success")
            elif not json:
                print(new)
    return 0


def _again(client: Client, job_ids: Sequence[str], failed: bool) -> list[tuple[str, str, int]]:
    """Of each (its id, the new one, '' where nothing is to be run again; how many jobs or calls)."""
    from gpulayer.groups import is_group
    from gpulayer_broker.job import SUCCEEDED

    records = client._opened.records([each for each in job_ids if not is_group(each)])
    maps = {each for each in job_ids if is_group(each)} | {r.id for r in records if failed and r.is_array}
    jobs = [r for r in records if r.id not in maps and not (failed and r.state == SUCCEEDED)]
    new = dict(zip((r.id for r in jobs), _jobs_again(client, jobs), strict=True))
    found = {r.id: (r.id, new.get(r.id, ""), max(1, r.count) if r.id in new else 0) for r in records}
    for each in maps:
        result = client.retry_map(each, failed=failed)
        found[each] = (each, result.ids[0], len(result)) if len(result) else (each, "", 0)
    return [found[each] for each in job_ids]


def _jobs_again(client: Client, records: Sequence[JobRecord]) -> list[str]:
    from gpulayer.again import orders_again
    from gpulayer.maps import submit_jobs

    orders = orders_again(client._session, records)
    return [job.id for batch in submit_jobs(client._opened, orders) for job in batch]


def _document(old: str, new: str, count: int) -> dict[str, Any]:
    return {"schema": 1, "id": new or None, "retry_of": old, "count": count}


def _follow(client: Client, old: str, new: str, count: int) -> int:
    from gpulayer.cli.follow import follow as follow_job
    from gpulayer.cli.many import follow_group
    from gpulayer.groups import is_group

    if not is_group(new):
        say(f"job {new} submitted: {old} again")
        return follow_job(client, client.get(new), None)
    submitted = f"group {new} submitted: {count} jobs of {old} again"
    return follow_group(client, client.map_result(new), None, False, submitted)
