"""Capabilities: equal machines have one class, whatever order their facts are found in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker.capabilities import Capabilities, DeviceGroup, decode
from gpulayer_broker.errors import BadRequirement, FormatTooNew
from gpulayer_broker.units import GIB

words = st.text("abcxyz-.", min_size=1, max_size=6)
groups = st.builds(
    DeviceGroup,
    st.sampled_from(["cuda", "rocm"]),
    st.sampled_from(["Tesla T4", "NVIDIA A100"]),
    st.sampled_from([15 * GIB, 40 * GIB]),
    st.integers(min_value=1, max_value=8),
    st.booleans(),
)
facts = st.builds(
    Capabilities,
    st.just("linux"),
    st.sampled_from(["x86_64", "aarch64"]),
    st.integers(min_value=1, max_value=256),
    st.integers(min_value=0, max_value=2**42),
    st.integers(min_value=0, max_value=2**45),
    st.sampled_from(["3.11.7", "3.8.1"]),
    groups=st.lists(groups, max_size=3).map(tuple),
    frameworks=st.lists(st.tuples(words, words), max_size=4).map(tuple),
    labels=st.lists(st.tuples(words, words), max_size=3).map(tuple),
    launchers=st.lists(words, max_size=3).map(tuple),
    features=st.lists(words, max_size=3).map(tuple),
    queues=st.lists(words, max_size=3).map(tuple),
)

T4 = DeviceGroup("cuda", "Tesla T4", 15 * GIB)
A100 = DeviceGroup("cuda", "NVIDIA A100-SXM4-40GB", 40 * GIB)


def machine(**facts: Any) -> Capabilities:
    base: dict[str, Any] = {
        "os": "linux",
        "arch": "x86_64",
        "cpus": 2,
        "memory_bytes": 23 * GIB,
        "disk_bytes": 100 * GIB,
        "python": "3.11.7",
    }
    return Capabilities(**{**base, **facts})


@given(facts)
def test_capabilities_survive_their_canonical_bytes(caps: Capabilities) -> None:
    assert decode(caps.canonical()) == caps
    assert decode(caps.canonical()).class_id == caps.class_id


@given(facts)
def test_the_order_in_which_facts_are_found_means_nothing(caps: Capabilities) -> None:
    turned = replace(
        caps,
        groups=caps.groups[::-1],
        frameworks=caps.frameworks[::-1],
        labels=caps.labels[::-1],
        launchers=caps.launchers[::-1],
        queues=caps.queues[::-1],
    )

    assert turned.class_id == caps.class_id


def test_equal_devices_are_one_group_and_find_their_number() -> None:
    caps = machine(groups=(T4, A100, T4))

    assert caps.groups == (A100, replace(T4, count=2))
    assert caps.group_of("cuda", "Tesla T4", 15 * GIB) == 1
    assert caps.kinds == ("cuda",)


def test_a_device_of_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="not in list"):
        machine(groups=(T4,)).group_of("rocm", "Tesla T4", 15 * GIB)


def test_a_class_is_named_by_twenty_hex_digits_and_changes_with_any_fact() -> None:
    base = machine()

    assert len(base.class_id) == 20
    assert len({base.class_id, machine(cpus=3).class_id, machine(groups=(T4,)).class_id}) == 3


def test_frameworks_are_spelled_one_way() -> None:
    assert machine(frameworks=(("Torch.CUDA", "2"), ("Flash_Attn", "1"))).frameworks == (
        ("flash-attn", "1"),
        ("torch.cuda", "2"),
    )


def test_facts_that_this_version_does_not_know_are_left_out() -> None:
    record = orjson.loads(machine().canonical()) | {"colour": "red"}

    assert decode(orjson.dumps(record)) == machine()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"v":1}', b"\xff"])
def test_capabilities_that_are_not_well_formed_are_refused(data: bytes) -> None:
    with pytest.raises(BadRequirement, match="not readable"):
        decode(data)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("cpus", "2"),
        ("cpus", -1),
        ("memory_bytes", True),
        ("python", 3),
        ("frameworks", [1]),
        ("frameworks", [["torch", "2", "3"]]),
        ("labels", {"zone": "eu"}),
        ("queues", "gpulayer"),
        ("groups", [1]),
        ("groups", [{"kind": "cuda"}]),
        ("groups", [{"kind": "cuda", "model": "T4", "memory_bytes": "x"}]),
    ],
)
def test_a_fact_that_is_not_of_its_kind_is_refused(fact: str, value: object) -> None:
    record = orjson.loads(machine().canonical()) | {fact: value}

    with pytest.raises(BadRequirement, match="not readable"):
        decode(orjson.dumps(record))


def test_capabilities_of_another_format_are_refused() -> None:
    with pytest.raises(FormatTooNew, match="update gpulayer"):
        decode(b'{"v":2}')
