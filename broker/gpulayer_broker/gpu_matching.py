"""Which of a worker's GPUs a job may use, by kind, number, memory and model; and why none, where none.

A job's GPUs are all of one kind. Models are compared by whole words of their names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from gpulayer_broker.capabilities import GPU_SHARE, Capabilities, DeviceGroup
from gpulayer_broker.requirements import GPU_KINDS, Requirements
from gpulayer_broker.units import format_size, format_unlike

Numbered = tuple[int, DeviceGroup]


def _kinds(req: Requirements) -> tuple[str, ...]:
    return GPU_KINDS if req.accelerator in ("gpu", "any") else (req.accelerator,)


def _of_kind(req: Requirements, caps: Capabilities) -> list[Numbered]:
    """Those of the right kind; slices only for a job that takes one, for a process can use no second."""
    return [
        (number, group)
        for number, group in enumerate(caps.groups)
        if group.kind in _kinds(req) and (req.gpus < 2 or not _is_slice(group))
    ]


def _is_slice(group: DeviceGroup) -> bool:
    return "mig" in _words(group.model)


def usable_groups(req: Requirements, caps: Capabilities) -> tuple[int, ...]:
    """The numbers of the groups that hold enough GPUs with the memory and model that the job asks for."""
    if not req.gpus or _says_too_little(req, caps):
        return ()
    usable = _meeting(req, _of_kind(req, caps))
    counts = _counts(usable)
    kinds = {kind for kind, count in counts.items() if count >= req.gpus}
    if req.gpus > 1 and len(kinds) > 1:
        # The GPUs of one job are of one kind: no process uses CUDA and ROCm at once.
        kinds = {max(sorted(kinds), key=lambda kind: counts[kind])}
    return tuple(number for number, group in usable if group.kind in kinds)


def _says_too_little(req: Requirements, caps: Capabilities) -> bool:
    """Where jobs share a GPU, each must say how much of its memory it needs."""
    return GPU_SHARE in caps.features and not req.gpu_memory_bytes


def _meeting(req: Requirements, groups: Iterable[Numbered]) -> list[Numbered]:
    return [
        (number, group)
        for number, group in groups
        if group.memory_bytes >= req.gpu_memory_bytes and _model_matches(req, group.model)
    ]


def _counts(groups: Iterable[Numbered]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for _, group in groups:
        counts[group.kind] += group.count
    return counts


def _model_matches(req: Requirements, model: str) -> bool:
    return not req.gpu_models or any(model_matches(asked, model) for asked in req.gpu_models)


@lru_cache(maxsize=4096)
def model_matches(asked: str, model: str) -> bool:
    """Whether a GPU's full name is of the asked model: by whole words, so A10 is no A100 and L4 no L40S.

    `A100 80GB` finds NVIDIA A100-SXM4-80GB, and `RTX4090` finds NVIDIA GeForce RTX 4090.
    """
    wanted, words = _words(asked), _words(model)
    rest = iter(words)
    if wanted and all(word in rest for word in wanted):
        return True
    joined = "".join(wanted)
    runs = (
        "".join(words[start:end]) for start in range(len(words)) for end in range(start + 1, len(words) + 1)
    )
    return bool(joined) and joined in runs


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.casefold())


def judge_gpus(req: Requirements, caps: Capabilities) -> list[str]:
    """Accelerator, number, memory and model of the GPUs that the job cannot run without."""
    if not req.wants_gpu:
        return []
    groups = _of_kind(req, caps)
    if not groups:
        return [_no_accelerator(req, caps)]
    here = max(_counts(groups).values())
    texts = [f"needs {gpus_text(req.gpus)}, has {here}"] if here < req.gpus else []
    texts += _memory_text(req, groups) + _model_text(req, groups)
    if _says_too_little(req, caps):
        texts.append("gpu_memory not given, and jobs share the GPUs")
    if not texts and not usable_groups(req, caps):
        texts.append(_together_text(req, groups))
    return texts


def _no_accelerator(req: Requirements, caps: Capabilities) -> str:
    if any(group.kind in _kinds(req) for group in caps.groups):
        return f"needs {gpus_text(req.gpus)}, has only MIG slices, of which a process can use one"
    if req.accelerator == "gpu":
        return f"needs {gpus_text(req.gpus)}, has 0"
    return f"accelerator '{req.accelerator}' not available (has {', '.join(('cpu', *caps.kinds))})"


def _memory_text(req: Requirements, groups: Sequence[Numbered]) -> list[str]:
    largest = max(group.memory_bytes for _, group in groups)
    if largest >= req.gpu_memory_bytes:
        return []
    needed, here = format_unlike(req.gpu_memory_bytes, largest)
    return [f"needs {needed} GPU memory, largest is {here}"]


def _model_text(req: Requirements, groups: Sequence[Numbered]) -> list[str]:
    models = sorted({group.model for _, group in groups})
    if any(_model_matches(req, model) for model in models):
        return []
    return [f"gpu model {_either(req.gpu_models)} not present (has {', '.join(models)})"]


def _together_text(req: Requirements, groups: Sequence[Numbered]) -> str:
    """Each condition is met by some GPU, but too few meet them all."""
    conditions = [f"of model {_either(req.gpu_models)}"] if req.gpu_models else []
    conditions += [f"with {format_size(req.gpu_memory_bytes)}"] if req.gpu_memory_bytes else []
    here = max(_counts(_meeting(req, groups)).values(), default=0)
    return f"needs {gpus_text(req.gpus)} {' '.join(conditions)}, has {here}"


def _either(names: Sequence[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)


def gpus_text(count: int, free: str = "") -> str:
    """So many GPUs in words."""
    return f"{count} {free}{'GPU' if count == 1 else 'GPUs'}"
