"""Each part of the private set-up killed or stopped in the middle of a map: the list is right, and all parts run again.

The parts: supervisor, queue server, worker, fork server, a job's process (fresh), a process of many calls (warm). A
killed process of a job is a failed attempt of it, so the map has retries. Afterwards `gpulayer down` leaves no process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpulayer as gl
from gpulayer import private
from gpulayer.cli import run
from gpulayer_broker.alive import is_stopped
from gpulayer_broker.folders import locate_folders
from gpulayer_broker.settings import load_settings
from tests.reliability.nemesis import is_gone
from tests.reliability.set_up import (
    ALL_S,
    SERVICES,
    VICTIMS,
    killed_of,
    private_set_up,
    processes_of_set_up,
    roles,
    service,
)
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(600)
COUNT = 300
BEFORE = 40
# A command of a job: its parent is the fork server, whose parent is the worker.
WORKER = "$(ps -o ppid= -p $(ps -o ppid= -p $$))"


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, isolated_environment: Path, tmp_path: Path) -> Iterator[Path]:
    """A state folder of this test alone; what runs on it is stopped afterwards."""
    with private_set_up(isolated_environment / "state" / tmp_path.name, monkeypatch) as state:
        yield state


def square(n: int, folder: str) -> int:
    import time
    from pathlib import Path as Place

    Place(folder, str(n)).touch()
    time.sleep(0.02)
    return n * n


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Where each call leaves a file when it begins."""
    folder = tmp_path / "begun"
    folder.mkdir()
    return folder


def in_the_middle(function: gl.RemoteFunction[..., int], begun: Path) -> gl.MapResult[int]:
    """A map of which some calls have begun."""
    calls = function.starmap([(n, str(begun)) for n in range(COUNT)])
    wait_until(lambda: len(os.listdir(begun)) >= BEFORE, ALL_S, f"{BEFORE} calls have begun")
    return calls


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_map_is_right_and_all_parts_run_again_whatever_is_killed(
    victim: str, isolation: str, state: Path, begun: Path
) -> None:
    function = gl.remote(square, retries=3, isolation=isolation)
    calls = in_the_middle(function, begun)
    before = {name: service(name) for name in SERVICES}

    killed = wait_until(lambda: killed_of(victim), PATIENCE_S, f"a {victim} is killed", every=0.001)
    assert len(os.listdir(begun)) < COUNT

    assert calls.results() == [n * n for n in range(COUNT)]
    wait_until(lambda: is_gone(killed), PATIENCE_S, f"process {killed} is gone")
    # As any command of the user does; none is needed but for a supervisor.
    private.ensure_private(load_settings())
    after = {name: service(name) for name in SERVICES}
    assert {name for name in SERVICES if after[name] != before[name]} == {victim} & set(SERVICES)
    assert function.delay(7, str(begun)).result(ALL_S) == 49
    assert all(roles().values())

    assert run(["down"]) == 0
    wait_until(lambda: not processes_of_set_up(state), PATIENCE_S, "no process of the set-up is left")


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_map_that_is_waited_for_is_right_when_all_but_the_server_is_killed(
    isolation: str, state: Path, begun: Path
) -> None:
    """Nobody calls a command: who waits starts what is missing."""
    calls = in_the_middle(gl.remote(square, retries=3, isolation=isolation), begun)
    for name in ("supervisor", "worker"):
        wait_until(lambda: killed_of(name), PATIENCE_S, f"the {name} is killed")  # noqa: B023

    assert calls.results() == [n * n for n in range(COUNT)]
    assert all(roles().values())


