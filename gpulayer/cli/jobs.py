"""`gpulayer jobs`, `show`, `wait` and `outputs`: what becomes of jobs that were submitted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import completing
from gpulayer.cli import options as opt
from gpulayer.cli.output import print_facts, print_json, print_table, say

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer.handle import Job
    from gpulayer.position import Position
    from gpulayer_broker.job import JobRecord


# So many ids are told in a line.
MOST_NAMED = 5


def list_jobs(
    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only jobs of this state.",
            autocompletion=completing.one_of(completing.states),
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", help="The newest N.", min=1)] = 50,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """List jobs: those that have not ended first, the newest first; of one that waits, how many are ahead of it.

    Example: gpulayer jobs --state failed
    """
    from gpulayer.cli.documents import job_document
    from gpulayer.position import positions_of

    with opt.open_client(target, redis) as client:
        records = client.jobs(state, limit)
        names = {worker.id: worker.name for worker in client.workers()}
        places = client._session.attempt(lambda queue: positions_of(queue, records))
    if json:
        print_json([{**job_document(record), "position": _position(places, record)} for record in records])
    else:
        print_table(
            ("job", "state", "name", "worker", "run time", "age"),
            [_row(record, names, places) for record in records],
        )
    return 0


def _position(places: dict[str, Position], record: JobRecord) -> dict[str, Any] | None:
    place = places.get(record.id)
    return asdict(place) if place else None


def _row(record: JobRecord, names: dict[str, str], places: dict[str, Position]) -> tuple[str, ...]:
    from gpulayer.cli.documents import seconds
    from gpulayer_broker.units import format_duration

    age_s = time.time() - record.created_ms / 1000
    place = places.get(record.id)
    detail = record.end_reason or (place.brief if place else "" if record.final else record.phase)
    state = f"{record.state} ({detail})" if detail else record.state
    return (
        record.id,
        state,
        record.name,
        names.get(record.worker, record.worker) or "-",
        seconds(record.run_time_s),
        format_duration(age_s),
    )


def show_job(
    job: opt.GroupArgument,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Show one job: its state, worker, attempt, times, what it needs, and why it failed; or what became of a group.

    Example: gpulayer show j_0123456789ab
    """
    from gpulayer.cli.documents import job_document, job_facts
    from gpulayer.cli.many import show_group
    from gpulayer.groups import is_group
    from gpulayer.position import position_of

    if is_group(job):
        with opt.open_client(target, redis) as client:
            return show_group(client, job, json)
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
    """Wait until jobs and groups have ended; the exit code is the job's own, or 1 if any of several failed.

    Example: gpulayer wait j_0123456789ab --timeout 10m
    """
    most_s = opt.duration_s("--timeout", timeout) if timeout is not None else None
    end = time.monotonic() + most_s if most_s is not None else None
    with opt.open_client(target, redis) as client, _within(most_s, job):
        handles = _handles(client, job)
        client._opened.waiter.watch([handle._slot for handle in handles])
        for handle in handles:
            _wait(handle, end)
        ends = _ends(client, job)
    if json:
        documents = [each.document for each in ends]
        print_json(documents if len(job) > 1 else documents[0])
    else:
        print_table(("job", "state"), [(each.id, each.text) for each in ends])
        _tell_failures([each.record for each in ends if each.record])
    return ends[0].code if len(ends) == 1 else int(any(each.code for each in ends))


@contextmanager
def _within(most_s: float | None, job_ids: Sequence[str]) -> Iterator[None]:
    """Words a wait that was given up: by Ctrl-C, or by the time that was asked for, not by what was left of it."""
    from gpulayer_broker.errors import WaitTimeout

    try:
        yield
    except KeyboardInterrupt:
        which = ", ".join(job_ids) if len(job_ids) <= MOST_NAMED else f"{len(job_ids)} jobs"
        say(f"no longer waiting: {which} not ended by this; gpulayer cancel ends a job")
        raise
    except WaitTimeout as error:
        raise WaitTimeout(
            f"job {error.job_id} has not ended within {most_s:g} s; it goes on", job_id=error.job_id
        ) from None


@dataclass(frozen=True)
class _End:
    """What was waited for: how it is told, its exit code, and a job's record."""

    id: str
    text: str
    document: dict[str, Any]
    code: int
    record: JobRecord | None = None


def _handles(client: Client, job_ids: Sequence[str]) -> list[Job[Any]]:
    """Of all jobs, of the groups' too; JobNotFound for one that is not there."""
    from gpulayer.groups import is_group

    plain = [each for each in job_ids if not is_group(each)]
    client._opened.records(plain)
    members = [job for each in job_ids if is_group(each) for job in client.map_result(each).jobs]
    return [*map(client.handle, plain), *members]


def _ends(client: Client, job_ids: Sequence[str]) -> list[_End]:
    from gpulayer.groups import is_group

    plain = client._opened.records([each for each in job_ids if not is_group(each)])
    found = {record.id: _job_end(record) for record in plain}
    return [_group_end(client, each) if is_group(each) else found[each] for each in job_ids]


def _job_end(record: JobRecord) -> _End:
    from gpulayer.cli.documents import exit_code, job_document

    return _End(record.id, record.state, job_document(record), exit_code(record) or 0, record)


def _tell_failures(records: Sequence[JobRecord]) -> None:
    """Says of the first jobs that failed why they did: who waits has not seen their output."""
    from gpulayer.cli.many import SHOWN, WITH_LAST_WORDS, tell_failure
    from gpulayer_broker.job import FAILED, TIMED_OUT

    failed = [record for record in records if record.state in (FAILED, TIMED_OUT)]
    for number, record in enumerate(failed[:SHOWN]):
        tell_failure(record, "gpulayer", last=number < WITH_LAST_WORDS)


def _group_end(client: Client, group: str) -> _End:
    from gpulayer.cli.many import group_document, group_now
    from gpulayer.groups import summary

    counts, failed = group_now(client, group)
    return _End(group, summary(counts), group_document(group, counts, failed), int(bool(failed)))


def _wait(handle: Job[Any], end: float | None) -> None:
    left_s = None if end is None else max(0.0, end - time.monotonic())
    if handle._notice(left_s) is None:
        raise handle._late(left_s)


def fetch_job(
    job: opt.GroupArgument,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where they go (gpulayer_runs/JOB).")
    ] = None,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Fetch the files that a job returned; of a group, each job's into a folder of its own.

    Example: gpulayer outputs j_0123456789ab --to results
    """
    from gpulayer.cli.many import fetched_group
    from gpulayer.fetching import fetch_outputs
    from gpulayer.groups import is_group
    from gpulayer.handle import RUNS_FOLDER

    folder = to or Path(RUNS_FOLDER, job)
    with opt.open_client(target, redis) as client:
        if is_group(job):
            folder = to or Path(RUNS_FOLDER)
            paths = fetched_group(client, job, folder)
        else:
            paths = fetch_outputs(client._session, client.get(job).record, folder)
    if json:
        print_json({"schema": 1, "id": job, "folder": str(folder), "files": paths})
    elif paths:
        print_table(("file",), [(str(folder / path),) for path in paths])
    else:
        say(f"job {job} returned no files")
    return 0
