"""`gpulayer retry`: what ended is run again, as a new job."""

from __future__ import annotations

from typing import Annotated

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say


def retry_jobs(
    job: opt.JobsArgument,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the new job; its exit code is this command's.")
    ] = False,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Run ended jobs again with the same files, arguments and options; print the ids of the new jobs.

    Example: gpulayer retry j_0123456789ab --follow
    """
    from gpulayer_broker.errors import UsageError

    if follow and (len(job) > 1 or json):
        raise UsageError("--follow is for one job, and prints no document")
    with opt.open_client(target, redis) as client:
        again = [client.retry(each) for each in job]
        if json:
            print_json(
                [{"schema": 1, "id": new.id, "retry_of": old} for new, old in zip(again, job, strict=True)]
            )
            return 0
        if not follow:
            print("\n".join(new.id for new in again))
            return 0
        from gpulayer.cli.follow import follow as follow_job

        say(f"job {again[0].id} submitted: {job[0]} again")
        return follow_job(client, again[0], None)
