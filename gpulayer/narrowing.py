"""How each condition of a request narrows the known workers: one after another, in the order in which reasons are told.

Busy or not is no matter here: a worker counts as left while it could ever run what has been asked for so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gpulayer_broker.availability import cpus_text
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.gpu_matching import gpus_text
from gpulayer_broker.matching import reasons
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.units import format_size


@dataclass(frozen=True)
class Condition:
    """One thing that is asked for, and how many workers satisfy it and all before it."""

    text: str
    leaves: int


def narrowing(needs: Requirements, workers: Sequence[Capabilities]) -> tuple[Condition, ...]:
    """Every condition of the request with how many of the workers it leaves."""
    return tuple(
        Condition(text, sum(1 for worker in workers if not reasons(so_far, worker)))
        for text, so_far in _stages(needs)
    )


def narrowing_line(conditions: Sequence[Condition], total: int) -> str:
    """All of them in a line."""
    steps = (f"{each.text} leaves {each.leaves}" for each in conditions)
    return f"of {total} workers: {', '.join(steps)}"


def condition_texts(needs: Requirements) -> list[str]:
    """What is asked for, each condition in words."""
    return [text for text, _ in _stages(needs)]


def _stages(needs: Requirements) -> Iterator[tuple[str, Requirements]]:
    """Each condition in words, with the request up to it."""
    asked = Requirements(accelerator=needs.accelerator, gpus=min(needs.gpus, 1), cpus=0)
    yield f"accelerator {needs.accelerator}", asked
    if needs.gpus:
        asked = replace(asked, gpus=needs.gpus)
        yield gpus_text(needs.gpus), asked
    if needs.gpu_memory_bytes:
        asked = replace(asked, gpu_memory_bytes=needs.gpu_memory_bytes)
        yield f"{format_size(needs.gpu_memory_bytes)} GPU memory", asked
    if needs.gpu_models:
        asked = replace(asked, gpu_models=needs.gpu_models)
        yield f"gpu model {' or '.join(needs.gpu_models)}", asked
    for name, wanted in needs.frameworks:
        asked = replace(asked, frameworks=(*asked.frameworks, (name, wanted)))
        yield f"{name} {wanted}".rstrip(), asked
    yield from _of_the_machine(needs, asked)


def _of_the_machine(needs: Requirements, asked: Requirements) -> Iterator[tuple[str, Requirements]]:
    if needs.python:
        asked = replace(asked, python=needs.python)
        yield f"python {needs.python}", asked
    if needs.cpus:
        asked = replace(asked, cpus=needs.cpus)
        yield cpus_text(needs.cpus), asked
    if needs.memory_bytes:
        asked = replace(asked, memory_bytes=needs.memory_bytes)
        yield f"{format_size(needs.memory_bytes)} memory", asked
    for label in needs.labels:
        asked = replace(asked, labels=(*asked.labels, label))
        yield "label {}={}".format(*label), asked
    if needs.launcher:
        asked = replace(asked, launcher=needs.launcher)
        yield f"launcher {needs.launcher}", asked
    if needs.disk_bytes:
        asked = replace(asked, disk_bytes=needs.disk_bytes)
        yield f"{format_size(needs.disk_bytes)} disk", asked
    for feature in needs.features:
        asked = replace(asked, features=(*asked.features, feature))
        yield f"feature {feature}", asked
    if needs.queue != asked.queue:
        asked = replace(asked, queue=needs.queue)
        yield f"queue {needs.queue}", asked
