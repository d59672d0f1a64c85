"""`gpulayer retry`: what ended is run again, as a new job or a new group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say
from gpulayer_broker.errors import UsageError

if TYPE_CHECKING:
    from gpulayer.client import Client


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
        again = [(each, *_again(client, each, failed)) for each in job]
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


def _again(client: Client, job_id: str, failed: bool) -> tuple[str, int]:
    """(the new id, '' where nothing is to be run again; how many jobs or calls)."""
    from gpulayer.groups import is_group

    if not is_group(job_id):
        record = client.get(job_id).record
        if not (failed and record.is_array):
            if failed and record.state == "succeeded":
                return "", 0
            return client.retry(job_id).id, max(1, record.count)
    result = client.retry_map(job_id, failed=failed)
    return (result.ids[0], len(result)) if len(result) else ("", 0)


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
