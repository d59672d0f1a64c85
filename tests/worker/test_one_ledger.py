"""One GPU, one job: whoever offers it, two workers on one machine or the processes of a Dramatiq app."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path

import dramatiq
import pytest

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.settings import Settings
from tests.support import PATIENCE_S, end_process, wait_until
from tests.worker.conftest import Hire
from tests.worker.nvml.scenario import Driver, Gpu
from tests.worker.test_gpu_jobs import shell
from tests.workers import TIMES, Desk

# What every holder of a GPU writes: the GPU, from when, until when.
HOLD = 'd=$(date +%s%N); sleep 0.3; echo "$CUDA_VISIBLE_DEVICES $d $(date +%s%N)" >> {file}'
APP = """
import os, time
import dramatiq
from dramatiq.middleware import CurrentMessage
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.settings import load_settings
from gpulayer_worker import granted_devices, offer_devices

broker = CapabilityBroker(os.environ["APP_QUEUE"], settings=load_settings())
broker.add_middleware(CurrentMessage())
offer_devices(broker)
dramatiq.set_broker(broker)

@dramatiq.actor(accelerator="cuda", gpus=1, queue_name="app")
def hold(path):
    start = time.time_ns()
    [device] = granted_devices(broker, CurrentMessage.get_current_message())
    time.sleep(0.3)
    with open(path, "a") as file:
        file.write(f"{device.index} {start} {time.time_ns()}\\n")
"""

StartApp = Callable[[int], None]


@pytest.fixture
def start_app(desk: Desk, driver: Driver, tmp_path: Path) -> Iterator[StartApp]:
    """The stock command line of Dramatiq, with so many processes of one app."""
    (tmp_path / "app.py").write_text(APP)
    started: list[subprocess.Popen[bytes]] = []

    def start(processes: int) -> None:
        command = [sys.executable, "-m", "dramatiq", "app", "--processes", str(processes), "--threads", "2"]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=app_environment(desk, driver, tmp_path)))

    with ExitStack() as ends:
        yield start
        for process in started:
            ends.callback(end_process, process)


def app_environment(desk: Desk, driver: Driver, folder: Path) -> Mapping[str, str]:
    times = {f"GPULAYER_{name}": str(value) for name, value in TIMES.items()}
    own = {"APP_QUEUE": desk.endpoint.url, "GPULAYER_NAMESPACE": desk.namespace, "PYTHONPATH": str(folder)}
    return {**os.environ, **times, **driver.environment, **own}


def send_to_app(desk: Desk, count: int, path: Path) -> None:
    broker = CapabilityBroker(desk.endpoint, settings=Settings(namespace=desk.namespace))

    @dramatiq.actor(broker=broker, actor_name="hold", queue_name="app", accelerator="cuda", gpus=1)
    def hold(path: str) -> None:
        raise AssertionError("it runs elsewhere")

    with closing(broker):
        for _ in range(count):
            hold.send(str(path))


def holds(path: Path, count: int) -> dict[str, list[tuple[int, int]]]:
    """By GPU, sorted: from when until when it was held. All of so many jobs are over."""
    wait_until(
        lambda: path.exists() and len(path.read_text().splitlines()) == count,
        PATIENCE_S,
        f"{count} jobs ended",
    )
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        gpus, start, end = line.split()
        for gpu in gpus.split(","):
            found[gpu].append((int(start), int(end)))
    return {gpu: sorted(spans) for gpu, spans in found.items()}


def assert_one_at_a_time(found: dict[str, list[tuple[int, int]]]) -> None:
    for gpu, spans in found.items():
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start, f"gpu {gpu} was held twice at {start}"


@pytest.mark.rule_04
def test_two_workers_of_one_machine_never_grant_a_gpu_twice(
    desk: Desk, hire: Hire, driver: Driver, tmp_path: Path
) -> None:
    driver.show(Gpu(0), Gpu(1))
    path = tmp_path / "holds"
    for _ in range(2):
        hire(environment=driver.environment)
    wait_until(lambda: desk.online() == 2, PATIENCE_S, "both workers are there")

    for _ in range(10):
        shell(desk, HOLD.format(file=path), gpus=1)

    found = holds(path, 10)
    assert_one_at_a_time(found)
    assert found.keys() == {"0", "1"}


@pytest.mark.rule_04
@pytest.mark.rule_05
def test_jobs_of_one_to_four_gpus_share_eight_and_none_twice(
    desk: Desk, hire: Hire, driver: Driver, tmp_path: Path
) -> None:
    driver.show(*(Gpu(slot) for slot in range(8)))
    path = tmp_path / "holds"
    for _ in range(2):
        hire(environment=driver.environment)
    wait_until(lambda: desk.online() == 2, PATIENCE_S, "both workers are there")
    counts = random.Random(7).choices((1, 2, 3, 4), k=24)

    for gpus in counts:
        shell(desk, HOLD.format(file=path), gpus=gpus)

    found = holds(path, len(counts))
    assert_one_at_a_time(found)
    assert sum(len(spans) for spans in found.values()) == sum(counts)
    assert found.keys() == {str(slot) for slot in range(8)}


@pytest.mark.rule_04
def test_a_worker_and_processes_of_a_dramatiq_app_never_grant_a_gpu_twice(
    desk: Desk, hire: Hire, driver: Driver, start_app: StartApp, tmp_path: Path
) -> None:
    driver.show(Gpu(0), Gpu(1))
    path = tmp_path / "holds"
    hire(environment=driver.environment)
    start_app(2)
    wait_until(lambda: desk.online() == 3, PATIENCE_S, "the worker and both processes are there")

    for _ in range(6):
        shell(desk, HOLD.format(file=path), gpus=1)
    send_to_app(desk, 6, path)

    found = holds(path, 12)
    assert_one_at_a_time(found)
    assert found.keys() == {"0", "1"}
