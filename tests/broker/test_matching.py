"""Matching: who can ever run a job, and every reason why not in its documented words and order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker.capabilities import Capabilities, DeviceGroup
from gpulayer_broker.matching import (
    Reason,
    eligible_groups,
    explain,
    model_matches,
    reasons,
    summary,
    verdict,
)
from gpulayer_broker.requirements import Requirements, build_requirements
from gpulayer_broker.units import GIB, MIB
from tests.broker.test_capabilities import machine

T4 = DeviceGroup("cuda", "Tesla T4", 15 * GIB)
A100 = DeviceGroup("cuda", "NVIDIA A100-SXM4-40GB", 40 * GIB, 2)
MI300 = DeviceGroup("rocm", "AMD Instinct MI300X", 192 * GIB, 4)
M1 = DeviceGroup("mps", "Apple arm64 GPU (Metal)", 32 * GIB, unified=True)


def texts(asked: dict[str, Any], **facts: Any) -> list[str]:
    found = reasons(build_requirements(**asked), machine(**facts))
    assert all(reason.fits == "never" for reason in found)
    return [reason.text for reason in found]


def groups(asked: dict[str, Any], **facts: Any) -> tuple[int, ...] | None:
    return eligible_groups(build_requirements(**asked), machine(**facts))


@pytest.mark.parametrize(
    ("asked", "facts", "text"),
    [
        (
            {"accelerator": "cuda"},
            {"groups": (M1,)},
            "accelerator 'cuda' not available (has cpu, mps)",
        ),
        ({"accelerator": "cuda"}, {}, "accelerator 'cuda' not available (has cpu)"),
        ({"accelerator": "cuda", "gpus": 2}, {"groups": (T4,)}, "needs 2 GPUs, has 1"),
        ({"gpus": 1}, {}, "needs 1 GPU, has 0"),
        (
            {"gpus": 1, "gpu_memory": "24GiB"},
            {"groups": (T4,)},
            "needs 24.0 GB GPU memory, largest is 15.0 GB",
        ),
        (
            {"gpus": 1, "gpu_memory": "24GiB"},
            {"groups": (DeviceGroup("cuda", "RTX 4090", 24564 * MIB),)},
            "needs 24.00 GB GPU memory, largest is 23.99 GB",
        ),
        (
            {"gpus": 1, "gpu_model": "A100"},
            {"groups": (T4,)},
            "gpu model 'A100' not present (has Tesla T4)",
        ),
        (
            {"gpus": 1, "gpu_model": "A100,H100"},
            {"groups": (T4, MI300)},
            "gpu model 'A100' or 'H100' not present (has AMD Instinct MI300X, Tesla T4)",
        ),
        ({"frameworks": ["jax"]}, {}, "framework 'jax' not installed"),
        (
            {"frameworks": ["mlx>=0.10"]},
            {"frameworks": (("mlx", "0.9.0"),)},
            "mlx 0.9.0 does not satisfy >=0.10",
        ),
        (
            {"frameworks": ["cupy>=14"]},
            {"frameworks": (("cupy-cuda11x", "12.0"), ("cupy-cuda12x", "13.0"))},
            "cupy-cuda11x 12.0 and cupy-cuda12x 13.0 do not satisfy >=14",
        ),
        ({"python": ">=3.11"}, {"python": "3.10.1"}, "python 3.10.1 does not satisfy >=3.11"),
        ({"cpus": 8}, {}, "needs 8 cpus, has 2"),
        ({"memory": "64GiB"}, {"memory_bytes": int(23.5 * GIB)}, "needs 64.0 GB memory, has 23.5 GB"),
        ({"labels": ["zone=eu"]}, {"labels": (("zone", "us"),)}, "label zone=eu not set"),
        ({"launcher": "mpi"}, {}, "launcher 'mpi' not supported"),
        ({"disk": "512GiB"}, {}, "needs 512.0 GB disk, has 100.0 GB"),
        ({"features": ["fork"]}, {}, "feature 'fork' not supported"),
        ({"queue": "mail"}, {}, "queue 'mail' not served"),
    ],
)
def test_one_thing_amiss_is_one_reason_in_the_documented_words(
    asked: dict[str, Any], facts: dict[str, Any], text: str
) -> None:
    assert texts(asked, **facts) == [text]
    assert groups(asked, **facts) is None


def test_several_reasons_are_all_told_in_the_documented_order() -> None:
    asked = {
        "accelerator": "cuda",
        "gpus": 2,
        "gpu_memory": "24GiB",
        "gpu_model": "A100",
        "frameworks": ["jax", "mlx>=0.10"],
        "python": ">=3.12",
        "cpus": 8,
        "memory": "64GiB",
        "labels": ["zone=eu"],
        "launcher": "mpi",
        "disk": "512GiB",
        "queue": "mail",
    }

    found = texts(asked, groups=(T4,), frameworks=(("mlx", "0.9.0"),))

    assert found == [
        "needs 2 GPUs, has 1",
        "needs 24.0 GB GPU memory, largest is 15.0 GB",
        "gpu model 'A100' not present (has Tesla T4)",
        "framework 'jax' not installed",
        "mlx 0.9.0 does not satisfy >=0.10",
        "python 3.11.7 does not satisfy >=3.12",
        "needs 8 cpus, has 2",
        "needs 64.0 GB memory, has 23.0 GB",
        "label zone=eu not set",
        "launcher 'mpi' not supported",
        "needs 512.0 GB disk, has 100.0 GB",
        "queue 'mail' not served",
    ]


def test_conditions_that_no_gpu_meets_together_are_told_together() -> None:
    asked = {"gpus": 1, "gpu_memory": "30GiB", "gpu_model": "T4"}

    assert texts(asked, groups=(T4, A100)) == ["needs 1 GPU of model 'T4' with 30.0 GB, has 0"]


def test_too_few_gpus_that_are_large_enough_are_counted() -> None:
    asked = {"accelerator": "cuda", "gpus": 3, "gpu_memory": "30GiB"}

    assert texts(asked, groups=(T4, A100)) == ["needs 3 GPUs with 30.0 GB, has 2"]


def test_a_cpu_job_uses_no_group() -> None:
    assert groups({}, groups=(T4,)) == ()


def test_only_groups_of_the_kind_memory_and_model_asked_are_used() -> None:
    here = {"groups": (T4, A100, MI300)}  # numbered by kind and name: A100, T4, MI300

    assert groups({"accelerator": "cuda"}, **here) == (0, 1)
    assert groups({"accelerator": "cuda", "gpu_memory": "20GB"}, **here) == (0,)
    assert groups({"accelerator": "cuda", "gpu_model": "T4"}, **here) == (1,)
    assert groups({"accelerator": "rocm", "gpus": 4}, **here) == (2,)
    assert groups({"gpus": 1}, **here) == (0, 1, 2)


def test_the_gpus_of_one_job_are_of_one_kind() -> None:
    assert groups({"gpus": 2}, groups=(T4, A100, MI300)) == (2,)
    assert texts({"gpus": 5}, groups=(T4, A100, MI300)) == ["needs 5 GPUs, has 4"]


def test_any_uses_what_gpus_there_are_and_the_cpu_where_there_is_none() -> None:
    assert groups({"accelerator": "any"}, groups=(T4, M1)) == (0, 1)
    assert groups({"accelerator": "any"}) == ()
    assert groups({"accelerator": "any", "gpu_memory": "24GB"}, groups=(T4,)) == ()


def test_one_of_several_distributions_of_a_module_is_enough() -> None:
    both = (("onnxruntime", "1.17"), ("onnxruntime-gpu", "1.20"))

    assert texts({"frameworks": ["onnxruntime>=1.18"]}, frameworks=both) == []


def test_a_version_that_cannot_be_read_is_a_reason_and_no_crash() -> None:
    assert texts({"frameworks": ["torch>=2"]}, frameworks=(("torch", "built-by-hand"),)) == [
        "torch built-by-hand does not satisfy >=2"
    ]


@pytest.mark.parametrize(
    ("asked", "model"),
    [
        ("A100", "NVIDIA A100-SXM4-40GB"),
        ("a100", "NVIDIA A100-SXM4-40GB"),
        ("A100 80GB", "NVIDIA A100-SXM4-80GB"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("T4", "Tesla T4"),
        ("MI300X", "AMD Instinct MI300X"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_model_is_found_in_the_gpus_full_name(asked: str, model: str) -> None:
    assert model_matches(asked, model)


@pytest.mark.parametrize(
    ("asked", "model"),
    [
        ("A10", "NVIDIA A100-SXM4-40GB"),
        ("L4", "NVIDIA L40S"),
        ("A100 80GB", "NVIDIA A100-SXM4-40GB"),
        ("4090", "NVIDIA GeForce RTX 4080"),
        ("-", "Tesla T4"),
    ],
)
def test_a_model_is_not_found_in_a_part_of_a_word(asked: str, model: str) -> None:
    assert not model_matches(asked, model)


def requested(asked: dict[str, Any]) -> Requirements:
    return build_requirements(**asked)


requests = st.fixed_dictionaries(
    {},
    optional={
        "accelerator": st.sampled_from(["cuda", "rocm", "mps", "any"]),
        "gpus": st.integers(min_value=1, max_value=6),
        "cpus": st.integers(min_value=1, max_value=4),
        "frameworks": st.sampled_from([["torch"], ["torch>=2.4"], ["jax"]]),
    },
).map(requested)
machines = st.builds(
    machine,
    groups=st.lists(st.sampled_from([T4, A100, MI300, M1]), max_size=3).map(tuple),
    frameworks=st.sampled_from([(), (("torch", "2.3"),), (("torch", "2.5"), ("jax", "0.5"))]),
)


@given(requests, machines)
def test_groups_are_given_exactly_when_nothing_stands_against_it(
    req: Requirements, caps: Capabilities
) -> None:
    assert (eligible_groups(req, caps) is None) == bool(reasons(req, caps))


@given(requests, machines)
def test_groups_that_are_given_hold_enough_gpus_of_one_kind(req: Requirements, caps: Capabilities) -> None:
    given_groups = eligible_groups(req, caps)

    if given_groups is not None and req.wants_gpu:
        chosen = [caps.groups[number] for number in given_groups]
        kinds = {group.kind for group in chosen}
        assert all(sum(g.count for g in chosen if g.kind == kind) >= req.gpus for kind in kinds)
        assert len(kinds) == 1 or req.gpus == 1


# All workers

NO_JAX = [Reason("never", "framework 'jax' not installed")]
NO_CUDA = [Reason("never", "accelerator 'cuda' not available (has cpu)")]
OFFLINE = [Reason("busy", "offline for 40 s")]
DRAINING = [Reason("busy", "draining")]
BUSY = [Reason("busy", "needs 1 free GPU, 0 free")]


@pytest.mark.parametrize(
    ("workers", "line"),
    [
        (
            [NO_JAX, NO_CUDA, NO_JAX],
            "no known worker can ever run this (3 workers: 2 \N{MULTIPLICATION SIGN} framework 'jax' not installed, "
            "1 \N{MULTIPLICATION SIGN} accelerator 'cuda' not available (has cpu))",
        ),
        (
            [NO_CUDA + NO_JAX],
            "no known worker can ever run this (1 worker: 1 \N{MULTIPLICATION SIGN} accelerator 'cuda' not available "
            "(has cpu) and framework 'jax' not installed)",
        ),
        ([BUSY, NO_JAX, BUSY], "all 2 workers that fit are busy"),
        ([BUSY, NO_JAX], "the only worker that fits is busy"),
        ([OFFLINE, NO_JAX + OFFLINE], "the only worker that fits is offline"),
        ([BUSY + OFFLINE], "the only worker that fits is offline"),
        ([DRAINING, DRAINING], "all 2 workers that fit are draining"),
        ([OFFLINE, BUSY, NO_JAX], "all 2 workers that fit are busy or offline"),
        ([[], BUSY, NO_JAX], "1 of 3 workers can run this now"),
        ([[Reason("yes", "fits")]], "1 of 1 worker can run this now"),
        ([], "no worker is known yet"),
    ],
)
def test_the_summary_tells_never_from_busy(workers: list[list[Reason]], line: str) -> None:
    assert summary(workers) == line


def test_a_worker_that_could_never_run_it_is_never_called_busy() -> None:
    assert verdict(NO_JAX + BUSY) == "never"
    assert verdict(BUSY) == "busy"
    assert verdict([]) == "yes"


def test_a_job_that_nothing_stands_against_fits() -> None:
    assert explain(build_requirements(), machine()) == [Reason("yes", "fits")]


MIG = DeviceGroup("cuda", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5 * GIB, 7)


def test_a_job_gets_one_slice_and_never_two() -> None:
    assert groups({"gpus": 1}, groups=(MIG,)) == (0,)
    assert texts({"gpus": 2}, groups=(MIG,)) == [
        "needs 2 GPUs, has only MIG slices, of which a process can use one"
    ]
    assert groups({"gpus": 2}, groups=(A100, MIG)) == (0,)


def test_where_jobs_share_gpus_each_must_say_how_much_memory_it_needs() -> None:
    shared: dict[str, Any] = {"groups": (T4,), "features": ("gpu-share",)}

    assert groups({"gpus": 1, "gpu_memory": "4GiB"}, **shared) == (0,)
    assert texts({"gpus": 1}, **shared) == ["gpu_memory not given, and jobs share the GPUs"]
    assert groups({"accelerator": "any"}, **shared) == ()
