"""The tutorial: what a user does first, each on this user's private queue and worker, started by the first call."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpulayer as gl
from gpulayer import client as clients
from gpulayer import private
from gpulayer.client import Client
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("private_set_up")


@pytest.fixture
def private_set_up(
    monkeypatch: pytest.MonkeyPatch, isolated_environment: Path, tmp_path: Path
) -> Iterator[None]:
    monkeypatch.setenv("GPULAYER_STATE_DIR", str(isolated_environment / "state" / tmp_path.name))
    monkeypatch.chdir(tmp_path)
    defaults: dict[str | None, Client] = {}
    monkeypatch.setattr(clients, "_defaults", defaults)
    yield
    for client in defaults.values():
        client.close()
    private.down()
    private.release_private()


def gpulayer(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as a user types it."""
    command = [str(Path(sys.executable).parent / "gpulayer"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


@gl.remote
def square(n: int) -> int:
    return n * n


@gl.remote
def refuse(n: int) -> int:
    raise ValueError(f"{n} is not for me")


def test_a_function_runs_here_when_called_and_elsewhere_when_delayed() -> None:
    assert square(7) == 49

    job = square.delay(7)

    assert job.result(timeout=PATIENCE_S) == 49
    assert job.state == "succeeded"


def test_a_map_gives_its_results_in_order() -> None:
    assert square.map(range(20)).results() == [n * n for n in range(20)]


def test_an_error_over_there_is_raised_here() -> None:
    with pytest.raises(ValueError, match="3 is not for me"):
        refuse.delay(3).result(timeout=PATIENCE_S)


def test_a_command_takes_its_folder_along_and_brings_its_outputs_back(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "count.sh").write_text(
        'wc -w < words.txt > "$GPULAYER_OUTPUTS/count.txt"; echo counted\n'
    )
    (tmp_path / "app" / "words.txt").write_text("one two three\n")

    done = gpulayer("submit", "--source", "app", "--outputs-to", "back", "--", "sh", "count.sh")

    assert (done.returncode, done.stdout) == (0, "counted\n")
    assert (tmp_path / "back" / "outputs" / "count.txt").read_text().strip() == "3"


def test_a_commands_exit_code_is_the_jobs() -> None:
    assert gpulayer("submit", "--", "sh", "-c", "exit 7").returncode == 7


def test_a_job_that_nobody_can_run_says_why_and_waits(tmp_path: Path) -> None:
    submitted = gpulayer("submit", "--detach", "--accelerator", "rocm", "--", "true")
    job_id = submitted.stdout.strip()

    assert "no known worker can ever run this" in submitted.stderr
    assert "accelerator 'rocm' not available" in gpulayer("explain", job_id).stdout
    assert gpulayer("cancel", job_id).returncode == 0
    assert gl.Client().get(job_id).state == "cancelled"


def test_down_stops_everything() -> None:
    assert square.delay(2).result(timeout=PATIENCE_S) == 4

    stopped = gpulayer("down")

    assert "supervisor" in stopped.stdout + stopped.stderr
    assert private.status()["worker"] is None
