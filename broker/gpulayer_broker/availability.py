"""What a worker has left now, and in one line each why a job that fits it must wait.

A GPU that somebody else's process uses is not free, whatever the queue's own ledger says; the few hundred
MB that a driver and a desktop hold do not count.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.gpu_matching import gpus_text, usable_groups
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.units import MIB, format_duration, format_size, format_unlike

# What a driver and a desktop hold of an idle card; a shortfall up to this is nobody's use of it.
IDLE_GPU_MEMORY_BYTES = 512 * MIB


class Foreign(NamedTuple):
    """A process on a GPU that GPUlayer did not start; its pid is 0 where the system hides it."""

    pid: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LiveDevice:
    """One GPU now: `free` means that no job of ours holds it."""

    index: int
    uuid: str
    group: int
    free: bool
    free_memory_bytes: int
    foreign: Foreign | None = None


@dataclass(frozen=True, slots=True)
class Live:
    """What a worker has left now, and whether it would take anything."""

    free_cpus: int
    free_memory_bytes: int
    free_disk_bytes: int
    devices: tuple[LiveDevice, ...] = ()
    state: Literal["online", "draining", "offline"] = "online"
    offline_s: float = 0.0
    driver_answers: bool = True
    disk_full: bool = False


def busy_texts(req: Requirements, caps: Capabilities, live: Live) -> list[str]:
    """All that stands now between the job and a worker that could run it, in the documented order."""
    return [
        *_gpus_now(req, caps, live),
        *_amounts_now(req, live),
        *_foreign_now(req, caps, live),
        *state_texts(req, live),
    ]


def takeable(req: Requirements, device: LiveDevice) -> bool:
    """Whether the job could have this GPU now: nobody uses it, and the memory it asks for is free."""
    return device.free and device.foreign is None and _has_memory(req, device)


def _has_memory(req: Requirements, device: LiveDevice) -> bool:
    return device.free_memory_bytes + IDLE_GPU_MEMORY_BYTES >= req.gpu_memory_bytes


def _candidates(req: Requirements, caps: Capabilities, live: Live) -> list[LiveDevice]:
    groups = usable_groups(req, caps)
    return [device for device in live.devices if device.group in groups]


def _short_of_gpus(req: Requirements, caps: Capabilities, live: Live) -> bool:
    return req.wants_gpu and _most_takeable(req, caps, live) < req.gpus


def _most_takeable(req: Requirements, caps: Capabilities, live: Live) -> int:
    """The most GPUs of one kind that the job could have now."""
    candidates = _candidates(req, caps, live)
    return max(
        Counter(caps.groups[device.group].kind for device in candidates if takeable(req, device)).values(),
        default=0,
    )


def _gpus_now(req: Requirements, caps: Capabilities, live: Live) -> list[str]:
    if not _short_of_gpus(req, caps, live):
        return []
    texts = [f"needs {gpus_text(req.gpus, 'free ')}, {_most_takeable(req, caps, live)} free"]
    return texts + [
        "needs {} GPU memory, {} free on gpu {}".format(
            *format_unlike(req.gpu_memory_bytes, device.free_memory_bytes), device.index
        )
        for device in _candidates(req, caps, live)
        if device.free and device.foreign is None and not _has_memory(req, device)
    ]


def _amounts_now(req: Requirements, live: Live) -> list[str]:
    texts = []
    if live.free_cpus < req.cpus:
        texts.append(f"needs {cpus_text(req.cpus, 'free ')}, {live.free_cpus} free")
    for needed_bytes, free_bytes, what in (
        (req.memory_bytes, live.free_memory_bytes, "memory"),
        (req.disk_bytes, live.free_disk_bytes, "disk"),
    ):
        if free_bytes < needed_bytes:
            needed, free = format_unlike(needed_bytes, free_bytes)
            texts.append(f"needs {needed} {what}, {free} free")
    return texts


def _foreign_now(req: Requirements, caps: Capabilities, live: Live) -> list[str]:
    if not _short_of_gpus(req, caps, live):
        return []
    return [
        f"gpu {device.index} in use by {_who(device.foreign)}"
        for device in _candidates(req, caps, live)
        if device.foreign is not None
    ]


def _who(foreign: Foreign) -> str:
    size = format_size(foreign.memory_bytes)
    return f"pid {foreign.pid} ({foreign.name}, {size})" if foreign.pid else f"another process ({size})"


def state_texts(req: Requirements, live: Live) -> list[str]:
    """Whether the worker is there at all and takes jobs."""
    texts = ["draining"] if live.state == "draining" else []
    if req.wants_gpu and not live.driver_answers:
        texts.append("driver not answering")
    if live.disk_full:
        texts.append("disk full")
    if live.state == "offline":
        texts.append(f"offline for {format_duration(live.offline_s)}")
    return texts


def cpus_text(count: int, free: str = "") -> str:
    """So many CPUs in words."""
    return f"{count} {free}{'cpu' if count == 1 else 'cpus'}"
