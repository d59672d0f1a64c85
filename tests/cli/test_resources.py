"""`resources detect`, `worker status` and `workers` as people and scripts read them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer_broker.connection import Endpoint
from gpulayer_broker.units import GIB
from tests.cli.conftest import Cli
from tests.support import PATIENCE_S, wait_until
from tests.worker.nvml.scenario import LIB_RM_VERSION_MISMATCH, Driver, Gpu, build_library
from tests.workers import WorkerProcess

DOCUMENT_KEYS = {
    "schema", "id", "name", "version", "state", "target", "started_at", "heartbeat_age_s", "python", "os", "arch",
    "cpus", "memory_bytes", "disk_free_bytes", "labels", "launchers", "slots", "devices", "frameworks", "jobs",
}  # fmt: skip
DEVICE_KEYS = {
    "index", "kind", "name", "uuid", "pci", "memory_bytes", "memory_free_bytes", "unified", "mig", "usable", "reason",
    "independent", "distributed", "job",
}  # fmt: skip

# A machine under load may take longer to ask its drivers than people want to wait.
PATIENT = (
    "from gpulayer_worker import detection; detection.PROBE_LIMIT_S = 60\n"
    "from gpulayer_worker import frameworks; frameworks.ASK_LIMIT_S = 60\n"
    "from gpulayer.cli import main; main()"
)
Detect = Callable[..., str]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def driver(library: Path, tmp_path: Path) -> Driver:
    return Driver(library, tmp_path / "scenario").show()


@pytest.fixture
def detect(driver: Driver) -> Detect:
    """The command as a process of its own, which finds the stand-in driver; it ends with 0."""

    def run(*options: str) -> str:
        command = [
            sys.executable,
            "-c",
            PATIENT,
            "resources",
            "detect",
            *options,
        ]
        environment = {**os.environ, **driver.environment}
        answer = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=True
        )
        return answer.stdout

    return run


def lines_of(text: str, label: str) -> list[str]:
    """The facts with a label, which stands in ten columns."""
    return [line[10:] for line in text.splitlines() if line[:10] == label.ljust(10)]


def test_a_machine_without_a_gpu_is_shown_and_the_exit_code_is_0(detect: Detect) -> None:
    text = detect()

    [machine] = lines_of(text, "machine")
    assert re.fullmatch(r"\S+ Linux \d+\.\d+ \S+, \d+ CPUs?, \d+\.\d GB memory", machine)
    assert lines_of(text, "python") == [f"{sys.executable} {sys.version.split()[0]}"]
    assert any(line.startswith("numpy ") for line in lines_of(text, "framework"))
    assert not lines_of(text, "device")
    assert not lines_of(text, "unusable")


def test_a_gpu_is_one_line_with_what_was_validated(detect: Detect, driver: Driver) -> None:
    driver.show(Gpu(0))

    assert lines_of(detect(), "device") == [
        f"[0] cuda Tesla T4 (15.0 GB) {Gpu(0).uuid} independent=not-run distributed=not-run"
    ]


def test_a_gpu_that_cannot_be_used_is_one_line_with_the_reason(detect: Detect, driver: Driver) -> None:
    driver.show(Gpu(0), Gpu(1, "NVIDIA A100-SXM4-40GB"))
    driver.fail("nvmlDeviceGetUUID:1", LIB_RM_VERSION_MISMATCH)

    assert lines_of(detect(), "unusable") == [
        "[1] cuda NVIDIA A100-SXM4-40GB: driver/library version mismatch; reload the driver or reboot"
    ]


def test_a_driver_that_refuses_altogether_is_one_line_with_the_reason(detect: Detect, driver: Driver) -> None:
    driver.show(Gpu(0)).fail("nvmlInitWithFlags", LIB_RM_VERSION_MISMATCH)

    [line] = lines_of(detect(), "unusable")
    assert line.endswith("driver/library version mismatch; reload the driver or reboot")


def test_a_memory_that_is_not_supported_is_unified_and_the_machines_own(
    detect: Detect, driver: Driver
) -> None:
    driver.show(Gpu(0, "NVIDIA GB10"))
    driver.fail("nvmlDeviceGetMemoryInfo", 3).fail("nvmlDeviceGetMemoryInfo_v2", 3)

    document = json.loads(detect("--json"))
    [device] = document["devices"]
    assert (device["unified"], device["memory_bytes"]) == (True, document["memory_bytes"])
    assert " GB unified) GPU-" in lines_of(detect(), "device")[0]


def test_the_document_has_every_fact_and_all_distributions(detect: Detect, driver: Driver) -> None:
    driver.show(Gpu(0, used_bytes=GIB))

    document = json.loads(detect("--json"))
    [device] = document["devices"]
    assert device.keys() == DEVICE_KEYS - {"job"}
    assert device["memory_free_bytes"] == 15 * GIB - GIB - Gpu(0).reserved_bytes
    assert document["drivers"] == {"nvidia": "550.54.15"}
    assert "pytest" in document["distributions"]
    assert "pytest" not in document["frameworks"]


def test_verify_computes_on_the_processor_and_says_where_it_could_not(detect: Detect, driver: Driver) -> None:
    driver.show(Gpu(0))

    cpu, gpu = lines_of(detect("--verify"), "verified")
    assert re.fullmatch(r"cpu ok: (torch|jax|numpy) \S+", cpu)
    assert gpu.startswith(("[0] cuda not tried: ", "[0] cuda failed: "))


def test_a_python_that_is_not_there_is_named(cli: Cli) -> None:
    outcome = cli("resources", "detect", "--python", "/no/such/python")

    assert outcome.code == 78
    assert outcome.err == "gpulayer: --python /no/such/python: there is no such program\n"


# --- a running worker ---


@pytest.fixture
def gpu_worker(
    valkey: Endpoint, address: str, namespace: str, driver: Driver, tmp_path: Path
) -> Iterator[WorkerProcess]:
    driver.show(Gpu(0, used_bytes=GIB), Gpu(1))
    options = ("--label", "zone=eu")
    log = tmp_path / "worker.log"
    worker = WorkerProcess(
        valkey, namespace, f"{namespace}-g", log, *options, private=False, environment=driver.environment
    )
    try:
        yield worker.settle()
    finally:
        worker.end()
        print(worker.said())


def status_of(cli: Cli, worker: WorkerProcess) -> dict[str, Any]:
    def document() -> Any:
        found = json.loads(cli("workers", "--json").out)
        return found and found[0]["devices"] and found[0]

    assert worker.alive
    found: dict[str, Any] = wait_until(document, PATIENCE_S, "the worker is listed")
    return found


def test_a_worker_s_document_has_the_contract_s_keys(cli: Cli, gpu_worker: WorkerProcess) -> None:
    document = status_of(cli, gpu_worker)

    assert document.keys() == DOCUMENT_KEYS
    assert [device.keys() for device in document["devices"]] == [DEVICE_KEYS, DEVICE_KEYS]
    assert document["slots"] == {"cpu": {"total": 2, "free": 2}, "gpu": {"total": 2, "free": 1}}
    assert document["labels"] == {"zone": "eu"}
    assert document["python"]["executable"] == sys.executable


def test_worker_status_is_the_same_document(cli: Cli, gpu_worker: WorkerProcess) -> None:
    expected = status_of(cli, gpu_worker)

    found = json.loads(cli("worker", "status", "--json").out)
    assert found.keys() == expected.keys()
    assert found["devices"] == expected["devices"]
    assert lines_of(cli("worker", "status", gpu_worker.name).out, "device")[1].startswith(
        "[1] cuda Tesla T4 (15.0 GB"
    )


def test_a_worker_that_nobody_knows_is_named(cli: Cli, gpu_worker: WorkerProcess) -> None:
    status_of(cli, gpu_worker)

    outcome = cli("worker", "status", "nobody")
    assert outcome.code == 2
    assert "nobody" in outcome.err


def test_explain_tells_a_busy_gpu_from_a_missing_one(cli: Cli, gpu_worker: WorkerProcess) -> None:
    status_of(cli, gpu_worker)

    holder = cli("submit", "--detach", "--gpus", "1", "--", "sleep", "60").out.strip()
    wait_until(
        lambda: json.loads(cli("show", "--json", holder).out)["state"] == "running", PATIENCE_S, "it runs"
    )
    waiting = cli("submit", "--detach", "--gpus", "1", "--", "true").out.strip()
    busy = json.loads(cli("explain", waiting, "--json").out)
    assert (busy["fits"], busy["workers"][0]["reasons"]) == (
        "busy",
        ["needs 1 free GPU, 0 free", "gpu 0 in use by another process (1.0 GB)"],
    )

    three = cli("submit", "--detach", "--gpus", "3", "--", "true").out.strip()
    never = json.loads(cli("explain", three, "--json").out)
    assert (never["fits"], never["workers"][0]["reasons"]) == ("never", ["needs 3 GPUs, has 2"])
    assert json.loads(cli("workers", "--json").out)[0]["devices"][1]["job"] == holder
    for job in (holder, waiting, three):
        cli("cancel", job)
