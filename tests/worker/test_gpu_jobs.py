"""GPUs through real workers and a stand-in driver: what is offered, granted and masked, and what a job sees of it."""

from __future__ import annotations

from typing import Any

from gpulayer_broker import functions
from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.units import GIB
from tests.support import PATIENCE_S
from tests.worker.conftest import Hire
from tests.worker.nvml.scenario import Driver, Gpu, Slice
from tests.workers import Desk

SEEN = (
    'echo "$GPULAYER_ACCELERATOR $GPULAYER_GPUS $CUDA_DEVICE_ORDER '
    '${CUDA_VISIBLE_DEVICES-unset} ${HIP_VISIBLE_DEVICES-unset}"'
)


def seen_by(desk: Desk, **needs: Any) -> str:
    """What a job with these needs is told of its devices."""
    return text_of(desk, shell(desk, SEEN, **needs))


def shell(desk: Desk, script: str, **needs: Any) -> str:
    desk.needs = build_requirements(**needs)
    return desk.shell(script)


def cancel(desk: Desk, job: str) -> None:
    """Ends a job and waits until it is gone."""
    desk.queue.run(functions.cancel(job))
    desk.final(job)


def text_of(desk: Desk, job: str) -> str:
    record = desk.final(job)
    assert record.state == "succeeded", (record.end_reason, record.error)
    return desk.whole_log(job).decode().strip()


def test_a_gpu_job_sees_the_granted_gpu_and_no_other(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0), Gpu(1))
    hire(environment=driver.environment)

    assert seen_by(desk, accelerator="cuda") == "cuda 1 PCI_BUS_ID 0 unset"


def test_a_job_for_two_gpus_sees_both(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0), Gpu(1))
    hire(environment=driver.environment)

    assert seen_by(desk, gpus=2) == "cuda 2 PCI_BUS_ID 0,1 unset"


def test_a_cpu_job_sees_no_gpu(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    hire(environment=driver.environment)

    assert seen_by(desk) == "cpu 0 PCI_BUS_ID -1 -1"


def test_a_job_for_any_device_gets_the_gpu_where_one_is_free(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    hire(environment=driver.environment)

    assert seen_by(desk, accelerator="any").startswith("cuda 1 ")


def test_a_job_for_any_device_runs_on_the_cpu_where_there_is_no_gpu(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    hire(environment=driver.environment)

    assert seen_by(desk, accelerator="any").startswith("cpu 0 ")


def test_of_mixed_gpus_a_job_gets_one_of_the_model_and_memory_that_it_asks_for(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0), Gpu(1, "NVIDIA A100-SXM4-40GB", 40 * GIB), Gpu(2))
    hire(environment=driver.environment)

    assert seen_by(desk, gpus=1, gpu_memory="24GB").split()[3] == "1"
    assert seen_by(desk, gpu_model="T4", gpus=2).split()[3] == "0,2"


def test_a_slice_is_granted_by_its_uuid_and_the_job_is_told(desk: Desk, hire: Hire, driver: Driver) -> None:
    parts = (Slice("A100 MIG 1g.5gb", "MIG-aaaa"), Slice("A100 MIG 1g.5gb", "MIG-bbbb"))
    driver.show(Gpu(0, "A100", 40 * GIB, mig=parts), Gpu(1))
    hire(environment=driver.environment)
    job = shell(desk, SEEN, gpu_model="MIG", gpus=1)

    assert text_of(desk, job).split()[3] == "MIG-aaaa"
    assert b"given by UUID" in desk.record(job).notes


def test_a_whole_gpu_is_granted_by_its_number_without_a_word(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    hire(environment=driver.environment)
    job = shell(desk, SEEN, gpus=1)

    assert text_of(desk, job).split()[3] == "0"
    assert desk.record(job).notes == b""


def test_only_the_chosen_gpus_are_offered_and_in_the_chosen_order(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0), Gpu(1), Gpu(2))
    hire("", "--gpus", f"2,{Gpu(0).uuid}", environment=driver.environment)

    assert seen_by(desk, gpus=1).split()[3] == "2"
    assert seen_by(desk, gpus=2).split()[3] == "2,0"


def test_a_worker_told_to_offer_no_gpu_takes_cpu_jobs_alone(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    hire("", "--gpus", "none", environment=driver.environment)

    assert seen_by(desk, accelerator="any").startswith("cpu 0 ")


def test_a_choice_that_names_no_device_is_refused_at_the_start(hire: Hire, driver: Driver) -> None:
    worker = hire("", "--gpus", "first", environment=driver.environment)

    assert worker.process.wait(PATIENCE_S) == 2
    assert "--gpus first: 'first' is no device: give numbers such as 0,1" in worker.said()


def test_gpu_jobs_do_not_wait_for_cpu_slots_nor_cpu_jobs_for_gpus(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0), Gpu(1), Gpu(2))
    hire(slots=1, environment=driver.environment)
    holders = [shell(desk, "sleep 60", gpus=1) for _ in range(3)]

    for holder in holders:
        desk.reaches(holder, "running")

    assert seen_by(desk).startswith("cpu")
    for holder in holders:
        cancel(desk, holder)


def test_jobs_share_a_gpu_where_its_worker_says_so(desk: Desk, hire: Hire, driver: Driver) -> None:
    driver.show(Gpu(0))
    hire("", "--gpu-share", "2", environment=driver.environment)
    first = shell(desk, "sleep 60", gpus=1, gpu_memory="8GiB")
    desk.reaches(first, "running")

    too_large = shell(desk, SEEN, gpus=1, gpu_memory="10GiB")

    assert seen_by(desk, gpus=1, gpu_memory="4GiB").split()[3] == "0"
    assert desk.record(too_large).state == "queued"
    cancel(desk, first)
    assert text_of(desk, too_large).split()[3] == "0"


def test_a_job_that_does_not_say_how_much_gpu_memory_it_needs_gets_no_shared_gpu(
    desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0))
    hire("", "--gpu-share", "2", environment=driver.environment)

    assert seen_by(desk, accelerator="any").startswith("cpu 0 ")
