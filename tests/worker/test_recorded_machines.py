"""Machines that are not here: AMD, Apple, Jetson, GB10 and broken NVIDIA ones, from recorded files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer_broker.units import GIB, MIB
from gpulayer_worker.devices.facts import MISMATCH, NOT_ANSWERING, Report
from gpulayer_worker.devices.probe import detect
from tests.worker.nvml.scenario import LIB_RM_VERSION_MISMATCH, NOT_SUPPORTED, Driver, Gpu
from tests.worker.recorded import NAMES, recording, write_out

LIMIT_S = 20.0

Look = Callable[[str], Report]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """What the probe's child finds on a recorded machine."""
    return lambda name: detect(LIMIT_S, write_out(name, tmp_path / name))[0]


@pytest.mark.parametrize("name", NAMES)
def test_each_recording_says_where_it_came_from(name: str) -> None:
    assert len(recording(name)["source"]) > 30


def test_amd_gpus_are_found_without_a_runtime_in_the_order_of_their_masks(look: Look) -> None:
    found = look("mi210_pair")

    assert [(d.index, d.kind, d.name, d.pci, d.memory_bytes) for d in found.devices] == [
        (0, "rocm", "AMD Instinct MI210", "0000:43:00.0", 64 * GIB),
        (1, "rocm", "AMD Instinct MI210", "0000:83:00.0", 64 * GIB),
    ]
    assert found.devices[0].uuid == "GPU-5127f1de5e2eb1f3"
    assert found.drivers == (("amdgpu", "6.8.5"),)


def test_who_uses_an_amd_gpu_is_told_with_name_and_size(look: Look) -> None:
    first, second = look("mi210_pair").readings

    assert (first.used_bytes, first.free_bytes, first.utilisation) == (12 * GIB, 52 * GIB, 37)
    assert [(p.pid, p.name, p.memory_bytes) for p in first.processes or ()] == [(4711, "ollama", 11 * GIB)]
    assert second.processes == ()


def test_the_gpu_of_a_processor_shares_the_machines_memory(look: Look) -> None:
    apu, card = look("radeon_and_apu").devices

    assert (apu.unified, apu.memory_bytes, apu.name) == (True, 131072000 * 1024, "AMD GPU gfx1036")
    assert (card.unified, card.memory_bytes, card.name) == (False, 24 * GIB, "Radeon RX 7900 XTX")


def test_an_amd_gpu_that_no_tool_names_is_named_by_its_architecture(look: Look) -> None:
    assert [d.name for d in look("mi300x_without_tools").devices] == ["AMD GPU gfx942"]


def test_an_apple_machine_has_one_gpu_with_the_machines_memory(look: Look) -> None:
    [device] = look("mac_m2_max").devices

    assert (device.kind, device.name) == ("mps", "Apple M2 Max GPU (Metal)")
    assert (device.unified, device.memory_bytes) == (True, 32 * GIB)


def test_an_apple_machine_that_tells_nothing_of_its_gpu_still_has_it(look: Look) -> None:
    [device] = look("mac_without_profile").devices

    assert device.usable
    assert device.name == "Apple arm64 GPU (Metal)"


def test_an_apple_machine_with_an_intel_processor_has_no_mps(look: Look) -> None:
    assert look("mac_intel") == Report()


def test_a_jetson_is_kept_by_its_device_tree(look: Look) -> None:
    [device] = look("jetson_orin").devices

    assert (device.kind, device.name) == ("cuda", "NVIDIA Jetson AGX Orin Developer Kit")
    assert (device.unified, device.memory_bytes) == (True, 64349900 * 1024)


