"""Workers and a desk for the tests of this folder; every worker is ended after its test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_broker.connection import Endpoint
from tests.worker.lines import Stop
from tests.worker.nvml.scenario import Driver, build_library
from tests.workers import Desk, Hire, WorkerProcess, hiring

__all__ = ["Hire"]


@pytest.fixture
def desk(valkey: Endpoint, namespace: str) -> Iterator[Desk]:
    desk = Desk(valkey, namespace)
    yield desk
    desk.close()


@pytest.fixture
def hire(desk: Desk, tmp_path: Path) -> Iterator[Hire]:
    """Starts a worker of this test's namespace; it is at work when it is returned."""
    with hiring(desk, tmp_path) as hire:
        yield hire


@pytest.fixture
def stop(desk: Desk, hire: Hire, tmp_path: Path) -> Stop:
    """A worker with a fork server and no free slot, at which calls line up for their ride."""
    return Stop(desk, hire, tmp_path)


@pytest.fixture
def worker(hire: Hire) -> WorkerProcess:
    """One worker with two slots."""
    return hire()


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for NVIDIA's library."""
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(nvml_library: Path, tmp_path: Path) -> Driver:
    """A driver without any card, which `driver.environment` lets a process find."""
    return Driver(nvml_library, tmp_path / "scenario").show()
