"""Who follows a job that does not begin is told why, once for each reason."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Cli
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S


def words(process: subprocess.Popen[str], until: str) -> list[str]:
    """The lines of stderr up to one that holds a text."""
    assert process.stderr is not None
    found: list[str] = []
    for line in process.stderr:
        found.append(line.rstrip("\n"))
        if until in line:
            return found
    raise AssertionError(f"{until!r} was not said: {found}")


def test_why_a_followed_job_has_not_begun_is_said_once(
    cli: Cli, bench: Bench, here: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    large, ahead = (cli("submit", "-d", "--cpus", "60", "--", "true").out.strip() for _ in range(2))
    bench.take(large)
    process = spawn("submit", "--cpus", "10", "--", "true")
    said = words(process, " waits: ")
    job_id = said[-1].split()[1]
    bench.end(large)
    bench.end(ahead)
    bench.end(job_id)
    said += words(process, "succeeded")

    assert process.wait(PATIENCE_S) == 0
    (reason,) = [line for line in said if " waits: " in line]
    assert reason.startswith(f"job {job_id} waits: the only worker that fits is busy (1 job ahead")


def test_a_job_that_is_to_begin_later_says_so(
    cli: Cli, bench: Bench, here: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    process = spawn("submit", "--delay", "1h", "--", "true")

    assert words(process, " waits: ")[-1].endswith(" waits: it is to begin later")
