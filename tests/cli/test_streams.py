"""Streams that are closed, full, read by nobody, or take ASCII alone: one line at most, no traceback, nothing lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, Outcome
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until

Shell = Callable[..., Outcome]
ASCII = {"PYTHONIOENCODING": "ascii"}
POSIX = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture
def shell(here: Path, address: str) -> Shell:
    """Runs a line of a shell, in which `gpulayer` is this command line."""
    (here / "bin").mkdir()
    script = here / "bin" / "gpulayer"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m gpulayer "$@"\n')
    script.chmod(0o755)

    def call(line: str, **environment: str) -> Outcome:
        ended = subprocess.run(
            ["sh", "-c", line],
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
            env={**os.environ, "PATH": f"{script.parent}:{os.environ['PATH']}", **environment},
        )
        return Outcome(ended.returncode, ended.stdout.decode(), ended.stderr.decode())

    return call


@pytest.fixture
def job(cli: Cli, bench: Bench) -> str:
    """A job with a name that is not ASCII."""
    return cli("submit", "-d", "--no-ship", "--name", "größe \N{SNOWMAN}", "--", "true").out.strip()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_leads_nowhere(shell: Shell, job: str, closed: str) -> None:
    for command in ("jobs", "jobs --json", f"show {job}", f"logs {job}", "status"):
        outcome = shell(f"gpulayer {command} {closed}")
        assert (outcome.code, outcome.err) == (0, ""), command
        assert bool(outcome.out) == (">&-" not in closed.replace("2>&-", "") and "logs" not in command)
    refused = shell(f"gpulayer show j_nothing {closed}")
    assert refused.code == 2
    assert refused.out == ""


def test_what_is_said_does_not_go_where_a_closed_stream_was(shell: Shell, bench: Bench) -> None:
    """The connection to the queue would have got its descriptor."""
    outcome = shell(
        "gpulayer cancel j_nothing 2>&-; gpulayer submit -d --no-ship -- true 2>&- >&-; gpulayer jobs"
    )

    assert "no job" not in outcome.out
    assert len(outcome.out.splitlines()) == 1


@pytest.mark.parametrize("command", ["jobs", "jobs --json", "show {job}", "--help", "profiles --json"])
def test_output_that_cannot_be_written_is_told_in_one_line(shell: Shell, job: str, command: str) -> None:
    outcome = shell(f"gpulayer {command.format(job=job)} >/dev/full")

    assert outcome.code == 1
    assert outcome.err == "gpulayer: its output cannot be written: No space left on device\n"


def test_words_that_cannot_be_shown_keep_nothing_from_being_done(shell: Shell, job: str) -> None:
    assert shell(f"gpulayer cancel {job} 2>/dev/full").code == 0
    assert "state       cancelled" in shell(f"gpulayer show {job}").out


@pytest.mark.parametrize("environment", [ASCII, POSIX], ids=["ascii", "posix"])
def test_what_the_locale_cannot_show_is_written_by_its_number(
    shell: Shell, job: str, environment: dict[str, str]
) -> None:
    listed = shell("gpulayer jobs", **environment)
    assert (listed.code, listed.err) == (0, "")
    assert "gr\\xf6\\xdfe \\u2603" in listed.out
    assert json.loads(shell("gpulayer jobs --json", **environment).out)[0]["name"] == "größe \N{SNOWMAN}"
    named = shell("gpulayer submit -d --no-ship --name 'größe' -- true", **environment)
    assert named.code == 0, named.err
    assert "größe" in shell(f"gpulayer show {named.out.strip()}").out


@pytest.mark.usefixtures("worker")
def test_who_stops_reading_is_told_that_the_job_goes_on(shell: Shell, cli: Cli) -> None:
    flood = "import time; [print(n, flush=True) or time.sleep(0.01) for n in range(10**6)]"
    outcome = shell(f"gpulayer submit --no-ship -- {sys.executable} -c '{flood}' | head -1")

    job_id = cli("jobs").out.split()[0]
    assert outcome.out == "0\n"
    assert outcome.err.splitlines()[-1] == (
        f"nobody reads on: job {job_id} goes on; gpulayer logs {job_id} has its output"
    )
    cli("cancel", job_id)
    wait_until(lambda: "cancelled" in cli("jobs").out, PATIENCE_S, "it has ended")
