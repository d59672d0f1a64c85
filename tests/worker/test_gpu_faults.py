"""GPUs that fail, vanish, hang or are somebody else's while a worker runs, through a stand-in driver."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import orjson
import psutil
import pytest

from gpulayer_broker.units import GIB, MIB
from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.worker.nvml.scenario import GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, Driver, Gpu, Slice
from tests.worker.test_gpu_jobs import SEEN, cancel, seen_by, shell, text_of
from tests.workers import Desk, WorkerProcess

# How often the machine is looked at, and how long a driver may take, for tests that wait for it. A driver that
# answers is given its time, however busy the machine is: between two children an error would be heard by none.
OFTEN = {"probe_every_s": 0.5, "probe_limit_s": 20.0, "heartbeat_s": 0.2}
IMPATIENT = {**OFTEN, "probe_limit_s": 1.0}


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no worker has started."""
    process = subprocess.Popen(["sleep", "300"])
    yield process
    process.kill()
    process.wait()


def devices_of(desk: Desk) -> list[dict[str, Any]]:
    """As the only worker last told of them."""
    [facts] = desk.workers().values()
    return list(orjson.loads(facts["info"])["devices"])


def reason_of(desk: Desk, index: int = 0) -> str | None:
    reason = devices_of(desk)[index]["reason"]
    return None if reason is None else str(reason)


def usable(desk: Desk) -> set[str]:
    return {device["uuid"] for device in devices_of(desk) if device["usable"]}


def let_the_last_reading_age() -> None:
    """A reading of a moment ago is taken for the present one."""
    old_s = time.monotonic() + 0.3
    wait_until(lambda: time.monotonic() > old_s, PATIENCE_S, "the last reading is old")


def is_left_alone(desk: Desk, worker: WorkerProcess, job: str) -> bool:
    """Whether the job still waits after the worker has claimed anew and run something else."""
    return seen_by(desk).startswith("cpu") and desk.record(job).state == "queued"


# --- somebody else's process -----------------------------------------------------------------------


def test_a_gpu_that_somebody_else_uses_is_not_granted_until_it_is_free(
    desk: Desk, hire: Hire, driver: Driver, stranger: subprocess.Popen[bytes]
) -> None:
    driver.show(Gpu(0, used_bytes=10 * GIB)).process(0, stranger.pid, 10 * GIB)
    worker = hire(environment=driver.environment, **OFTEN)
    job = shell(desk, SEEN, gpus=1)
    wait_until(lambda: desk.workers(), PATIENCE_S, "the worker is there")

    assert is_left_alone(desk, worker, job)
    assert devices_of(desk)[0]["foreign"] == [stranger.pid, "sleep", 10 * GIB]

    driver.recover("process").change(0, used_bytes=0)
    assert text_of(desk, job).split()[3] == "0"


def test_of_two_gpus_the_one_that_nobody_uses_is_granted(
    desk: Desk, hire: Hire, driver: Driver, stranger: subprocess.Popen[bytes]
) -> None:
    driver.show(Gpu(0, used_bytes=10 * GIB), Gpu(1)).process(0, stranger.pid, 10 * GIB)
    hire(environment=driver.environment)

    assert seen_by(desk, gpus=1).split()[3] == "1"


def test_a_use_that_begins_while_the_worker_idles_is_seen_at_the_next_claim(
    desk: Desk, hire: Hire, driver: Driver, stranger: subprocess.Popen[bytes]
) -> None:
    driver.show(Gpu(0))
    worker = hire(environment=driver.environment, heartbeat_s=2)
    assert seen_by(desk, gpus=1).split()[3] == "0"

    driver.change(0, used_bytes=10 * GIB).process(0, stranger.pid, 10 * GIB)
    let_the_last_reading_age()

    assert is_left_alone(desk, worker, shell(desk, SEEN, gpus=1))


def test_a_desktop_is_nobodys_use(
    desk: Desk, hire: Hire, driver: Driver, stranger: subprocess.Popen[bytes]
) -> None:
    driver.show(Gpu(0, used_bytes=300 * MIB)).process(0, stranger.pid, 300 * MIB, "g")
    hire(environment=driver.environment)

    assert seen_by(desk, gpus=1, gpu_memory="15GB").split()[3] == "0"


def test_memory_that_no_process_is_listed_for_is_somebody_elses(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0, used_bytes=8 * GIB))
    worker = hire(environment=driver.environment)

    assert is_left_alone(desk, worker, shell(desk, SEEN, gpus=1))
    assert devices_of(desk)[0]["foreign"] == [0, "", 8 * GIB]


