"""Which workers can run which jobs, and in one line each why not.

`eligible_groups` is the answer that the queue keeps: the groups of GPUs that a job may use on a worker, or
None if it can never run there. `reasons` says what stands against it for ever, `live_reasons` what stands
against it now, both in one fixed order; "never" and "busy" are never mixed up. No reason at all means yes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from gpulayer_broker.availability import (
    Foreign,
    Live,
    LiveDevice,
    busy_texts,
    cpus_text,
    state_texts,
    takeable,
)
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.gpu_matching import judge_gpus, model_matches, usable_groups
from gpulayer_broker.names import provides
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.units import format_unlike
from gpulayer_broker.versions import satisfies

__all__ = [
    "Fits",
    "Foreign",
    "Live",
    "LiveDevice",
    "Reason",
    "eligible_groups",
    "explain",
    "live_reasons",
    "model_matches",
    "reasons",
    "summary",
    "takeable",
    "verdict",
]

Fits = Literal["never", "busy", "yes"]
# How the reasons begin of a worker that takes nothing new, or is not there; else it is busy.
ENGAGED = ("busy", "draining", "offline")


@dataclass(frozen=True, slots=True)
class Reason:
    """What stands between one job and one worker: for ever, or now."""

    fits: Fits
    text: str


def eligible_groups(req: Requirements, caps: Capabilities) -> tuple[int, ...] | None:
    """The groups whose GPUs the job may use, by number, none for the CPU; None if it can never run there."""
    return None if reasons(req, caps) else usable_groups(req, caps)


def reasons(req: Requirements, caps: Capabilities) -> list[Reason]:
    """All that stands for ever between the job and such a worker, in the documented order."""
    texts = [text for judge in _JUDGES for text in judge(req, caps)]
    return [Reason("never", text) for text in texts]


def live_reasons(req: Requirements, caps: Capabilities, live: Live) -> list[Reason]:
    """All that stands now between the job and a worker that could run it, in the documented order."""
    return [Reason("busy", text) for text in busy_texts(req, caps, live)]


def explain(req: Requirements, caps: Capabilities, live: Live | None = None) -> list[Reason]:
    """What stands against the job on this worker, for ever first; the one reason "fits" if nothing does."""
    never = reasons(req, caps)
    now: list[Reason] = []
    if live is not None:
        # What is free says nothing about a job that never fits; whether the worker is there still does.
        texts = state_texts(req, live) if never else busy_texts(req, caps, live)
        now = [Reason("busy", text) for text in texts]
    return never + now or [Reason("yes", "fits")]


def verdict(found: Iterable[Reason]) -> Fits:
    """One worker's reasons in a word."""
    words = {reason.fits for reason in found}
    return "never" if "never" in words else "busy" if "busy" in words else "yes"


def _judge_frameworks(req: Requirements, caps: Capabilities) -> list[str]:
    missing, wrong = [], []
    for framework, wanted in req.frameworks:
        found = [(name, version) for name, version in caps.frameworks if provides(name, framework)]
        if not found:
            missing.append(f"framework '{framework}' not installed")
        elif not any(satisfies(version, wanted) for _, version in found):
            what = " and ".join(f"{name} {version}" for name, version in found)
            wrong.append(f"{what} {'does' if len(found) == 1 else 'do'} not satisfy {wanted}")
    return missing + wrong


def _judge_python(req: Requirements, caps: Capabilities) -> list[str]:
    if satisfies(caps.python, req.python):
        return []
    return [f"python {caps.python or 'unknown'} does not satisfy {req.python}"]


def _judge_cpus(req: Requirements, caps: Capabilities) -> list[str]:
    return [f"needs {cpus_text(req.cpus)}, has {caps.cpus}"] if caps.cpus < req.cpus else []


def _judge_memory(req: Requirements, caps: Capabilities) -> list[str]:
    return _short(req.memory_bytes, caps.memory_bytes, "memory")


def _judge_disk(req: Requirements, caps: Capabilities) -> list[str]:
    return _short(req.disk_bytes, caps.disk_bytes, "disk")


def _short(needed_bytes: int, here_bytes: int, what: str) -> list[str]:
    if needed_bytes <= here_bytes:
        return []
    needed, here = format_unlike(needed_bytes, here_bytes)
    return [f"needs {needed} {what}, has {here}"]


def _judge_labels(req: Requirements, caps: Capabilities) -> list[str]:
    return [f"label {key}={value} not set" for key, value in req.labels if (key, value) not in caps.labels]


def _judge_launcher(req: Requirements, caps: Capabilities) -> list[str]:
    if not req.launcher or req.launcher in caps.launchers:
        return []
    return [f"launcher '{req.launcher}' not supported"]


def _judge_features(req: Requirements, caps: Capabilities) -> list[str]:
    return [f"feature '{name}' not supported" for name in req.features if name not in caps.features]


def _judge_queue(req: Requirements, caps: Capabilities) -> list[str]:
    return [] if req.queue in caps.queues else [f"queue '{req.queue}' not served"]


_JUDGES: tuple[Callable[[Requirements, Capabilities], list[str]], ...] = (
    judge_gpus,
    _judge_frameworks,
    _judge_python,
    _judge_cpus,
    _judge_memory,
    _judge_labels,
    _judge_launcher,
    _judge_disk,
    _judge_features,
    _judge_queue,
)


def summary(workers: Sequence[Sequence[Reason]]) -> str:
    """One line about all known workers, each given by its own reasons."""
    verdicts = Counter(verdict(found) for found in workers)
    if not workers:
        return "no worker is known yet"
    if verdicts["yes"]:
        return f"{verdicts['yes']} of {_workers(len(workers))} can run this now"
    if fitting := [found for found in workers if verdict(found) == "busy"]:
        how = {_engaged(found) for found in fitting}
        words = " or ".join(word for word in ENGAGED if word in how)
        count = len(fitting)
        return (
            f"the only worker that fits is {words}"
            if count == 1
            else f"all {count} workers that fit are {words}"
        )
    return f"no known worker can ever run this ({_workers(len(workers))}: {_tally(workers)})"


def _engaged(found: Iterable[Reason]) -> str:
    """Why a worker that could run it does not now, in a word: who is away is not busy."""
    texts = [reason.text for reason in found]
    return next((word for word in reversed(ENGAGED) if any(t.startswith(word) for t in texts)), "busy")


def _tally(workers: Sequence[Sequence[Reason]]) -> str:
    """Each worker counted once, by all that stands for ever against it; the commonest first."""
    counts = Counter(" and ".join(r.text for r in found if r.fits == "never") for found in workers)
    # By its number: a name takes a table of names to compile.
    return ", ".join(f"{count} \u00d7 {text}" for text, count in counts.most_common())


def _workers(count: int) -> str:
    return f"{count} {'worker' if count == 1 else 'workers'}"
