"""Who uses a device, and how much of it is left for jobs, by one reading of it.

What the worker's own jobs use is not counted, for the queue knows what they hold. The few hundred MB of a driver and a
desktop are nobody's use.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from gpulayer_broker.availability import IDLE_GPU_MEMORY_BYTES, Foreign
from gpulayer_worker.devices.facts import Device, Process, Reading

# What no process is listed for: a large card's driver keeps more than a small one's.
UNLISTED_SHARE = 0.02


@dataclass(frozen=True)
class Use:
    """The foreign process that stands in the way, if one does, and the bytes that jobs can have."""

    foreign: Foreign | None
    free_bytes: int


def judge(device: Device, reading: Reading | None, ours: Callable[[int], bool], held: bool) -> Use:
    """`ours` tells the pids of this worker's jobs; `held` says that one of them has the device, or just had it."""
    if reading is None:
        return Use(None, device.memory_bytes)
    foreign, own_bytes = _sorted_out(reading.processes or (), ours, held)
    taken_bytes = sum(process.memory_bytes or 0 for process in foreign)
    unlisted_bytes = 0 if reading.used_bytes is None else reading.used_bytes - taken_bytes - own_bytes
    if held:
        # Where pids or sizes are hidden, what is used while a job holds the device is the job's.
        own_bytes, unlisted_bytes = own_bytes + max(0, unlisted_bytes), 0
    free_bytes = device.memory_bytes if reading.free_bytes is None else reading.free_bytes + own_bytes
    offered_bytes = min(device.memory_bytes, free_bytes + IDLE_GPU_MEMORY_BYTES)
    return Use(_in_the_way(device, foreign, taken_bytes, unlisted_bytes), offered_bytes)


def _sorted_out(
    processes: tuple[Process, ...], ours: Callable[[int], bool], held: bool
) -> tuple[list[Process], int]:
    """The foreign processes, and the bytes of our own."""
    foreign, own_bytes = [], 0
    for process in processes:
        # In a container the driver tells of pids that do not exist here.
        if ours(process.pid) or (held and not os.path.exists(f"/proc/{process.pid}")):
            own_bytes += process.memory_bytes or 0
        else:
            foreign.append(process)
    return foreign, own_bytes


def _in_the_way(
    device: Device, foreign: list[Process], taken_bytes: int, unlisted_bytes: int
) -> Foreign | None:
    if taken_bytes > IDLE_GPU_MEMORY_BYTES:
        largest = max(foreign, key=lambda process: process.memory_bytes or 0)
        return Foreign(largest.pid, largest.name, largest.memory_bytes or 0)
    most_bytes = max(IDLE_GPU_MEMORY_BYTES, int(device.memory_bytes * UNLISTED_SHARE))
    if unlisted_bytes > most_bytes:
        named = foreign[0] if len(foreign) == 1 else None
        return Foreign(named.pid if named else 0, named.name if named else "", unlisted_bytes)
    return None
