"""Every function that detection calls of NVIDIA's library, with every answer of it: each error, no end, no function."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest

from gpulayer_worker.devices.facts import NOT_ANSWERING, Report, report_of
from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.worker.nvml.scenario import GPU_IS_LOST, RESET_REQUIRED, Driver, Gpu, Slice, build_library
from tests.worker.recorded import write_out
from tests.worker.test_gpu_faults import OFTEN
from tests.worker.test_gpu_jobs import seen_by
from tests.workers import Desk

CODES = sorted(code for name, code in vars(pynvml).items() if name.startswith("NVML_ERROR_"))
CARDS = (Gpu(0), Gpu(1, "NVIDIA A100-SXM4-40GB"), Gpu(2))
NEIGHBOURS = {Gpu(0).uuid, Gpu(2).uuid}
ALL = {card.uuid for card in CARDS}

WHOLE = ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2")
IDENTITY = ("nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID")
MEMORY = ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo")
FACTS = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetProcessName",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
)
DOINGS = (
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
)
EVENTS = ("nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2")
# What of the device is done with, whichever function says so.
ENDS = (GPU_IS_LOST, RESET_REQUIRED)

# A look at the machine with each of these faults, in turn.
Looks = Callable[..., Iterator[tuple[str, int, Report]]]


@contextmanager
def looking(driver: Driver, root: Path) -> Iterator[Callable[[str], dict[str, Any]]]:
    """A process that looks anew whenever it is asked."""
    command = [sys.executable, "-m", "tests.worker.nvml.look", str(root)]
    own = {**os.environ, **driver.environment}
    with subprocess.Popen(
        command, env=own, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        said, told = process.stdin, process.stdout

        def look(what: str = "") -> dict[str, Any]:
            said.write(what + "\n")
            said.flush()
            return dict(json.loads(told.readline()))

        try:
            yield look
        finally:
            process.kill()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine whose kernel lists two of the cards."""
    return write_out("nvidia_listed", tmp_path / "machine")


@pytest.fixture
def looks(driver: Driver, root: Path) -> Looks:
    def each(functions: tuple[str, ...], place: str = "") -> Iterator[tuple[str, int, Report]]:
        with looking(driver, root) as look:
            for function in functions:
                for code in CODES:
                    driver.recover()
                    driver.show(*CARDS).process(1, 1 << 22, 1 << 20)
                    driver.fail(function + place, code)
                    yield function, code, report_of(look("")["report"])

    return each


def unhurt(report: Report) -> set[str]:
    """The devices that can be used and of which it is known what they do."""
    failed = {reading.uuid for reading in report.readings if reading.failure}
    return {device.uuid for device in report.usable} - failed


def test_the_library_that_refuses_altogether_leaves_the_cards_listed_with_the_reason(looks: Looks) -> None:
    for function, code, report in looks(WHOLE):
        assert [device.uuid for device in report.devices] == [Gpu(0).uuid, Gpu(1).uuid], (function, code)
        assert all(device.reason for device in report.devices), (function, code)


def test_a_card_that_gives_no_identity_is_unusable_whatever_the_error_and_its_neighbours_are_not(
    looks: Looks,
) -> None:
    for function, code, report in looks(IDENTITY, ":1"):
        assert unhurt(report) == NEIGHBOURS, (function, code, report)
        assert len(report.devices) == len(CARDS), (function, code)


def test_one_version_of_the_memory_call_is_enough_whatever_the_error_of_the_other(looks: Looks) -> None:
    for function, code, report in looks(MEMORY, ":1"):
        ends = code in ENDS and function == MEMORY[0]
        assert unhurt(report) == (NEIGHBOURS if ends else ALL), (function, code, report)


def test_a_card_whose_memory_cannot_be_read_at_all_is_unusable_or_shares_the_machines(
    driver: Driver, root: Path
) -> None:
    with looking(driver, root) as look:
        for code in CODES:
            driver.recover()
            driver.show(*CARDS)
            for function in MEMORY:
                driver.fail(f"{function}:1", code)
            report = report_of(look("")["report"])

            unified = {device.uuid for device in report.usable if device.unified}
            expected = {Gpu(1).uuid} if code == pynvml.NVML_ERROR_NOT_SUPPORTED else set()
            assert unified == expected, (code, report)
            assert unhurt(report) == NEIGHBOURS | expected, (code, report)


def test_a_fact_that_the_library_does_not_tell_costs_no_card_whatever_the_error(looks: Looks) -> None:
    for function, code, report in looks(FACTS):
        assert unhurt(report) == ALL, (function, code, report)


