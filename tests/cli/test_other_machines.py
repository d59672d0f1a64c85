"""How machines that are not here would be shown and offered: AMD, Apple, Jetson, from their recordings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpulayer.cli.resources import document, facts
from gpulayer_broker.capabilities import DeviceGroup
from gpulayer_broker.matching import eligible_groups
from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.settings import Settings
from gpulayer_broker.units import GIB
from gpulayer_worker import detection
from gpulayer_worker.detection import Detection, detect_machine
from gpulayer_worker.hardware import Hardware, Offered
from tests.worker.recorded import write_out

Look = Callable[[str], Detection]


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    monkeypatch.setattr(detection, "PROBE_LIMIT_S", 60.0)  # a machine under load takes its time
    return lambda name: detect_machine(
        sys.executable, verify=False, recording=write_out(name, tmp_path / name)
    )


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "mac_m2_max",
            [
                "[0] mps Apple M2 Max GPU (Metal) (32.0 GB unified) independent=not-run distributed=unsupported"
            ],
        ),
        (
            "mi210_pair",
            [
                "[0] rocm AMD Instinct MI210 (64.0 GB) GPU-5127f1de5e2eb1f3 independent=not-run distributed=not-run",
                "[1] rocm AMD Instinct MI210 (64.0 GB) GPU-6a1b2c3d4e5f6071 independent=not-run distributed=not-run",
            ],
        ),
        (
            "jetson_orin",
            [
                "[0] cuda NVIDIA Jetson AGX Orin Developer Kit (61.4 GB unified) tegra-1420222012345 "
                "independent=not-run distributed=not-run"
            ],
        ),
        ("mac_intel", []),
    ],
)
def test_a_machine_of_another_kind_is_shown_as_others_are(look: Look, name: str, shown: list[str]) -> None:
    found = look(name)

    assert [text for label, text in facts(found) if label == "device"] == shown
    assert len(document(found)["devices"]) == len(shown)


@pytest.mark.parametrize(
    ("name", "groups", "asked"),
    [
        (
            "mi210_pair",
            (DeviceGroup("rocm", "AMD Instinct MI210", 64 * GIB, 2),),
            {"accelerator": "rocm", "gpus": 2},
        ),
        (
            "mac_m2_max",
            (DeviceGroup("mps", "Apple M2 Max GPU (Metal)", 32 * GIB, unified=True),),
            {"accelerator": "mps", "gpu_memory": "20GB"},
        ),
        ("mac_intel", (), {}),
    ],
)
def test_a_worker_on_such_a_machine_offers_its_devices(
    tmp_path: Path, name: str, groups: tuple[DeviceGroup, ...], asked: dict[str, object]
) -> None:
    settings = Settings(probe_limit_s=60)
    recorded = write_out(name, tmp_path / name)
    hardware = Hardware(settings, Offered(), tmp_path, recording=recorded)
    hardware.start()
    try:
        offered = hardware.capabilities()
    finally:
        hardware.stop()

    assert offered.groups == groups
    assert eligible_groups(build_requirements(**asked), offered) == tuple(range(len(groups)))  # type: ignore[arg-type]
