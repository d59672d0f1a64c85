"""A broker with results of its own, workers in this process, and Dramatiq's own command line with `app.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import dramatiq
import pytest
from dramatiq.results import Results

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint
from gpulayer_broker.results import QueueResults
from gpulayer_broker.settings import Settings
from tests.support import PATIENCE_MS, end_process

TIMES = {"lease_s": 4.0, "heartbeat_s": 0.4, "lease_grace_s": 0.5}


def quick_settings(namespace: str = "default") -> Settings:
    """Leases and heartbeats that a test can wait for."""
    return Settings(
        namespace=namespace,
        lease_s=TIMES["lease_s"],
        heartbeat_s=TIMES["heartbeat_s"],
        lease_grace_s=TIMES["lease_grace_s"],
    )


ROOT = Path(__file__).parents[2]

Start = Callable[..., dramatiq.Worker]
Cli = Callable[..., "subprocess.Popen[bytes]"]
Lines = Callable[[], list[str]]
Send = Callable[..., "dramatiq.Message[None]"]


@pytest.fixture
def broker(valkey: Endpoint, namespace: str) -> Iterator[CapabilityBroker]:
    broker = CapabilityBroker(valkey, settings=quick_settings(namespace))
    broker.add_middleware(Results(backend=QueueResults(broker)))
    before = dramatiq.broker.global_broker
    dramatiq.set_broker(broker)
    yield broker
    dramatiq.broker.global_broker = before
    broker.close()


@pytest.fixture
def start(broker: CapabilityBroker) -> Iterator[Start]:
    """Starts a worker in this process; it is stopped after the test."""
    workers: list[dramatiq.Worker] = []

    def start(threads: int = 4, **options: object) -> dramatiq.Worker:
        worker = dramatiq.Worker(broker, worker_threads=threads, worker_timeout=50, **options)  # type: ignore[arg-type]
        broker.emit_after("process_boot")
        worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.stop(timeout=PATIENCE_MS)


@pytest.fixture
def told(tmp_path: Path) -> Path:
    """The file into which the actors of `app.py` write one line a run."""
    path = tmp_path / "told"
    path.touch()
    return path


@pytest.fixture
def cli_environment(valkey: Endpoint, namespace: str, told: Path) -> Mapping[str, str]:
    times = {f"GPULAYER_{name.upper()}": str(value) for name, value in TIMES.items()}
    own = {"APP_QUEUE": valkey.url, "APP_TOLD": str(told), "GPULAYER_NAMESPACE": namespace}
    return {**os.environ, **times, **own, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def cli(cli_environment: Mapping[str, str]) -> Iterator[Cli]:
    """Starts `dramatiq tests.dramatiq.app` with these arguments; it is ended after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dramatiq", "tests.dramatiq.app:broker", *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**cli_environment, **environment}, start_new_session=True
        )
        started.append(process)
        return process

    with ExitStack() as ends:
        yield start
        for process in started:
            ends.callback(end_process, process)


@pytest.fixture
def send(broker: CapabilityBroker) -> Callable[..., dramatiq.Message[None]]:
    """Sends a message to an actor of `app.py`, which this process does not have."""
    broker.declare_queue("default")

    def send(actor: str, *args: object, **options: object) -> dramatiq.Message[None]:
        message: dramatiq.Message[None] = dramatiq.Message("default", actor, args, {}, dict(options))
        return broker.enqueue(message)

    return send


@pytest.fixture
def lines(told: Path) -> Lines:
    return lambda: told.read_text().splitlines()