def test_a_gpu_whose_memory_is_not_supported_is_kept_with_the_machines(
    look: Look, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.show(Gpu(0, "NVIDIA GB10"))
    driver.fail("nvmlDeviceGetMemoryInfo", NOT_SUPPORTED).fail("nvmlDeviceGetMemoryInfo_v2", NOT_SUPPORTED)
    use(monkeypatch, driver)

    found = look("gb10")

    [device] = found.devices
    assert (device.name, device.unified, device.memory_bytes) == ("NVIDIA GB10", True, 125513728 * 1024)
    assert found.readings[0].free_bytes == 110000000 * 1024


def test_cards_behind_a_mismatched_library_are_listed_with_the_remedy(
    look: Look, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, driver.fail("nvmlInitWithFlags", LIB_RM_VERSION_MISMATCH))

    devices = look("nvidia_listed").devices

    assert [(d.index, d.name, d.uuid, d.reason) for d in devices] == [
        (0, "Tesla T4", Gpu(0).uuid, MISMATCH),
        (1, "NVIDIA A100-SXM4-40GB", Gpu(1).uuid, MISMATCH),
    ]


def test_cards_of_a_driver_that_hangs_are_listed(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, driver.hang("nvmlInitWithFlags"))

    found, answers = detect(1.0, write_out("nvidia_listed", tmp_path))

    assert not answers
    assert [d.reason for d in found.devices] == [NOT_ANSWERING, NOT_ANSWERING]


def test_a_card_without_a_driver_is_listed_as_unusable(look: Look) -> None:
    [device] = look("nvidia_without_driver").devices

    assert (device.pci, device.usable) == ("0000:01:00.0", False)
    assert device.reason == "driver not installed: libnvidia-ml.so.1 is missing"


def test_a_missing_second_version_of_the_memory_call_costs_nothing(
    look: Look, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.show(Gpu(0, used_bytes=GIB, reserved_bytes=256 * MIB)).fail("nvmlDeviceGetMemoryInfo_v2", 13)
    use(monkeypatch, driver)

    [reading] = look("gb10").readings
    assert (reading.used_bytes, reading.free_bytes) == (GIB + 256 * MIB, 14 * GIB - 256 * MIB)


@pytest.mark.parametrize(
    "function",
    [
        "nvmlDeviceGetName",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
        "nvmlSystemGetDriverVersion",
        "nvmlEventSetCreate",
    ],
)
@pytest.mark.parametrize("code", [1, 3, 6, 13, 25, 999])
def test_a_fact_that_the_driver_does_not_tell_drops_no_device(
    look: Look, driver: Driver, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    use(monkeypatch, driver.show(Gpu(0), Gpu(1)).fail(function, code))

    assert [(d.uuid, d.usable) for d in look("gb10").devices] == [(Gpu(0).uuid, True), (Gpu(1).uuid, True)]


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetUUID"])
@pytest.mark.parametrize("code", [4, 15, 16, 18, 999])
def test_a_card_without_an_identity_is_unusable_and_its_neighbours_are_not(
    look: Look, driver: Driver, monkeypatch: pytest.MonkeyPatch, function: str, code: int
) -> None:
    use(monkeypatch, driver.show(Gpu(0), Gpu(1), Gpu(2)).fail(f"{function}:1", code))

    assert [d.usable for d in look("gb10").devices] == [True, False, True]


def test_a_card_that_is_cut_into_slices_is_its_slices(
    look: Look, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.worker.nvml.scenario import Slice

    parts = (Slice("A100 MIG 1g.5gb", "MIG-a"), Slice("A100 MIG 2g.10gb", "MIG-b", 10 * GIB))
    use(monkeypatch, driver.show(Gpu(0), Gpu(1, "A100", 40 * GIB, mig=parts), Gpu(2, "A100", mig=())))

    found = look("gb10").devices
    assert [(d.index, d.uuid, d.mig, d.memory_bytes // GIB) for d in found if d.usable] == [
        (0, Gpu(0).uuid, False, 15),
        (1, "MIG-a", True, 5),
        (1, "MIG-b", True, 10),
    ]
    assert [d.reason for d in found if not d.usable] == [
        "MIG is on and no slice is made; nvidia-smi mig -cgi"
    ]


def test_what_the_driver_prints_is_not_taken_for_an_answer(
    look: Look, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, driver.show(Gpu(0)).noise("nvmlDeviceGetName").noise("nvmlInitWithFlags"))

    assert [d.usable for d in look("gb10").devices] == [True]


def test_a_vendors_files_that_hold_what_nobody_expected_hide_no_other_vendors_devices(
    driver: Driver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, driver.show(Gpu(0)))
    root = write_out("radeon_and_apu", tmp_path)
    (root / "proc" / "meminfo").write_text("MemTotal:\n")

    found, _ = detect(LIMIT_S, root)

    assert [d.kind for d in found.devices] == ["cuda"]
    assert found.faults[0].startswith("AMD devices could not be looked at: ")


def use(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    """The probe's children of this test find this driver."""
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
