"""What a worker has left now: a job that fits and must wait is told for what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpulayer_broker.capabilities import DeviceGroup
from gpulayer_broker.matching import (
    Foreign,
    Live,
    LiveDevice,
    Reason,
    explain,
    live_reasons,
    takeable,
)
from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.units import GIB, MIB
from tests.broker.test_capabilities import machine

T4S = DeviceGroup("cuda", "Tesla T4", 15 * GIB, 2)
OLLAMA = Foreign(4711, "ollama", int(18.2 * GIB))
FREE = LiveDevice(0, "GPU-a", 0, free=True, free_memory_bytes=15 * GIB)
ALSO_FREE = replace(FREE, index=1, uuid="GPU-b")


def live(*devices: LiveDevice, **state: Any) -> Live:
    base: dict[str, Any] = {"free_cpus": 2, "free_memory_bytes": 23 * GIB, "free_disk_bytes": 100 * GIB}
    return Live(devices=devices, **{**base, **state})


def texts(asked: dict[str, Any], now: Live) -> list[str]:
    found = live_reasons(build_requirements(**asked), machine(groups=(T4S,)), now)
    assert all(reason.fits == "busy" for reason in found)
    return [reason.text for reason in found]


def test_a_worker_with_all_that_is_asked_has_no_reason() -> None:
    assert texts({"gpus": 2, "gpu_memory": "14GiB", "memory": "8GB"}, live(FREE, ALSO_FREE)) == []


@pytest.mark.parametrize(
    ("asked", "now", "text"),
    [
        ({"gpus": 2}, live(FREE, replace(ALSO_FREE, free=False)), "needs 2 free GPUs, 1 free"),
        ({"gpus": 1}, live(), "needs 1 free GPU, 0 free"),
        ({"cpus": 2}, live(free_cpus=1), "needs 2 free cpus, 1 free"),
        ({}, live(free_cpus=0), "needs 1 free cpu, 0 free"),
        ({"memory": "16GiB"}, live(free_memory_bytes=3 * GIB), "needs 16.0 GB memory, 3.0 GB free"),
        (
            {"disk": "50GiB"},
            live(free_disk_bytes=int(12.1 * GIB)),
            "needs 50.0 GB disk, 12.1 GB free",
        ),
        ({}, live(state="draining"), "draining"),
        ({"gpus": 1}, live(FREE, driver_answers=False), "driver not answering"),
        ({}, live(disk_full=True), "disk full"),
        ({}, live(state="offline", offline_s=40.2), "offline for 40 s"),
    ],
)
def test_one_thing_short_is_one_reason_in_the_documented_words(
    asked: dict[str, Any], now: Live, text: str
) -> None:
    assert texts(asked, now) == [text]


def test_a_gpu_that_somebody_else_uses_is_not_free_and_its_user_is_named() -> None:
    now = live(replace(FREE, foreign=OLLAMA))

    assert texts({"gpus": 1}, now) == [
        "needs 1 free GPU, 0 free",
        "gpu 0 in use by pid 4711 (ollama, 18.2 GB)",
    ]


def test_a_user_whose_pid_is_hidden_is_another_process() -> None:
    now = live(replace(FREE, foreign=Foreign(0, "", 3 * GIB)))

    assert texts({"gpus": 1}, now)[-1] == "gpu 0 in use by another process (3.0 GB)"


def test_somebody_elses_use_of_a_gpu_that_is_not_needed_is_no_reason() -> None:
    assert texts({"gpus": 1}, live(replace(FREE, foreign=OLLAMA), ALSO_FREE)) == []


def test_what_a_desktop_holds_does_not_count_as_use() -> None:
    desktop = replace(FREE, free_memory_bytes=15 * GIB - 300 * MIB)

    assert takeable(build_requirements(gpus=1, gpu_memory="15GiB"), desktop)


def test_a_gpu_without_the_memory_asked_for_is_told_by_its_number() -> None:
    now = live(replace(FREE, free_memory_bytes=3 * GIB))

    assert texts({"gpus": 1, "gpu_memory": "14GiB"}, now) == [
        "needs 1 free GPU, 0 free",
        "needs 14.0 GB GPU memory, 3.0 GB free on gpu 0",
    ]


def test_any_never_waits_for_a_gpu() -> None:
    now = live(replace(FREE, foreign=OLLAMA), driver_answers=False)

    assert texts({"accelerator": "any"}, now) == []


def test_a_silent_driver_does_not_hold_up_cpu_jobs() -> None:
    assert texts({}, live(driver_answers=False)) == []


def test_several_reasons_are_all_told_in_the_documented_order() -> None:
    now = live(
        replace(FREE, foreign=OLLAMA),
        free_cpus=0,
        free_memory_bytes=0,
        free_disk_bytes=0,
        state="draining",
        driver_answers=False,
    )

    assert texts({"gpus": 2, "cpus": 1, "memory": "1GiB", "disk": "1GiB"}, now) == [
        "needs 2 free GPUs, 0 free",
        "needs 1 free cpu, 0 free",
        "needs 1.0 GB memory, 0 B free",
        "needs 1.0 GB disk, 0 B free",
        "gpu 0 in use by pid 4711 (ollama, 18.2 GB)",
        "draining",
        "driver not answering",
    ]


def test_what_is_free_is_not_told_of_a_worker_that_never_fits_but_its_absence_is() -> None:
    gone = live(replace(FREE, free=False), free_cpus=0, state="offline", offline_s=300)

    found = explain(build_requirements(gpus=4), machine(groups=(T4S,)), gone)

    assert found == [Reason("never", "needs 4 GPUs, has 2"), Reason("busy", "offline for 5 min")]


def test_a_worker_that_fits_and_has_room_says_so() -> None:
    found = explain(build_requirements(gpus=1), machine(groups=(T4S,)), live(FREE))

    assert found == [Reason("yes", "fits")]
