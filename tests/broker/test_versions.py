"""Version ranges and framework names: nightlies and local builds are judged sensibly, any spelling finds its module."""

from __future__ import annotations

import subprocess
import sys
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker.errors import BadRequirement
from gpulayer_broker.names import canonical_name, framework_name, provides
from gpulayer_broker.versions import canonical_range, parse_framework, satisfies

numbers = st.lists(st.integers(min_value=0, max_value=30), min_size=2, max_size=4).map(
    lambda parts: ".".join(map(str, parts))
)
versions = st.tuples(
    st.sampled_from(["", "1!"]), numbers, st.sampled_from(["", "a1", "rc2", ".post1", ".dev3", "a0.dev1"])
).map("".join)
specifiers = st.one_of(
    st.tuples(st.sampled_from([">=", "<=", ">", "<", "==", "!=", "~="]), versions).map("".join),
    st.tuples(st.sampled_from(["==", "!="]), numbers, st.just(".*")).map("".join),
)
ranges = st.lists(specifiers, min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        ("2.3.0.dev20240101", ">=0"),
        ("2.15.0a0+gitabc", ">=2.14"),
        ("2.15.0a0+gitabc", ">=2.15"),
        ("2.15.0.dev20260101+cu126", ">=2.15.0,<3"),
        ("2.15.0a0", "~=2.15"),
        ("2.15.0a0", "==2.15.*"),
        ("2.15.0rc2", ">=2.15rc1"),
        ("2.4.0+cu121", "==2.4"),
        ("2.4.0+cu121", "==2.4.*"),
        ("2.4.0+cu121", ">=2.4,<=2.4"),
        ("2.4.0+cu121", "===2.4.0"),
        ("2.4.0+cu121", "==2.4.0+cu121"),
        ("2.5.1", "~=2.4"),
        ("2.4.2", "!=2.4.1"),
        ("1!2.0", ">=3"),
        ("3.15.0a1+", ">=3.15"),
        ("whatever", ""),
    ],
)
def test_this_version_satisfies_this_range(installed: str, wanted: str) -> None:
    assert satisfies(installed, wanted)


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        ("0.9.0", ">=0.10"),
        ("2.15.0a0+gitabc", ">2.15"),
        ("2.15.0a0+gitabc", "==2.15"),
        ("2.15.0a0+gitabc", "<2.15"),
        ("2.15.0a0+gitabc", ">=2.15.1"),
        ("2.15.0a0", ">=2.15rc1"),
        ("3.0.0a0", "~=2.15"),
        ("2.4.0+cu121", "==2.4.0+cu118"),
        ("2.4.0", "==2.4.0+cu121"),
        ("2.4.0+cu121", ">2.4.0"),
        ("2.4.0+cu121", "!=2.4"),
        ("2.4.1", "!=2.4.1"),
        ("3.0", "~=2.4"),
        ("3", ">=1!0"),
        ("whatever", ">=0"),
        ("", ">=0"),
    ],
)
def test_this_version_does_not_satisfy_this_range(installed: str, wanted: str) -> None:
    assert not satisfies(installed, wanted)


@given(ranges, st.randoms())
def test_a_range_has_one_spelling_in_any_order_and_spacing(parts: list[str], random: Random) -> None:
    shuffled = sorted(parts + parts[:1], key=lambda _: random.random())

    assert canonical_range(" , ".join(shuffled)) == canonical_range(",".join(parts))


@given(ranges)
def test_a_canonical_range_is_its_own_canonical_form(parts: list[str]) -> None:
    once = canonical_range(",".join(parts))

    assert canonical_range(once) == once


@given(ranges, versions)
def test_the_canonical_range_takes_the_same_versions(parts: list[str], installed: str) -> None:
    written = ",".join(parts)

    assert satisfies(installed, canonical_range(written)) == satisfies(installed, written)


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        (">=1, <2", ">=1,<2"),
        ("<2,>=1", ">=1,<2"),
        (">=2.0,>=2", ">=2"),
        (">=0.10", ">=0.10"),
        ("~=2.4.0", "~=2.4.0"),
        ("==2.4.*", "==2.4.*"),
        ("  ", ""),
    ],
)
def test_a_range_is_spelled_lower_bound_first(written: str, canonical: str) -> None:
    assert canonical_range(written) == canonical


