"""`gpulayer explain`: which workers can run a job, and of each other one why not."""

from __future__ import annotations

from dataclasses import asdict

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, print_table, say


def explain_job(
    job: opt.JobArgument,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Say which workers can run a job, and why the others cannot.

    Example: gpulayer explain j_0123456789ab
    """
    with opt.open_client(target, redis) as client:
        found = client.explain(job)
        state = client.get(job).state
    if json:
        print_json({"schema": 1, "id": job, "state": state, "fits": found.fits, **asdict(found)})
        return 0
    say(f"job {job} is {state}; it needs {found.needs}")
    rows = [(each.worker, each.fits, "; ".join(each.reasons), each.provides) for each in found.workers]
    print_table(("worker", "fits", "reasons", "provides"), rows)
    say(found.summary)
    return 0
