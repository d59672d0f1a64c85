"""What is said about a job before it is submitted is said of the machine as it is now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer import private
from tests.cli.conftest import Cli
from tests.reliability.set_up import private_set_up
from tests.worker.nvml.scenario import Driver, Gpu, build_library


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch, isolated_environment: Path, tmp_path: Path) -> Iterator[Path]:
    with private_set_up(isolated_environment / "state" / tmp_path.name, monkeypatch) as state:
        yield state


def test_a_gpu_that_came_while_the_set_up_was_down_is_counted(
    set_up: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvml").mkdir()
    driver = Driver(build_library(tmp_path / "nvml"), tmp_path / "scenario").show()
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    assert "has 0" in cli("submit", "--must-fit", "--gpus", "1", "--", "true").err
    private.release_private()
    assert cli("down").code == 0

    driver.show(Gpu(0))

    outcome = cli("submit", "--must-fit", "--gpus", "1", "--", "true")
    assert outcome.code == 0, outcome.err
    assert "no known worker" not in outcome.err
