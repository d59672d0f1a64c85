"""`gpulayer gc`: what has been over for long leaves, records from the queue and blobs from the private store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, say

if TYPE_CHECKING:
    from gpulayer.client import Client
    from gpulayer_broker.queue import Queue

# Files are sent before their job is there.
MARGIN_S = 3600.0


def collect_garbage(
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="TIME", help="How long ago it ended, such as 7d (30d)."),
    ] = None,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Remove the records of jobs that ended so long ago and, of the private set-up, files that nobody used since.

    What jobs that have not ended may need is kept.

    Example: gpulayer gc --older-than 7d
    """
    from gpulayer_broker.units import format_duration, format_size

    with opt.open_client(target, redis) as client:
        settings = client.target.settings
        age_s = (
            opt.duration_s("--older-than", older_than)
            if older_than is not None
            else max(settings.job_keep_s, settings.outputs_keep_s)
        )
        document: dict[str, Any] = {"schema": 1, "older_than_s": age_s, "jobs": _purge(client, age_s)}
        if client.target.is_private:
            document.update(_sweep(client, age_s))
    if json:
        print_json(document)
        return 0
    blobs = ""
    if "blobs" in document:
        blobs = f" and {document['blobs']} files of {format_size(document['bytes'])}"
    say(f"removed {document['jobs']} jobs{blobs} older than {format_duration(age_s)}")
    return 0


def _purge(client: Client, age_s: float) -> int:
    """Removes finished records, a call at a time; how many."""
    from gpulayer_broker import functions

    age_ms = int(age_s * 1000)
    results_ms = min(age_ms, int(client.target.settings.result_keep_s * 1000))
    call = functions.tick(older_than_ms=age_ms, results_older_than_ms=results_ms)
    removed = 0
    while True:
        ticked = client._session.attempt(lambda queue: queue.run(call))
        removed += ticked.purged
        if not ticked.purged and not ticked.faded:
            return removed


def _sweep(client: Client, age_s: float) -> dict[str, int]:
    """Removes files of the private store that nobody has used for so long, nor since a job waits."""
    from gpulayer_broker.folders import locate_folders
    from gpulayer_broker.store.local import LocalStore

    report = LocalStore(locate_folders().create().store).gc(max(age_s, _oldest_open_s(client)))
    return {"blobs": report.blobs, "bytes": report.total_bytes}


def _oldest_open_s(client: Client) -> float:
    """For how long the oldest job that has not ended has been there, and a little more; 0 where there is none."""
    created_ms = client._session.attempt(_created_of_oldest_open)
    return time.time() - min(created_ms) / 1000 + MARGIN_S if created_ms else 0.0


def _created_of_oldest_open(queue: Queue) -> list[int]:
    """When the oldest job of each state that is no end was submitted."""
    from gpulayer_broker.damage import words
    from gpulayer_broker.job import ACTIVE

    ids = [queue.link.call("ZRANGE", queue.keys.jobs(state), 0, 0) for state in ACTIVE]
    records = queue.records([words(raw) for found in ids for raw in found])
    return [record.created_ms for record in records if record is not None]
