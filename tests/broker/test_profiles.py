"""Profiles: the built-in table is complete and means what its names say; a site's own go first."""

from __future__ import annotations

import pytest

from gpulayer_broker.errors import UnknownName
from gpulayer_broker.profiles import BUILT_IN, Profile, all_profiles, find_profile
from gpulayer_broker.requirements import ACCELERATORS, build_requirements


@pytest.mark.parametrize(
    "name",
    [
        "pytorch-cuda",
        "pytorch-rocm",
        "pytorch-mps",
        "pytorch-cpu",
        "jax-cuda",
        "jax-cpu",
        "cupy-cuda",
        "onnxruntime-cuda",
        "onnxruntime-cpu",
        "tensorflow-cuda",
        "tensorflow-cpu",
        "mlx",
    ],
)
def test_the_promised_profile_is_built_in(name: str) -> None:
    assert find_profile(name).accelerator in ACCELERATORS


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_profile_means_what_its_name_says(name: str) -> None:
    req = build_requirements(profile=name)

    ending = name.rpartition("-")[2]
    assert req.accelerator == (ending if ending in ACCELERATORS else "mps")
    assert req.frameworks == tuple(sorted(BUILT_IN[name].frameworks))


@pytest.mark.parametrize("kind", ["cuda", "rocm", "mps"])
def test_a_torch_profile_asks_for_a_torch_that_can_use_the_device(kind: str) -> None:
    assert (f"torch.{kind}", "") in find_profile(f"pytorch-{kind}").frameworks


def test_a_site_profile_takes_a_built_in_ones_place() -> None:
    ours = Profile("cuda", (("torch", ">=2.6"),))

    assert find_profile("pytorch-cuda", {"pytorch-cuda": ours}) == ours
    assert next(iter(all_profiles({"a-site": ours}))) == "a-site"


def test_an_unknown_profile_is_answered_with_the_nearest_site_ones_included() -> None:
    with pytest.raises(UnknownName, match="did you mean 'our-lab'"):
        find_profile("our-lap", {"our-lab": Profile("cpu", ())})
