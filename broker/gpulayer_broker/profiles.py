"""Profiles: names for common combinations of accelerator and frameworks.

The built-in ones are a table; a site adds its own, which may take a built-in name's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpulayer_broker.errors import UnknownName


@dataclass(frozen=True, slots=True)
class Profile:
    """What a profile's name stands for: an accelerator, and a range for each framework."""

    accelerator: str
    frameworks: tuple[tuple[str, str], ...]
    description: str = ""


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
    """Every profile by name, the site's own among them."""
    merged = {**BUILT_IN, **(site or {})}
    return dict(sorted(merged.items()))


def find_profile(name: str, site: Mapping[str, Profile] | None = None) -> Profile:
    """The profile of this name; an unknown name is answered with the nearest known one."""
    profiles = all_profiles(site)
    if name not in profiles:
        raise UnknownName.among("profile", name, profiles)
    return profiles[name]
