"""Machines whose clocks are wrong, by an hour or by years, from the start or suddenly: nothing is decided by them.

The clock is wrong for whole processes, by a library that stands before the C library's own. Only the queue's server and
clocks that count from a machine's start decide when something is over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpulayer_broker.workers import read_workers
from tests.reliability.conftest import Hire
from tests.support import PATIENCE_S
from tests.workers import Desk

SOURCE = Path(__file__).with_name("skewed_clock.c")
HOUR_S, DECADE_S = 3600, 10 * 365 * 86400
SKEWS_S = [HOUR_S, -HOUR_S, DECADE_S, -DECADE_S]


class WrongClock:
    """A clock that a process is started with; `set` makes it jump."""

    def __init__(self, library: Path, file: Path) -> None:
        self._library, self._file = library, file

    def set(self, skew_s: int) -> Mapping[str, str]:
        """The environment of a process that is to have it."""
        draft = self._file.with_suffix(".new")
        draft.write_text(str(skew_s))
        os.replace(draft, self._file)
        return {"LD_PRELOAD": str(self._library), "SKEW_FILE": str(self._file)}


@pytest.fixture(scope="session")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs cc: apt-get install gcc")
    library = tmp_path_factory.mktemp("clock") / "skewed_clock.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    return library


@pytest.fixture
def clock(clock_library: Path, tmp_path: Path) -> WrongClock:
    return WrongClock(clock_library, tmp_path / "skew")


def test_the_clock_of_these_tests_is_wrong(clock: WrongClock) -> None:
    script = "import time; print(time.time())"
    environment = {**os.environ, **clock.set(DECADE_S)}
    told = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)

    assert float(told.stdout) > time.time() + DECADE_S / 2


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_a_worker_with_a_wrong_clock_runs_jobs_and_ends_nobody_elses(
    skew_s: int, desk: Desk, hire: Hire, tmp_path: Path, clock: WrongClock
) -> None:
    gate = tmp_path / "gate"
    hire("right", "--node", "n1", slots=1)
    held = desk.shell(f"until [ -e {gate} ]; do sleep 0.01; done")
    desk.reaches(held, "running")
    kept = desk.shell("echo kept")

    hire("wrong", "--node", "n2", slots=1, environment=clock.set(skew_s))
    assert desk.final(kept).state == "succeeded"
    retried = desk.shell("[ $GPULAYER_ATTEMPT = 2 ]", options={"max_retries": 1, "min_backoff": 50})
    assert (desk.final(retried).state, desk.record(retried).attempt) == ("succeeded", 2)
    endless = desk.shell("sleep 1000", timeout_s=1.0)
    assert desk.final(endless).end_reason == "timeout"

    ages = [worker.heartbeat_age_s for worker in read_workers(desk.queue)]
    assert len(ages) == 2
    assert max(ages) < PATIENCE_S
    gate.touch()
    record = desk.final(held)
    assert (record.state, record.attempt, record.losses) == ("succeeded", 1, 0)
    assert desk.record(kept).state == "succeeded"
    for job in (held, kept, retried):
        assert 0 <= (desk.record(job).run_time_s or 0) < PATIENCE_S


@pytest.mark.parametrize("skew_s", [-HOUR_S, DECADE_S])
def test_a_clock_that_jumps_under_a_running_worker_costs_no_job(
    skew_s: int, desk: Desk, hire: Hire, tmp_path: Path, clock: WrongClock
) -> None:
    gate = tmp_path / "gate"
    worker = hire(environment=clock.set(0), lease_s=12)
    held = desk.shell(f"until [ -e {gate} ]; do sleep 0.01; done")
    desk.reaches(held, "running")

    clock.set(skew_s)
    others = [desk.shell(f"echo {n}") for n in range(5)]
    assert {desk.final(job).state for job in others} == {"succeeded"}
    gate.touch()
    record = desk.final(held)

    assert (record.state, record.attempt, record.losses) == ("succeeded", 1, 0)
    assert worker.alive


@pytest.mark.parametrize("skew_s", [HOUR_S, -DECADE_S])
def test_a_client_with_a_wrong_clock_submits_what_runs_when_it_should(
    skew_s: int, desk: Desk, hire: Hire, clock: WrongClock
) -> None:
    hire(private=False)
    own = {"GPULAYER_REDIS_URL": desk.endpoint.url, "GPULAYER_NAMESPACE": desk.namespace}
    command = [sys.executable, "-c", "from gpulayer.cli import main; main()"]

    def submit(*words: str) -> str:
        environment = {**os.environ, **own, **clock.set(skew_s)}
        told = subprocess.run(
            [*command, "submit", "--detach", *words],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return told.stdout.strip()

    soon, late = submit("--", "echo", "soon"), submit("--delay", "1h", "--", "echo", "late")
    assert desk.final(soon).state == "succeeded"
    shortly = submit("--delay", "1s", "--", "echo", "shortly")
    assert desk.final(shortly).state == "succeeded"

    seconds, _ = desk.link.call("TIME")
    due_s = float(desk.link.call("ZSCORE", f"{desk.queue.keys.root}delayed", late)) / 1000
    assert due_s - int(seconds) == pytest.approx(HOUR_S, abs=2 * PATIENCE_S)
    assert desk.record(late).state == "queued"
    for job in (soon, shortly):
        assert 0 <= (desk.record(job).queue_wait_s or 0) < 2 * PATIENCE_S
