"""`gpulayer jobs`, `show`, `wait`, `cancel` and `outputs`: what becomes of jobs that were submitted."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_facts, print_json, print_table, say

if TYPE_CHECKING:
    from gpulayer.handle import Job
    from gpulayer_broker.job import JobRecord


def list_jobs(
    state: Annotated[
        str | None, typer.Option("--state", metavar="STATE", help="Only jobs of this state.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", help="The newest N.", min=1)] = 50,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """List jobs: those that have not ended first, the newest first.

    Example: gpulayer jobs --state failed
    """
    from gpulayer.cli.documents import job_document

    with opt.open_client(target, redis) as client:
        records = client.jobs(state, limit)
        names = {worker.id: worker.name for worker in client.workers()}
    if json:
        print_json([job_document(record) for record in records])
    else:
        print_table(
            ("job", "state", "name", "worker", "run time", "age"), [_row(record, names) for record in records]
        )
    return 0


def _row(record: JobRecord, names: dict[str, str]) -> tuple[str, ...]:
    from gpulayer.cli.documents import seconds
    from gpulayer_broker.units import format_duration

    age_s = time.time() - record.created_ms / 1000
    state = f"{record.state} ({record.end_reason})" if record.end_reason else record.state
    return (
        record.id,
        state,
        record.name,
        names.get(record.worker, record.worker) or "-",
        seconds(record.run_time_s),
        format_duration(age_s),
    )


def show_job(
    job: opt.JobArgument,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Show one job: its state, worker, attempt, times, what it needs, and why it failed.

    Example: gpulayer show j_0123456789ab
    """
    from gpulayer.cli.documents import job_document, job_facts
    from gpulayer.position import position_of

    with opt.open_client(target, redis) as client:
        record = client.get(job).record
        worker = client.worker_name(record.worker) if record.worker else ""
        place = client._session.attempt(lambda queue: position_of(queue, record))
        items = client._session.attempt(lambda queue: queue.item_counts(job)) if record.is_array else None
    if json:
        position = asdict(place) if place else None
        print_json({**job_document(record), "position": position, "items": _items(record, items)})
    else:
        facts = job_facts(record, worker)
        if items:
            facts.append(("items", f"{items[0]} of {record.count} ended, {items[1]} of them failed"))
        print_facts([*facts, *([("position", str(place))] if place else [])])
    return 0


def _items(record: JobRecord, counts: tuple[int, int] | None) -> dict[str, int] | None:
    """How far an array is; None for a plain job."""
    return {"count": record.count, "ended": counts[0], "failed": counts[1]} if counts else None


def wait_jobs(
    job: opt.JobsArgument,
    timeout: Annotated[
        str | None, typer.Option("--timeout", metavar="TIME", help="Give up waiting, such as 5m.")
    ] = None,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Wait until jobs have ended; the exit code is the job's own, or 1 if any of several failed.

    Example: gpulayer wait j_0123456789ab --timeout 10m
    """
    from gpulayer.cli.documents import exit_code, job_document
    from gpulayer_broker.units import parse_duration

    end = time.monotonic() + parse_duration(timeout) if timeout is not None else None
    with opt.open_client(target, redis) as client:
        records = [_waited(handle, end) for handle in [client.get(each) for each in job]]
    if json:
        documents = [job_document(record) for record in records]
        print_json(documents if len(job) > 1 else documents[0])
    else:
        print_table(("job", "state"), [(record.id, record.state) for record in records])
    codes = [exit_code(record) or 0 for record in records]
    return codes[0] if len(codes) == 1 else int(any(codes))


def _waited(handle: Job[Any], end: float | None) -> JobRecord:
    handle.wait(None if end is None else max(0.0, end - time.monotonic()))
    return handle.record


def cancel_jobs(
    job: opt.JobsArgument,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Ask for the end of jobs: a waiting one ends at once, a running one by TERM, then KILL.

    Example: gpulayer cancel j_0123456789ab
    """
    documents = []
    with opt.open_client(target, redis) as client:
        for job_id in job:
            asked = client.cancel(job_id)
            record = client.get(job_id).record
            documents.append(
                {
                    "schema": 1,
                    "id": job_id,
                    "asked": asked,
                    "state": record.state,
                    "end_reason": record.end_reason or None,
                }
            )
    if json:
        print_json(documents if len(job) > 1 else documents[0])
        return 0
    for told in documents:
        cancelled = told["asked"] and told["state"] == "cancelled"
        text = told["state"] if cancelled else _asked(bool(told["asked"]), str(told["state"]))
        say(f"job {told['id']}: {text}")
    return 0


def _asked(asked: bool, state: str) -> str:
    return "its end is asked for" if asked else f"it has ended already ({state})"


def fetch_job(
    job: opt.JobArgument,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where they go (gpulayer_runs/JOB).")
    ] = None,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Fetch the files that a job returned.

    Example: gpulayer outputs j_0123456789ab --to results
    """
    from gpulayer.fetching import fetch_outputs
    from gpulayer.handle import RUNS_FOLDER

    folder = to or Path(RUNS_FOLDER, job)
    with opt.open_client(target, redis) as client:
        paths = fetch_outputs(client._session, client.get(job).record, folder)
    if json:
        print_json({"schema": 1, "id": job, "folder": str(folder), "files": paths})
    elif paths:
        print_table(("file",), [(str(folder / path),) for path in paths])
    else:
        say(f"job {job} returned no files")
    return 0
