"""Profiles: names for common combinations of accelerator and frameworks.

The built-in ones are a table; a site adds its own, which may take a built-in name's place, as `[profiles.NAME]` in the
files that settings are read from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpulayer_broker.errors import BadSetting, UnknownName, did_you_mean

GPU_KINDS = ("cuda", "rocm", "mps")
# `gpu` is a GPU of any kind; `any` is a GPU of any kind if one is free, else the CPU.
ACCELERATORS = ("cpu", *GPU_KINDS, "gpu", "any")
KEYS = ("accelerator", "frameworks")


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile's name stands for: an accelerator, and a range for each framework."""

    accelerator: str
    frameworks: tuple[tuple[str, str], ...]


def _of(accelerator: str, *frameworks: str) -> Profile:
    return Profile(accelerator, tuple((name, "") for name in frameworks))


BUILT_IN: Mapping[str, Profile] = {
    "cupy-cuda": _of("cuda", "cupy"),
    "cupy-rocm": _of("rocm", "cupy"),
    "jax-cpu": _of("cpu", "jax"),
    "jax-cuda": _of("cuda", "jax"),
    "jax-rocm": _of("rocm", "jax"),
    "mlx": _of("mps", "mlx"),
    "onnxruntime-cpu": _of("cpu", "onnxruntime"),
    # The plain `onnxruntime` distribution would run on the CPU without a word.
    "onnxruntime-cuda": _of("cuda", "onnxruntime-gpu"),
    "pytorch-cpu": _of("cpu", "torch"),
    "pytorch-cuda": _of("cuda", "torch", "torch.cuda"),
    "pytorch-mps": _of("mps", "torch", "torch.mps"),
    "pytorch-rocm": _of("rocm", "torch", "torch.rocm"),
    "tensorflow-cpu": _of("cpu", "tensorflow"),
    "tensorflow-cuda": _of("cuda", "tensorflow"),
    "tensorflow-rocm": _of("rocm", "tensorflow"),
}


def all_profiles(site: Mapping[str, Profile] | None = None) -> dict[str, Profile]:
    """Every profile by name, the site's own among them: those given, else those of its files."""
    merged = {**BUILT_IN, **(site_profiles() if site is None else site)}
    return dict(sorted(merged.items()))


def find_profile(name: str, site: Mapping[str, Profile] | None = None) -> Profile:
    """The profile of this name; an unknown name is answered with the nearest known one."""
    profiles = all_profiles(site)
    if name not in profiles:
        raise UnknownName.among("profile", name, profiles)
    return profiles[name]


def site_profiles() -> dict[str, Profile]:
    """The profiles of the files that hold in the current folder; BadSetting for one that has no sense."""
    from gpulayer_broker.settings import table

    return {name: _read(entry, place) for name, (entry, place) in table("profiles").items()}


def _read(entry: Any, place: str) -> Profile:
    if not isinstance(entry, dict):
        raise BadSetting(f"{place} is not a table: give it an accelerator and frameworks")
    for key in entry:
        if key not in KEYS:
            raise BadSetting(f"{place}: unknown key '{key}': {did_you_mean(key, KEYS)}", value=key)
    accelerator, frameworks = entry.get("accelerator", "cpu"), entry.get("frameworks", {})
    if accelerator not in ACCELERATORS:
        raise BadSetting(f"{place}: accelerator is none of {', '.join(ACCELERATORS)}", value=accelerator)
    if not isinstance(frameworks, dict) or not all(isinstance(each, str) for each in frameworks.values()):
        raise BadSetting(f'{place}: frameworks is no table such as {{torch = ">=2.4"}}', value=frameworks)
    return Profile(accelerator, tuple(frameworks.items()))