def test_what_the_workers_own_job_uses_is_no_foreign_use(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    hire("", "--gpu-share", "2", environment=driver.environment, **OFTEN)
    first = shell(desk, "echo $$; exec sleep 60", gpus=1, gpu_memory="4GiB")
    wait_until(lambda: desk.tail(first), PATIENCE_S, "the job told its pid")
    pid = int(desk.tail(first))

    free_bytes = devices_of(desk)[0]["memory_free_bytes"]
    driver.change(0, used_bytes=3 * GIB).process(0, pid, 3 * GIB)
    wait_until(lambda: devices_of(desk)[0]["memory_free_bytes"] < free_bytes, PATIENCE_S, "it is seen")

    assert devices_of(desk)[0]["foreign"] is None
    assert seen_by(desk, gpus=1, gpu_memory="4GiB").split()[3] == "0"
    cancel(desk, first)


# --- devices that fail -----------------------------------------------------------------------------


def test_a_job_on_a_gpu_that_fell_off_the_bus_is_ended_and_runs_on_another(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0), Gpu(1))
    hire(environment=driver.environment, **OFTEN)
    job = shell(desk, f"[ $GPULAYER_ATTEMPT = 2 ] || sleep 60; {SEEN}", gpus=1)
    desk.reaches(job, "running")

    driver.fail("nvmlDeviceGetMemoryInfo_v2:0", GPU_IS_LOST)

    # Its number may be counted otherwise beside a broken card: the UUID is given.
    assert text_of(desk, job) == f"cuda 1 PCI_BUS_ID {Gpu(1).uuid} unset"
    assert desk.record(job).losses == 1
    assert reason_of(desk) == "fallen off the bus; reboot"
    assert b"gpu 0 (Tesla T4): fallen off the bus" in desk.tail(job, attempt=1)


def test_a_job_on_a_gpu_that_vanished_is_ended_and_handed_back(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0), Gpu(1))
    hire(environment=driver.environment, **OFTEN)
    job = shell(desk, f"[ $GPULAYER_ATTEMPT = 2 ] || sleep 60; {SEEN}", gpus=1)
    desk.reaches(job, "running")

    driver.remove(0)

    assert Gpu(1).uuid in text_of(desk, job)
    wait_until(lambda: usable(desk) == {Gpu(1).uuid}, PATIENCE_S, "the worker tells that one is gone")


def test_a_number_goes_on_to_mean_the_same_card_when_another_vanishes(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0), Gpu(1))
    hire("", "--gpus", "0", environment=driver.environment, **OFTEN)
    assert seen_by(desk, gpus=1).split()[3] == "0"

    driver.remove(0)

    wait_until(
        lambda: reason_of(desk) == "no longer shown by its driver",
        PATIENCE_S,
        "the machine was looked at anew",
    )
    assert not usable(desk)
    assert seen_by(desk, accelerator="any").startswith("cpu")


def test_a_critical_xid_ends_the_job_and_the_gpus_use(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    hire(environment=driver.environment, **OFTEN)
    job = shell(desk, "sleep 60", gpus=1)
    desk.reaches(job, "running")

    driver.xid(0, 79)

    wait_until(lambda: desk.record(job).state == "queued", PATIENCE_S, "the job is handed back")
    wait_until(lambda: reason_of(desk), PATIENCE_S, "the reason is told")
    assert reason_of(desk) == "Xid 79: fallen off the bus; reset the device, then restart the worker"
    assert seen_by(desk).startswith("cpu")
    cancel(desk, job)


def test_a_critical_xid_of_a_card_ends_the_use_of_its_slices(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0, mig=(Slice("T4 MIG 1g.5gb", "MIG-a"), Slice("T4 MIG 1g.5gb", "MIG-b"))), Gpu(1))
    hire(environment=driver.environment, **OFTEN)
    job = shell(desk, f"[ $GPULAYER_ATTEMPT = 2 ] || sleep 60; {SEEN}", gpus=1, gpu_model="MIG,T4")
    other = shell(desk, "sleep 60", gpus=1)
    for each in (job, other):
        desk.reaches(each, "running")

    driver.xid(0, 95)

    wait_until(lambda: usable(desk) == {Gpu(1).uuid}, PATIENCE_S, "only the other card is used")
    assert "Xid 95" in str(reason_of(desk))
    cancel(desk, other)
    assert Gpu(1).uuid in text_of(desk, job)


