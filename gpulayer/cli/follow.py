"""Follows a job to its end: where it runs, its output as it comes, its outputs into a folder, its exit code.

Ctrl-C only detaches: the job goes on, and the line says how to come back to it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from gpulayer.cli.documents import exit_code, seconds, why_it_failed
from gpulayer.cli.output import say
from gpulayer.cli.terminal import Terminal
from gpulayer.client import Client
from gpulayer.fetching import fetch_outputs
from gpulayer.handle import RUNS_FOLDER, Job
from gpulayer.logs import STARTED, WAITS, read_log
from gpulayer_broker.errors import StoreError
from gpulayer_broker.job import SUCCEEDED, JobRecord

DETACHED = 130
PHASES_SAID = {
    "delayed": "it is to begin later",
    "blocked": "a job that it comes after has not ended",
    "limited": "the jobs of its key leave it no room yet",
}


def follow(client: Client, job: Job[Any], outputs_to: Path | None, *, quiet_stdout: bool = False) -> int:
    """Shows the job until it ends; the exit code. `quiet_stdout` keeps stdout for a document."""
    try:
        _show_output(client, job, quiet_stdout)
        job._notice()
    except KeyboardInterrupt:
        say(
            f"detached: job {job.id} goes on; gpulayer logs -f {job.id} follows it, gpulayer cancel {job.id} ends it"
        )
        return DETACHED
    except BrokenPipeError:
        say(f"nobody reads on: job {job.id} goes on; gpulayer logs {job.id} has its output")
        raise
    record = job.record
    say(_ended(client, record))
    for note in json.loads(record.notes or b"[]"):
        say(f"gpulayer: {note}")
    code = exit_code(record) or 0
    return _fetch(client, record, outputs_to) or code


def _show_output(client: Client, job: Job[Any], quiet_stdout: bool) -> None:
    terminal = Terminal(out=sys.stderr.buffer if quiet_stdout else None)
    try:
        pieces = read_log(
            client._session,
            job.id,
            follow=True,
            progress=terminal.shows_progress,
            whole=not terminal.is_watched,
        )
        waiting = _Waiting(client, job.id)
        for piece in pieces:
            if piece.stream == STARTED:
                terminal.erase()
                say(f"job {job.id} runs on {client.worker_name(piece.data.decode())}")
            elif piece.stream == WAITS:
                waiting.tell()
            else:
                terminal.write(piece)
    finally:
        terminal.erase()


class _Waiting:
    """Says why a job has not begun, and again when the reason has become another."""

    def __init__(self, client: Client, job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._told = ""

    def tell(self) -> None:
        record = self._client.get(self._job_id).record
        reason = PHASES_SAID.get(record.phase) or self._room()
        if not reason or reason == self._told:
            return
        place = "" if self._told else self._place(record)
        self._told = reason
        say(f"job {self._job_id} waits: {reason}{place}")

    def _room(self) -> str:
        """Why no worker takes it; nothing where one is about to, or is being started by this very command."""
        found = self._client.explain(self._job_id)
        starts = self._client.target.is_private and not found.workers
        return "" if starts or found.fits == "yes" else found.summary

    def _place(self, record: JobRecord) -> str:
        from gpulayer.position import position_of

        place = self._client._session.attempt(lambda queue: position_of(queue, record))
        return f" ({place})" if place and place.ahead else ""


def _ended(client: Client, record: JobRecord) -> str:
    if record.state != SUCCEEDED:
        return f"gpulayer: {why_it_failed(record)}"
    return (
        f"job {record.id} succeeded on {client.worker_name(record.worker)}, attempt {record.attempt}: "
        f"waited {seconds(record.queue_wait_s)}, ran {seconds(record.run_time_s)}"
    )


def _fetch(client: Client, record: JobRecord, outputs_to: Path | None) -> int:
    """Fetches what the job returned; not 0 if that failed."""
    if not record.outputs:
        return 0
    folder = outputs_to or Path(RUNS_FOLDER, record.id)
    try:
        paths = fetch_outputs(client._session, record, folder)
    except StoreError as error:
        say(f"gpulayer: {error}; gpulayer outputs {record.id} tries again")
        return error.exit_code
    say(f"outputs: {', '.join(paths[:5])}{', …' if len(paths) > 5 else ''} in {folder}")
    return 0
