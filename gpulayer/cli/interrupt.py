"""`gpulayer interrupt`: Ctrl-C for jobs that run elsewhere."""

from __future__ import annotations

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say_each


def interrupt_jobs(
    job: opt.JobsArgument,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Send running jobs the signal of Ctrl-C (SIGINT), for them to save and stop, or go on; nothing ends by force.

    Example: gpulayer interrupt j_0123456789ab
    """
    from gpulayer.groups import expanded

    with opt.open_client(target, redis) as client:
        ids = client._session.attempt(lambda queue: expanded(queue, job))
        asked = list(zip(ids, client._opened.interrupt_each(ids), strict=True))
    if json:
        print_json([{"schema": 1, "id": job_id, "asked": told} for job_id, told in asked])
        return 0
    say_each(
        [(f"job {job_id}", "SIGINT is on its way" if told else "it does not run") for job_id, told in asked]
    )
    return 0
