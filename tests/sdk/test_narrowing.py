"""How conditions narrow the workers: each in its turn, in the order of the reasons, and all of them at the end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulayer.narrowing import condition_texts, narrowing, narrowing_line
from gpulayer_broker.capabilities import Capabilities, DeviceGroup
from gpulayer_broker.matching import reasons
from gpulayer_broker.requirements import Requirements, build_requirements
from gpulayer_broker.units import GIB

T4 = DeviceGroup("cuda", "Tesla T4", 15 * GIB, 1)
A100 = DeviceGroup("cuda", "NVIDIA A100-SXM4-40GB", 40 * GIB, 8)
LAPTOP = Capabilities("linux", "x86_64", 8, 16 * GIB, 100 * GIB, "3.11.7", frameworks=(("numpy", "2.4.6"),))
SMALL = replace(LAPTOP, groups=(T4,), frameworks=(("jax", "0.4.20"),))
LARGE = replace(
    LAPTOP,
    groups=(A100,),
    cpus=64,
    memory_bytes=512 * GIB,
    frameworks=(("jax", "0.6.0"), ("numpy", "1.26.4")),
    labels=(("zone", "eu"),),
    launchers=("direct", "torchrun"),
    features=("warm",),
)
EVERYTHING = Requirements(
    accelerator="cuda",
    gpus=2,
    gpu_memory_bytes=20 * GIB,
    gpu_models=("a100",),
    frameworks=(("jax", ">=0.5"), ("numpy", "")),
    cpus=16,
    memory_bytes=100 * GIB,
    disk_bytes=50 * GIB,
    python=">=3.10",
    labels=(("zone", "eu"),),
    launcher="torchrun",
    features=("warm",),
)


def test_each_condition_is_told_with_how_many_workers_it_leaves() -> None:
    needs = build_requirements(
        accelerator="cuda", frameworks={"jax": ">=0.4.30"}, cpus=4, labels={"zone": "eu"}
    )

    told = narrowing(needs, [LAPTOP, SMALL, LARGE])

    assert [(each.text, each.leaves) for each in told] == [
        ("accelerator cuda", 2),
        ("1 GPU", 2),
        ("jax >=0.4.30", 1),
        ("4 cpus", 1),
        ("label zone=eu", 1),
    ]
    assert narrowing_line(told, 3).startswith("of 3 workers: accelerator cuda leaves 2, 1 GPU leaves 2, jax")


def test_a_condition_counts_with_all_before_it() -> None:
    needs = build_requirements(frameworks={"jax": ">=0.5", "numpy": ">=1"})

    told = narrowing(needs, [LAPTOP, SMALL, LARGE])

    assert [each.leaves for each in told] == [3, 1, 1, 1]


def test_no_condition_is_left_out() -> None:
    assert condition_texts(EVERYTHING) == [
        "accelerator cuda",
        "2 GPUs",
        "20.0 GB GPU memory",
        "gpu model a100",
        "jax >=0.5",
        "numpy",
        "python >=3.10",
        "16 cpus",
        "100.0 GB memory",
        "label zone=eu",
        "launcher torchrun",
        "50.0 GB disk",
        "feature warm",
    ]


@pytest.mark.parametrize("worker", [LAPTOP, SMALL, LARGE])
@pytest.mark.parametrize("needs", [EVERYTHING, replace(EVERYTHING, queue="other"), Requirements()])
def test_what_the_last_condition_leaves_is_what_can_run_it(needs: Requirements, worker: Capabilities) -> None:
    told = narrowing(needs, [worker])

    assert told[-1].leaves == (0 if reasons(needs, worker) else 1)
    assert [each.leaves for each in told] == sorted((each.leaves for each in told), reverse=True)
