"""Requirements: what is not said is filled in by rule, equal requests share a signature, nonsense is named."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker.errors import BadRequirement, FormatTooNew, UnknownName
from gpulayer_broker.profiles import Profile
from gpulayer_broker.requirements import Requirements, build_requirements, decode
from gpulayer_broker.units import GIB, MIB

asked = st.fixed_dictionaries(
    {},
    optional={
        "accelerator": st.sampled_from(["cuda", "rocm", "mps", "any"]),
        "gpus": st.integers(min_value=1, max_value=16),
        "gpu_model": st.sampled_from(["A100,H100", "H100, A100", ["T4"]]),
        "frameworks": st.dictionaries(
            st.sampled_from(["torch", "jax", "Flash_Attn", "cupy"]), st.sampled_from(["", ">=1, <2", "==2.*"])
        ),
        "cpus": st.integers(min_value=1, max_value=512),
        "memory": st.integers(min_value=0, max_value=2**42),
        "disk": st.integers(min_value=0, max_value=2**45),
        "python": st.sampled_from(["", ">=3.11", "<3.14,>=3.9"]),
        "labels": st.dictionaries(
            st.sampled_from(["zone", "rack"]), st.text(max_size=5).filter(str.isprintable)
        ),
        "launcher": st.sampled_from(["direct", "mpi"]),
        "queue": st.sampled_from(["gpulayer", "mail"]),
    },
).filter(lambda given: "gpu_model" not in given or given.keys() & {"accelerator", "gpus"})


# What is filled in


def test_nothing_asked_means_one_cpu_and_no_gpu() -> None:
    assert build_requirements() == Requirements(accelerator="cpu", gpus=0, cpus=1)


@pytest.mark.parametrize("accelerator", ["cuda", "rocm", "mps"])
def test_an_accelerator_alone_means_one_gpu(accelerator: str) -> None:
    req = build_requirements(accelerator=accelerator)

    assert (req.accelerator, req.gpus) == (accelerator, 1)
    assert req.signature.startswith("g1.")


def test_any_takes_a_gpu_or_none() -> None:
    req = build_requirements(accelerator="any")

    assert (req.accelerator, req.gpus, req.wants_gpu) == ("any", 1, False)
    assert req.signature.startswith("a1.")


@pytest.mark.parametrize("asked", [{"gpus": 2}, {"gpus": 2, "accelerator": "any"}])
def test_a_number_of_gpus_alone_means_gpus_of_any_kind_and_no_way_back_to_the_cpu(
    asked: dict[str, Any],
) -> None:
    req = build_requirements(**asked)

    assert (req.accelerator, req.gpus, req.wants_gpu) == ("gpu", 2, True)
    assert req.signature.startswith("g2.")


@pytest.mark.parametrize("asked", [{"gpus": 0}, {"accelerator": "any", "gpus": 0}, {"accelerator": "cpu"}])
def test_no_gpus_means_the_cpu(asked: dict[str, Any]) -> None:
    assert build_requirements(**asked) == Requirements()


def test_a_profile_fills_in_accelerator_and_frameworks() -> None:
    req = build_requirements(profile="pytorch-cuda")

    assert (req.accelerator, req.gpus) == ("cuda", 1)
    assert req.frameworks == (("torch", ""), ("torch.cuda", ""))


def test_explicit_values_win_over_a_profile_and_frameworks_merge_by_name() -> None:
    req = build_requirements(profile="pytorch-cuda", frameworks={"torch": ">=2.4", "jax": None}, gpus=4)

    assert req.gpus == 4
    assert req.frameworks == (("jax", ""), ("torch", ">=2.4"), ("torch.cuda", ""))


def test_another_accelerator_than_the_profiles_drops_what_hangs_on_it() -> None:
    req = build_requirements(profile="pytorch-cuda", accelerator="cpu")

    assert (req.accelerator, req.gpus, req.frameworks) == ("cpu", 0, (("torch", ""),))


def test_a_site_profile_is_found_by_name() -> None:
    site = {"ours": Profile("rocm", (("torch", ">=2.6"),))}

    req = build_requirements(profile="ours", site_profiles=site)

    assert (req.accelerator, req.frameworks) == ("rocm", (("torch", ">=2.6"),))


def test_a_site_profile_with_a_bad_range_is_named() -> None:
    with pytest.raises(BadRequirement, match="profile 'ours': '2' is not a version range"):
        build_requirements(profile="ours", site_profiles={"ours": Profile("cpu", (("torch", "2"),))})


def test_a_framework_named_twice_must_satisfy_both_ranges() -> None:
    assert build_requirements(frameworks=["torch>=2", "torch<3"]).frameworks == (("torch", ">=2,<3"),)


def test_gpu_memory_is_kept_to_the_mib_so_that_24gb_fits_a_24_gb_card() -> None:
    req = build_requirements(gpus=1, gpu_memory="24GB")

    assert req.gpu_memory_bytes == 22889 * MIB
    assert req.gpu_memory_bytes <= 24564 * MIB


def test_the_default_of_cpus_can_be_set_by_the_caller_and_is_overruled() -> None:
    assert build_requirements(default_cpus=0).cpus == 0
    assert build_requirements(default_cpus=0, cpus=3).cpus == 3


# Canonical form


@given(asked)
def test_requirements_survive_their_canonical_bytes(given: dict[str, Any]) -> None:
    req = build_requirements(**given)

    assert decode(req.canonical()) == req
    assert decode(req.canonical()).signature == req.signature


@given(asked)
def test_the_order_in_which_things_are_said_means_nothing(given: dict[str, Any]) -> None:
    turned: dict[str, Any] = {
        name: dict(reversed(value.items())) if isinstance(value, dict) else value
        for name, value in given.items()
    }

    assert build_requirements(**turned).canonical() == build_requirements(**given).canonical()


@given(st.integers(min_value=1, max_value=2**45))
def test_amounts_are_rounded_up_by_a_thirty_second_at_most(size_bytes: int) -> None:
    rounded = build_requirements(memory=size_bytes).memory_bytes

    assert size_bytes <= rounded < size_bytes + max(64 * MIB, size_bytes // 32) + MIB
    assert build_requirements(memory=rounded).memory_bytes == rounded


def test_nearly_equal_requests_share_a_signature() -> None:
    one = build_requirements(memory="63.9GB", frameworks=["torch >=2, <3"], labels=["b=1", "a=2"])
    other = build_requirements(memory="64GB", frameworks={"Torch": "<3,>=2.0"}, labels={"a": "2", "b": "1"})

    assert one.signature == other.signature


def test_a_signature_tells_the_amounts_and_the_hash() -> None:
    req = build_requirements(
        accelerator="cuda", gpus=2, gpu_memory="16GiB", cpus=4, memory="8GiB", disk="10GiB"
    )

    amounts, digest = req.signature.rsplit(".", 1)
    assert amounts == "g2.16384.4.8192.10240"
    assert len(digest) == 20
    assert set(digest) <= set("0123456789abcdef")


@pytest.mark.parametrize(
    "change",
    [
        {"accelerator": "rocm"},
        {"gpu_model": "A100"},
        {"frameworks": ["jax"]},
        {"python": ">=3.11"},
        {"labels": ["zone=eu"]},
        {"launcher": "mpi"},
        {"features": ["fork"]},
        {"queue": "mail"},
    ],
)
def test_what_the_amounts_do_not_tell_changes_the_hash(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"accelerator": "cuda"}

    assert build_requirements(**{**base, **change}).signature != build_requirements(**base).signature


def test_canonical_bytes_are_the_same_for_ever() -> None:
    req = build_requirements(profile="pytorch-cuda", memory="1GiB", labels=["zone=eu"])

    assert req.canonical() == (
        b'{"accelerator":"cuda","cpus":0,"frameworks":[["torch",""],["torch.cuda",""]],"gpus":1,'
        b'"labels":[["zone","eu"]],"memory_bytes":1073741824,"v":1}'
    )
    assert req.memory_bytes == GIB


@pytest.mark.parametrize("record", [{"v": 2}, {"v": 1, "colour": "red"}, {}])
def test_requirements_that_only_a_newer_version_can_judge_are_refused(record: dict[str, object]) -> None:
    with pytest.raises(FormatTooNew, match="update gpulayer"):
        decode(orjson.dumps(record))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"v":1,"gpus":"2"}',
        b'{"v":1,"gpus":true}',
        b'{"v":1,"gpus":-1}',
        b'{"v":1,"accelerator":"tpu"}',
        b'{"v":1,"frameworks":[1]}',
        b'{"v":1,"frameworks":[["torch"]]}',
        b'{"v":1,"frameworks":[["torch","rubbish"]]}',
        b'{"v":1,"gpu_models":"A100"}',
        b'{"v":1,"python":"rubbish"}',
    ],
)
def test_requirements_that_are_not_well_formed_are_refused(data: bytes) -> None:
    with pytest.raises(BadRequirement):
        decode(data)


# What cannot be meant


@pytest.mark.parametrize(
    ("asked", "argument", "flag"),
    [
        ({"gpus": -1}, "gpus=-1: gpus must be 0 or more", "--gpus -1: gpus must be 0 or more"),
        (
            {"gpus": 2, "accelerator": "cpu"},
            "gpus=2: a CPU job takes no GPU",
            "--gpus 2: a CPU job takes no GPU",
        ),
        (
            {"gpus": 0, "accelerator": "cuda"},
            "gpus=0: accelerator 'cuda' needs at least 1",
            "--gpus 0: accelerator",
        ),
        (
            {"gpus": 0, "profile": "jax-cuda"},
            "gpus=0: accelerator 'cuda' needs",
            "--gpus 0: accelerator 'cuda'",
        ),
        ({"gpus": True}, "gpus=True: gpus must be a whole number", "--gpus True:"),
        ({"gpus": 1.5}, "gpus=1.5: gpus must be a whole number", "--gpus 1.5:"),
        ({"cpus": 0}, "cpus=0: cpus must be 1 or more", "--cpus 0: cpus must be 1 or more"),
        ({"cpus": 10**9}, "cpus=1000000000: cpus must be 1000000 or less", "--cpus 1000000000:"),
        (
            {"accelerator": "cudaa"},
            "accelerator='cudaa': not known: did you mean 'cuda'?",
            "--accelerator cudaa:",
        ),
        (
            {"accelerator": "warp"},
            "accelerator='warp': not known: known are cpu, cuda,",
            "--accelerator warp:",
        ),
        (
            {"gpu_memory": "24G", "gpus": 1},
            "gpu_memory='24G': '24G' is not a size",
            "--gpu-memory 24G: '24G'",
        ),
        ({"gpu_memory": "24GB"}, "a CPU job has no GPU: add gpus=1", "a CPU job has no GPU: add --gpus 1"),
        (
            {"gpu_model": "A100"},
            "gpu_model='A100': a CPU job has no GPU",
            "--gpu-model A100: a CPU job has no GPU",
        ),
        (
            {"gpu_model": " , ", "gpus": 1},
            "gpu_model=' , ': names no model",
            "--gpu-model  , : names no model",
        ),
        ({"memory": "lots"}, "memory='lots': 'lots' is not a size", "--memory lots: 'lots' is not a size"),
        ({"disk": -5}, "disk=-5: '-5' is not a size", "--disk -5: '-5' is not a size"),
        ({"python": "3.11"}, "python='3.11': '3.11' is not a version range", "--python 3.11: '3.11'"),
        (
            {"frameworks": ["torch=2"]},
            "frameworks='torch =2': '=2' is not",
            "--framework torch =2: '=2' is not",
        ),
        (
            {"frameworks": {"torch": "2"}},
            "frameworks='torch 2': '2' is not",
            "--framework torch 2: '2' is not",
        ),
        ({"frameworks": 5}, "frameworks=5: write a mapping", "--framework 5: write a mapping"),
        (
            {"labels": ["zone"]},
            "labels='zone': a label is written key=value",
            "--label zone: a label is written",
        ),
        (
            {"labels": ["=eu"]},
            "labels='=eu': a label is written key=value",
            "--label =eu: a label is written",
        ),
        (
            {"labels": ["z=1", "z=2"]},
            "labels='z=2': z is also given as '1'",
            "--label z=2: z is also given as '1'",
        ),
        (
            {"labels": ["z=1\x1b[31m"]},
            "labels='z=1",
            "--label z=1",
        ),
        (
            {"launcher": "torchru"},
            "launcher='torchru': not known: did you mean 'torchrun'?",
            "--launcher torchru:",
        ),
        ({"queue": "a b"}, "queue='a b': a queue's name is", "--queue a b: a queue's name is"),
    ],
)
def test_nonsense_is_named_as_its_user_wrote_it(asked: dict[str, Any], argument: str, flag: str) -> None:
    with pytest.raises(BadRequirement) as in_python:
        build_requirements(**asked)
    with pytest.raises(BadRequirement) as on_the_command_line:
        build_requirements(**asked, wording="flag")

    assert argument in str(in_python.value)
    assert flag in str(on_the_command_line.value)
    assert "\n" not in str(in_python.value)


def test_an_unknown_profile_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match="did you mean 'pytorch-cuda'"):
        build_requirements(profile="pytorch-cud")


def test_a_gpu_job_takes_no_cpu_slot_unless_it_says_so() -> None:
    assert build_requirements(gpus=2).cpus == 0
    assert build_requirements(profile="pytorch-cuda").cpus == 0
    assert build_requirements(gpus=2, cpus=4).cpus == 4


def test_a_job_that_may_run_without_a_gpu_takes_a_cpu_slot() -> None:
    assert build_requirements(accelerator="any").cpus == 1
    assert build_requirements(accelerator="any", gpus=0).cpus == 1
