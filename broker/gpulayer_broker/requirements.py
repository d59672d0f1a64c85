"""What a job asks for: the `Requirements` record, how one is built, its canonical bytes and its signature.

Two requests that mean the same have the same record, the same canonical bytes and the same signature, so
they share a queue. A signature is `<letter><gpus>.<gpu memory MiB>.<cpus>.<memory MiB>.<disk MiB>.<hash>`;
the queue's functions read the amounts from it, and the rest is decided by the hash. The letters: `c` takes
no GPU; `g` takes GPUs; `a` takes a GPU if one is free, and none otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

from gpulayer_broker import arguments
from gpulayer_broker.arguments import Pairs, Wording
from gpulayer_broker.errors import BadRequirement, FormatTooNew
from gpulayer_broker.profiles import ACCELERATORS as ACCELERATORS
from gpulayer_broker.profiles import GPU_KINDS as GPU_KINDS
from gpulayer_broker.profiles import Profile, find_profile
from gpulayer_broker.units import MIB, mib_up
from gpulayer_broker.versions import canonical_framework, canonical_range

FORMAT = 1
LAUNCHERS = ("direct", "torchrun", "jax", "mpi")
DEFAULT_QUEUE = "gpulayer"
# What users may ask for of a machine, by the names of the arguments.
ASKED = (
    "accelerator",
    "gpus",
    "gpu_memory",
    "gpu_model",
    "frameworks",
    "profile",
    "cpus",
    "memory",
    "disk",
    "python",
    "labels",
)


@dataclass(frozen=True)
class Requirements:
    """What a job asks for, in canonical form: sorted, rounded up, each name spelled one way."""

    accelerator: str = "cpu"
    gpus: int = 0
    gpu_memory_bytes: int = 0
    gpu_models: tuple[str, ...] = ()
    frameworks: tuple[tuple[str, str], ...] = ()
    cpus: int = 1
    memory_bytes: int = 0
    disk_bytes: int = 0
    python: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    launcher: str = ""
    features: tuple[str, ...] = ()
    queue: str = DEFAULT_QUEUE

    def canonical(self) -> bytes:
        """The same bytes for the same requirements, on every machine; `decode` reads them."""
        return self._canonical

    @cached_property
    def _canonical(self) -> bytes:
        import orjson

        # Defaults are left out, so that a field that comes later changes no signature of jobs without it.
        told = {name: value for name in _DEFAULTS if (value := getattr(self, name)) != _DEFAULTS[name]}
        return orjson.dumps({"v": FORMAT, **told}, option=orjson.OPT_SORT_KEYS)

    @cached_property
    def signature(self) -> str:
        """The name of the queue that all jobs with these requirements share."""
        import hashlib

        digest = hashlib.sha256(self.canonical()).hexdigest()[:20]
        amounts = (
            self.gpus,
            mib_up(self.gpu_memory_bytes),
            self.cpus,
            mib_up(self.memory_bytes),
            mib_up(self.disk_bytes),
        )
        return f"{self._letter}{'.'.join(map(str, amounts))}.{digest}"

    @property
    def _letter(self) -> str:
        return {"cpu": "c", "any": "a"}.get(self.accelerator, "g")

    @property
    def wants_gpu(self) -> bool:
        """Whether the job cannot run without a GPU."""
        return self.gpus > 0 and self.accelerator != "any"


_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Requirements)}


def decode(data: bytes) -> Requirements:
    """The requirements that these canonical bytes hold.

    A field that this version does not know is refused, because a condition that nobody judges could send a
    job to the wrong machine.
    """
    import orjson

    try:
        record = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadRequirement(f"requirements are not readable: {error}") from None
    if not isinstance(record, dict):
        raise BadRequirement("requirements are not readable: not an object")
    version = record.pop("v", None)
    unknown = sorted(record.keys() - _DEFAULTS.keys())
    if version != FORMAT or unknown:
        what = f"fields {', '.join(unknown)}" if version == FORMAT else f"format {version}"
        raise FormatTooNew(f"requirements with {what}: update gpulayer on this machine", value=version)
    decoded = Requirements(**{name: _decoded(name, value) for name, value in record.items()})
    for text in (decoded.python, *(text for _, text in decoded.frameworks)):
        # Refused here, so that judging never meets a range that cannot be read.
        canonical_range(text)
    return decoded


def _decoded(name: str, value: Any) -> Any:
    if not _is_well_formed(name, value):
        raise BadRequirement(f"requirements are not readable: {name} is {value!r:.60}", value=value)
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value


def _is_well_formed(name: str, value: object) -> bool:
    if name == "accelerator":
        return value in ACCELERATORS
    if not isinstance(_DEFAULTS[name], tuple):
        return type(value) is type(_DEFAULTS[name]) and not (isinstance(value, int) and value < 0)
    is_item = _is_pair if name in ("frameworks", "labels") else _is_text
    return isinstance(value, list) and all(map(is_item, value))


def _is_text(item: object) -> bool:
    return isinstance(item, str)


def _is_pair(item: object) -> bool:
    return isinstance(item, list) and len(item) == 2 and all(map(_is_text, item))


def build_requirements(
    *,
    accelerator: str | None = None,
    gpus: int | None = None,
    gpu_memory: str | int | None = None,
    gpu_model: str | Iterable[str] | None = None,
    frameworks: Pairs | None = None,
    profile: str | None = None,
    cpus: int | None = None,
    memory: str | int | None = None,
    disk: str | int | None = None,
    python: str | None = None,
    labels: Pairs | None = None,
    launcher: str | None = None,
    features: Iterable[str] = (),
    queue: str = DEFAULT_QUEUE,
    default_cpus: int = 1,
    site_profiles: Mapping[str, Profile] | None = None,
    wording: Literal["argument", "flag"] = "argument",
) -> Requirements:
    """The canonical requirements that the arguments mean; BadRequirement names one that has no sense.

    A profile fills in what is not given; explicit values win, frameworks merge by name. No accelerator
    means the CPU, unless a profile or `gpus` says otherwise. `default_cpus` is what a job takes that may run
    without a GPU; one that cannot takes a GPU's slot, and no CPU slot besides unless it says `cpus`.
    """
    words = Wording(wording == "flag")
    found = find_profile(profile, site_profiles) if profile else None
    kind, gpu_count = _accelerator(words, accelerator, gpus, found)
    _no_gpu_words_for_cpu(words, kind, gpu_memory=gpu_memory, gpu_model=gpu_model)
    if gpu_count and kind != "any":
        default_cpus = 0
    return Requirements(
        accelerator=kind,
        gpus=gpu_count,
        gpu_memory_bytes=mib_up(arguments.size(words, "gpu_memory", gpu_memory)) * MIB,
        gpu_models=arguments.gpu_models(words, gpu_model),
        frameworks=_merged(_from_profile(profile, found, kind), arguments.frameworks(words, frameworks)),
        cpus=default_cpus if cpus is None else arguments.count(words, "cpus", cpus, least=1),
        memory_bytes=arguments.stepped(arguments.size(words, "memory", memory)),
        disk_bytes=arguments.stepped(arguments.size(words, "disk", disk)),
        python=arguments.python_range(words, python),
        labels=arguments.labels(words, labels),
        launcher="" if launcher is None else arguments.one_of(words, "launcher", launcher, LAUNCHERS),
        features=tuple(sorted(set(features))),
        queue=arguments.queue_name(words, queue),
    )


def _accelerator(
    words: Wording, accelerator: str | None, gpus: int | None, profile: Profile | None
) -> tuple[str, int]:
    count = None if gpus is None else arguments.count(words, "gpus", gpus, least=0)
    if accelerator is not None:
        kind = arguments.one_of(words, "accelerator", accelerator, ACCELERATORS)
    elif profile is not None:
        kind = profile.accelerator
    else:
        kind = "gpu" if count else "cpu"
    return _kind_and_count(words, kind, count)


def _kind_and_count(words: Wording, kind: str, count: int | None) -> tuple[str, int]:
    if kind == "cpu":
        if count:
            raise words.error("gpus", count, "a CPU job takes no GPU: name another accelerator or drop it")
        return "cpu", 0
    if count is None:
        return kind, 1
    if kind == "any":
        # A number of GPUs leaves nothing to fall back to: so many of any kind, or, for 0, the CPU.
        return ("gpu", count) if count else ("cpu", 0)
    if count == 0:
        raise words.error("gpus", 0, f"accelerator '{kind}' needs at least 1: drop one of the two")
    return kind, count


def _no_gpu_words_for_cpu(words: Wording, kind: str, **given: object) -> None:
    for argument, value in given.items():
        if kind == "cpu" and value is not None:
            add = "--gpus 1 or --accelerator cuda" if words.flags else "gpus=1 or accelerator='cuda'"
            raise words.error(argument, value, f"a CPU job has no GPU: add {add}")


def _from_profile(name: str | None, profile: Profile | None, kind: str) -> dict[str, str]:
    if profile is None:
        return {}
    # `torch.cuda` goes when the profile's accelerator gave way to another.
    strange = "" if kind == profile.accelerator else f".{profile.accelerator}"
    try:
        found = dict(canonical_framework(*pair) for pair in profile.frameworks)
    except BadRequirement as error:
        raise BadRequirement(f"profile '{name}': {error}", value=name) from None
    return {key: text for key, text in found.items() if not (strange and key.endswith(strange))}


def _merged(*frameworks: dict[str, str]) -> tuple[tuple[str, str], ...]:
    """The frameworks by name; of a name given twice, the later."""
    return tuple(sorted({key: text for each in frameworks for key, text in each.items()}.items()))