@pytest.mark.parametrize(
    ("written", "advice"),
    [
        ("2.4", "'>=2.4'"),
        ("=2.4", "'==2.4'"),
        (">>2", "PEP 440"),
        ("*", "PEP 440"),
        ("~=2", "PEP 440"),
        (">=" + "9" * 5000, "PEP 440"),
    ],
)
def test_what_is_no_range_is_refused_with_advice(written: str, advice: str) -> None:
    with pytest.raises(BadRequirement) as caught:
        canonical_range(written)

    assert advice in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("written", "parsed"),
    [
        ("onnxruntime>=1.18", ("onnxruntime", ">=1.18")),
        ("numpy", ("numpy", "")),
        (" torch >= 2.4 , < 3 ", ("torch", ">=2.4,<3")),
        ("torch.cuda>=2.4", ("torch.cuda", ">=2.4")),
        ("Flash_Attn==2.*", ("flash-attn", "==2.*")),
        ("cv2", ("opencv-python", "")),
    ],
)
def test_a_framework_is_a_name_and_a_range(written: str, parsed: tuple[str, str]) -> None:
    assert parse_framework(written) == parsed


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("torch[extra]>=2", "extras"),
        ("torch @ https://x/y.whl", "addresses"),
        ("torch; python_version<'3'", "markers"),
        (">=2", "not a framework"),
        ("", "not a framework"),
        ("torch=2.4", "'==2.4'"),
        ("torch 2.4", "'==2.4'"),
    ],
)
def test_what_is_no_framework_is_refused_with_the_reason(written: str, problem: str) -> None:
    with pytest.raises(BadRequirement, match=problem):
        parse_framework(written)


@pytest.mark.parametrize(
    ("distribution", "framework"),
    [
        ("cupy-cuda12x", "cupy"),
        ("cupy-cuda11x", "cupy"),
        ("cupy-rocm-5-0", "cupy"),
        ("onnxruntime-gpu", "onnxruntime"),
        ("ort-nightly-gpu", "onnxruntime"),
        ("opencv-python-headless", "cv2"),
        ("opencv-contrib-python-headless", "opencv-python"),
        ("tensorflow-cpu", "tensorflow"),
        ("tensorflow-macos", "tensorflow"),
        ("scikit-learn", "sklearn"),
        ("pillow", "PIL"),
        ("jax", "jax"),
        ("cupy-cuda12x", "cupy_cuda12x"),
    ],
)
def test_a_distribution_provides_its_module(distribution: str, framework: str) -> None:
    assert provides(distribution, framework_name(framework))


@pytest.mark.parametrize(
    ("distribution", "framework"),
    [
        ("jaxlib", "jax"),
        ("onnxruntime-genai", "onnxruntime"),
        ("onnxruntime", "onnxruntime-gpu"),
        ("cupy-cuda11x", "cupy-cuda12x"),
        ("torch", "torch.cuda"),
        ("tensorflow-hub", "tensorflow"),
    ],
)
def test_a_distribution_does_not_provide_another_module(distribution: str, framework: str) -> None:
    assert not provides(distribution, framework_name(framework))


def test_names_follow_pep_503_and_pseudo_frameworks_keep_their_dot() -> None:
    assert canonical_name("Zope.Interface_x--y") == "zope-interface-x-y"
    assert canonical_name("Torch.CUDA") == "torch.cuda"


def test_packaging_is_not_imported_before_a_range_needs_judging() -> None:
    program = (
        "import sys; from gpulayer_broker import matching, profiles\n"
        "from gpulayer_broker.requirements import build_requirements\n"
        "build_requirements(profile='pytorch-cuda', gpu_memory='24GB').signature\n"
        "assert not [name for name in sys.modules if name.startswith('packaging')], 'imported too early'\n"
        "build_requirements(frameworks=['torch>=2'])\n"
        "assert 'packaging.specifiers' in sys.modules\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
