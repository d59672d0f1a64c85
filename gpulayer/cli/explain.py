"""`gpulayer explain`: which workers can run a job, and of each other one why not."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer.explaining import Explanation
    from gpulayer.options import Plan


def explain_job(
    job: opt.JobArgument,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Say which workers can run a job, and why the others cannot.

    Example: gpulayer explain j_0123456789ab
    """
    from gpulayer.position import position_of

    with opt.open_client(target, redis) as client:
        found = client.explain(job)
        record = client.get(job).record
        place = client._session.attempt(lambda queue: position_of(queue, record))
    if json:
        position = asdict(place) if place else None
        print_json({"schema": 1, "id": job, "state": record.state, "position": position, **_document(found)})
        return 0
    waits = f" ({place})" if place else ""
    say(f"job {job} is {record.state}{waits}; it needs {found.needs}")
    _print(found)
    return 0


def explain_plan(client: Client, plan: Plan, json: bool) -> int:
    """The same of what is not submitted yet."""
    from gpulayer.explaining import explain

    found = explain(plan.needs, client._opened.submitter.adviser.workers())
    if json:
        print_json({"schema": 1, **_document(found)})
        return 0
    say(f"not submitted; it needs {found.needs}")
    _print(found)
    return 0


def _document(found: Explanation) -> dict[str, Any]:
    return {"fits": found.fits, **asdict(found)}


def _print(found: Explanation) -> None:
    rows = [(each.worker, each.fits, "; ".join(each.reasons), each.provides) for each in found.workers]
    print_table(("worker", "fits", "reasons", "provides"), rows)
    for line in (*found.narrowing, found.summary):
        say(line)
