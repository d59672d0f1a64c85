"""Profiles: the built-in table is complete and means what its names say; a site's own go first."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer_broker.errors import BadSetting, UnknownName
from gpulayer_broker.profiles import BUILT_IN, Profile, all_profiles, find_profile
from gpulayer_broker.requirements import ACCELERATORS, build_requirements
from gpulayer_broker.settings import load_settings


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


# --- a site's own, in its files ---


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's file, in whose folder this process is."""
    (tmp_path / ".gpulayer").mkdir(mode=0o700)
    monkeypatch.chdir(tmp_path)
    return tmp_path / ".gpulayer" / "config.toml"


def test_a_profile_of_a_file_is_a_profile_like_others(config: Path) -> None:
    config.write_text(
        'lease_s = "30s"\n[profiles.our-lab]\naccelerator = "cuda"\n'
        'frameworks = { torch = ">=2.6", "torch.cuda" = "" }\n'
    )

    needs = build_requirements(profile="our-lab", gpus=2)

    assert (needs.accelerator, needs.gpus) == ("cuda", 2)
    assert needs.frameworks == (("torch", ">=2.6"), ("torch.cuda", ""))
    assert {"our-lab", "mlx"} <= all_profiles().keys()
    assert load_settings().lease_s == 30


def test_a_projects_profile_wins_over_the_users(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "home" / "gpulayer" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[profiles.a]\naccelerator = "rocm"\n[profiles.b]\naccelerator = "mps"\n')
    config.write_text('[profiles.a]\naccelerator = "cuda"\n')
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))

    assert [find_profile(name).accelerator for name in "ab"] == ["cuda", "mps"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("profiles = 3", "profiles is not a table: write [profiles.NAME]"),
        ("profiles.lab = 3", "profiles.lab is not a table: give it an accelerator and frameworks"),
        ('profiles.lab.acelerator = "cuda"', "unknown key 'acelerator': did you mean 'accelerator'?"),
        ('profiles.lab.accelerator = "gpus"', "accelerator is none of cpu, cuda, rocm, mps, gpu, any"),
        ("profiles.lab.frameworks = ['torch']", 'frameworks is no table such as {torch = ">=2.4"}'),
        ("profiles.lab.frameworks.torch = 2", 'frameworks is no table such as {torch = ">=2.4"}'),
    ],
)
def test_a_profile_without_sense_is_told_with_its_file(config: Path, text: str, problem: str) -> None:
    config.write_text(text + "\n")

    with pytest.raises(BadSetting) as caught:
        find_profile("lab")

    assert str(caught.value).startswith(f"{config}: ")
    assert str(caught.value).endswith(problem)