def test_a_job_whose_slice_is_taken_away_is_handed_back(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0, mig=(Slice("T4 MIG 1g.5gb", "MIG-a"),)))
    hire(environment=driver.environment, **OFTEN)
    job = shell(desk, f"[ $GPULAYER_ATTEMPT = 2 ] || sleep 60; {SEEN}", gpus=1)
    desk.reaches(job, "running")

    driver.show(Gpu(0, mig=(Slice("T4 MIG 2g.10gb", "MIG-b", 10 * GIB),)))

    assert "MIG-b" in text_of(desk, job)
    assert b"MIG-a is no longer shown by its driver" in desk.tail(job, attempt=1)


def test_an_xid_of_the_program_is_no_fault_of_the_gpu(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    worker = hire(environment=driver.environment, **OFTEN)
    assert seen_by(desk, gpus=1).split()[3] == "0"

    driver.xid(0, 31)

    wait_until(lambda: "Xid 31" in worker.said(), PATIENCE_S, "the error is told")
    assert seen_by(desk, gpus=1).split()[3] == "0"


def test_a_gpu_that_reports_impossible_memory_is_not_used(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0), Gpu(1, used_bytes=99 * GIB))
    hire(environment=driver.environment)

    assert seen_by(desk, gpus=1).split()[3] == Gpu(0).uuid
    assert str(reason_of(desk, 1)).startswith("reports memory that cannot be")


def test_a_driver_changed_under_the_running_machine_takes_its_gpus_out_of_use(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0))
    hire(environment=driver.environment, **OFTEN)
    assert seen_by(desk, gpus=1).split()[3] == "0"

    driver.fail("nvmlInitWithFlags", LIB_RM_VERSION_MISMATCH)

    wait_until(lambda: reason_of(desk), PATIENCE_S, "the reason is told")
    assert reason_of(desk) == "driver/library version mismatch; reload the driver or reboot"
    assert seen_by(desk, accelerator="any").startswith("cpu")


# --- drivers that hang -----------------------------------------------------------------------------


def test_a_worker_whose_driver_hangs_from_the_start_runs_cpu_jobs_and_gets_its_gpus_later(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0)).hang("nvmlInitWithFlags")
    hire(environment=driver.environment, **IMPATIENT)
    job = shell(desk, SEEN, gpus=1)

    assert seen_by(desk).startswith("cpu")
    assert desk.record(job).state == "queued"

    driver.recover()
    assert text_of(desk, job).split()[3] == "0"


def test_while_a_driver_hangs_heartbeats_go_on_and_cpu_jobs_run(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0))
    hire(environment=driver.environment, lease_s=4, heartbeat_s=0.2, probe_limit_s=60, probe_every_s=60)
    assert seen_by(desk, gpus=1).split()[3] == "0"
    driver.hang("nvmlDeviceGetMemoryInfo_v2")
    let_the_last_reading_age()

    held = shell(desk, "sleep 6")
    waiting = shell(desk, SEEN, gpus=1)

    record = desk.final(held)
    assert (record.state, record.attempt) == ("succeeded", 1)
    assert desk.record(waiting).state == "queued"


def test_jobs_on_the_gpus_of_a_driver_that_stays_silent_are_handed_back(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0))
    hire(environment=driver.environment, **IMPATIENT)
    job = shell(desk, f"[ $GPULAYER_ATTEMPT = 2 ] || sleep 60; {SEEN}", gpus=1)
    desk.reaches(job, "running")

    driver.hang("nvmlDeviceGetMemoryInfo_v2").hang("nvmlInitWithFlags")

    wait_until(lambda: desk.record(job).state == "queued", PATIENCE_S, "the job is handed back")
    [facts] = desk.workers().values()
    assert orjson.loads(facts["info"])["driver_answers"] is False
    driver.recover()
    assert text_of(desk, job).split()[3] == "0"


def test_a_probe_that_is_killed_is_started_again_and_gpu_jobs_go_on(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0))
    worker = hire(environment=driver.environment, probe_every_s=60, heartbeat_s=0.2)
    assert seen_by(desk, gpus=1).split()[3] == "0"

    [probe] = [
        c for c in psutil.Process(worker.pid).children() if "gpulayer_worker.devices.child" in c.cmdline()
    ]
    probe.kill()

    assert seen_by(desk, gpus=1).split()[3] == "0"
    words = "has ended (signal 9); another starts"
    wait_until(lambda: words in worker.said(), PATIENCE_S, "the worker tells it")