def test_what_a_card_does_costs_its_use_only_where_the_error_says_that_it_is_done_with(looks: Looks) -> None:
    for function, code, report in looks(DOINGS, ":1"):
        assert unhurt(report) == (NEIGHBOURS if code in ENDS else ALL), (function, code, report)


def test_a_card_cut_into_slices_is_never_offered_whole_whatever_the_error(driver: Driver, root: Path) -> None:
    parts = (Slice("A100 MIG 1g.5gb", "MIG-a"), Slice("A100 MIG 1g.5gb", "MIG-b"))
    cut = replace(CARDS[1], mig=parts)
    with looking(driver, root) as look:
        for function in FACTS[4:]:
            for code in CODES:
                driver.recover()
                driver.show(CARDS[0], cut, CARDS[2]).fail(f"{function}:1", code)
                report = report_of(look("")["report"])
                assert unhurt(report) == NEIGHBOURS, (function, code, report)


def test_events_that_are_not_told_end_in_silence_whatever_the_error(driver: Driver, root: Path) -> None:
    with looking(driver, root) as look:
        for function in EVENTS:
            for code in CODES:
                if (function, code) == (EVENTS[2], pynvml.NVML_ERROR_TIMEOUT):
                    continue  # nothing has happened: it waits on
                driver.recover()
                driver.show(*CARDS).fail(function, code)
                found = look("xids")
                assert found["xid"] is None, (function, code)
                assert unhurt(report_of(found["report"])) == ALL, (function, code)


@pytest.mark.parametrize("count", [0, 1, 2, 8])
def test_as_many_cards_as_the_driver_has_are_found(driver: Driver, root: Path, count: int) -> None:
    cards = [Gpu(slot, "Tesla T4" if slot % 2 else "NVIDIA H100 80GB HBM3") for slot in range(count)]
    driver.show(*cards)

    with looking(driver, root) as look:
        found = report_of(look("")["report"]).usable

    assert [(device.index, device.name, device.uuid) for device in found] == [
        (slot, card.name, card.uuid) for slot, card in enumerate(cards)
    ]


@pytest.mark.parametrize("function", [*WHOLE, *IDENTITY, *MEMORY, *FACTS, *DOINGS, *EVENTS])
def test_a_library_that_lacks_the_function_is_as_one_that_says_so(
    function: str, driver: Driver, root: Path, tmp_path: Path
) -> None:
    driver.show(*CARDS).process(1, 1 << 22, 1 << 20)
    folder = tmp_path / "older"
    folder.mkdir()
    older = replace(driver, library=build_library(folder, without=function))
    what = "xids" if function in EVENTS else ""
    with looking(driver.fail(function, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND), root) as look:
        expected = look(what)
    driver.recover("fail")

    with looking(older, root) as look:
        assert look(what) == expected


def test_whichever_function_hangs_the_cards_are_listed_within_the_limit(driver: Driver, root: Path) -> None:
    """All of them at once, each in a process with a driver of its own."""
    code = (
        "import json, sys; from pathlib import Path; from gpulayer_worker.devices.probe import detect\n"
        "report, answers = detect(float(sys.argv[1]), Path(sys.argv[2]))\n"
        "print(json.dumps([answers, [device.reason for device in report.devices]]))"
    )
    functions = (*WHOLE, *IDENTITY, MEMORY[0], *FACTS[:4], *DOINGS)
    limit_s = 10.0
    started: dict[str, subprocess.Popen[str]] = {}
    for function in functions:
        own = Driver(driver.library, driver.file.with_name(function))
        own.show(*CARDS).process(1, 1 << 22, 1 << 20).hang(function)
        started[function] = subprocess.Popen(
            [sys.executable, "-c", code, str(limit_s), str(root)],
            env={**os.environ, **own.environment},
            stdout=subprocess.PIPE,
            text=True,
        )
    until_s = time.monotonic() + limit_s + PATIENCE_S

    told = {
        name: process.communicate(timeout=until_s - time.monotonic())[0] for name, process in started.items()
    }

    expected = [False, [NOT_ANSWERING, NOT_ANSWERING]]
    assert {name: json.loads(text) for name, text in told.items()} == dict.fromkeys(functions, expected)


@pytest.mark.parametrize("function", EVENTS)
def test_a_driver_that_hangs_over_its_events_holds_up_no_gpu_job(
    function: str, desk: Desk, hire: Hire, driver: Driver
) -> None:
    driver.show(Gpu(0)).hang(function)
    hire(environment=driver.environment, **OFTEN)

    assert seen_by(desk, gpus=1).split()[3] == "0"
    driver.change(0, name="Tesla T4 of later")
    wait_until(
        lambda: "of later" in str(desk.workers()),
        PATIENCE_S,
        "the machine is still looked at every now and then",
    )
    assert seen_by(desk, gpus=1).split()[3] == "0"
