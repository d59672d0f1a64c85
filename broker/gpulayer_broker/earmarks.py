"""What a machine is kept for, as its ledger tells: for whoever explains why a job waits.

Who gets an earmark and what it withholds is decided in the queue's functions (`lua/h_earmarks.lua`); this reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from gpulayer_broker.units import MIB

_TEXT = re.compile(r"earmark (\S+) \w+\.\d+\.(\d+)\.(\d+)\.\S+ \S+ (\d) (\S+) \d+ (\S*)")


@dataclass(frozen=True, slots=True)
class Earmark:
    """What is kept on a machine until `worker`, or another one, takes `job`."""

    job: str
    worker: str
    priority: int
    cpus: int
    memory_bytes: int
    devices: tuple[str, ...] = ()

    def binds(self, job: str, priority: int) -> bool:
        """Whether it withholds anything from a job of this priority; lower goes first."""
        return job != self.job and priority >= self.priority


def earmark_in(values: Iterable[bytes]) -> Earmark | None:
    """The one among the values of a machine's ledger, if there is one that can be read."""
    for value in values:
        if found := _TEXT.fullmatch(value.decode("utf-8", "replace")):
            job, cpus, memory_mib, priority, worker, devices = found.groups()
            uuids = tuple(filter(None, devices.split(",")))
            return Earmark(job, worker, int(priority), int(cpus), int(memory_mib) * MIB, uuids)
    return None