def test_a_submit_that_is_waited_for_starts_what_is_missing(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It follows the log, and hears nothing any more."""
    assert run(["submit", "--", "true"]) == 0
    pids = f"{service('supervisor')} {WORKER}"
    script = f"[ $GPULAYER_ATTEMPT -gt 1 ] || kill -9 {pids}; sleep 1; echo attempt $GPULAYER_ATTEMPT"

    assert run(["submit", "--", "sh", "-c", script]) == 0

    assert capfd.readouterr().out == "attempt 2\n"
    assert all(roles().values())


def test_a_job_that_kills_its_worker_each_time_is_given_up_and_the_next_one_runs(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", "--", "sh", "-c", f"kill -9 {WORKER}; sleep 300"]) == 75
    assert "was given up: 3 workers were lost while they ran this job" in capsys.readouterr().err
    assert run(["submit", "--", "true"]) == 0
    assert all(roles().values())
    assert run(["down"]) == 0
    assert not processes_of_set_up(state)


def test_a_job_that_kills_its_worker_once_runs_again(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = f"[ $GPULAYER_ATTEMPT -gt 1 ] || kill -9 {WORKER}; sleep 1; echo attempt $GPULAYER_ATTEMPT"

    assert run(["submit", "--", "sh", "-c", script]) == 0

    assert capfd.readouterr().out == "attempt 2\n"


@pytest.mark.parametrize("parts", [["server"], ["supervisor"], ["supervisor", "server"]])
@pytest.mark.parametrize("number", ["KILL", "STOP"])
def test_a_job_that_strikes_what_it_does_not_run_on_goes_on(
    parts: list[str], number: str, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["submit", "--", "true"]) == 0
    pids = " ".join(str(service(part)) for part in parts)

    assert (
        run(["submit", "--", "sh", "-c", f"kill -{number} {pids}; sleep 1; echo attempt $GPULAYER_ATTEMPT"])
        == 0
    )

    assert capfd.readouterr().out == "attempt 1\n"
    assert run(["submit", "--", "true"]) == 0
    assert all(roles().values())
    assert run(["down"]) == 0
    assert not processes_of_set_up(state)


def was_told_to_go_on(pid: int) -> bool:
    folders = locate_folders()
    logs = (folders.supervisor_log, folders.state / "worker.log")
    return any(f"{pid} was stopped: it is told to go on" in log.read_text() for log in logs)


@pytest.mark.parametrize("victim", ["supervisor", "server", "worker", "fork server"])
def test_a_map_is_right_and_nothing_is_started_anew_whatever_is_stopped(
    victim: str, state: Path, begun: Path
) -> None:
    """SIGSTOP, which a job can send to what it depends on: the supervisor lets the others go on, a command lets it."""
    function = gl.remote(square)
    calls = in_the_middle(function, begun)
    before = {name: service(name) for name in SERVICES}
    stopped = VICTIMS[victim]()

    os.kill(stopped, signal.SIGSTOP)

    assert calls.results() == [n * n for n in range(COUNT)]
    if victim == "supervisor":
        assert is_stopped(stopped)
    else:
        wait_until(lambda: was_told_to_go_on(stopped), PATIENCE_S, f"the {victim} is told to go on")
    private.ensure_private(load_settings())
    wait_until(lambda: not is_stopped(stopped), PATIENCE_S, f"the {victim} goes on")
    assert {name: service(name) for name in SERVICES} == before
    assert all(roles().values())

    assert run(["down"]) == 0
    wait_until(lambda: not processes_of_set_up(state), PATIENCE_S, "no process of the set-up is left")


def test_down_ends_a_set_up_that_stands_still(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gl.remote(square).delay(3, str(state)).result(ALL_S) == 9
    pids = [service(name) for name in SERVICES]
    for pid in reversed(pids):
        os.kill(pid, signal.SIGSTOP)

    assert run(["status"]) == 0
    shown = capsys.readouterr().out
    assert [f", stopped (kill -CONT {pid} lets it go on)" in shown for pid in pids] == [True] * 3
    assert ", does not answer" in shown

    assert run(["down"]) == 0
    assert not processes_of_set_up(state)
    assert "killing it" not in (locate_folders().supervisor_log).read_text()
