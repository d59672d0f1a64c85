"""Workers and a desk for the tests of this folder; every worker is ended after its test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer_broker.connection import Endpoint
from tests.worker.nvml.scenario import Driver, build_library
from tests.workers import Desk, WorkerProcess

Hire = Callable[..., WorkerProcess]


@pytest.fixture
def desk(valkey: Endpoint, namespace: str) -> Iterator[Desk]:
    desk = Desk(valkey, namespace)
    yield desk
    desk.close()


@pytest.fixture
def hire(desk: Desk, tmp_path: Path) -> Iterator[Hire]:
    """Starts a worker of this test's namespace."""
    hired: list[WorkerProcess] = []

    def hire(name: str = "", *options: str, **facts: Any) -> WorkerProcess:
        endpoint = facts.pop("endpoint", desk.endpoint)
        name = name or f"{desk.namespace}-{len(hired)}"
        log = tmp_path / f"worker-{len(hired)}.log"
        hired.append(WorkerProcess(endpoint, desk.namespace, name, log, *options, **facts))
        return hired[-1]

    yield hire
    for worker in hired:
        worker.end()
    for worker in hired:
        print(f"--- {worker.name}\n{worker.said()}")


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
