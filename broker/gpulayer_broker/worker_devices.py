"""A worker's devices as the queue knows them: what the worker last told, and which jobs hold them.

Told by heartbeats, so a few seconds old at most; who holds what is read from the ledger, whichever worker granted it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpulayer_broker.availability import Foreign, LiveDevice
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.units import MIB


@dataclass(frozen=True)
class Holder:
    """A job that has a device, or a share of one, and the memory that it said it needs."""

    job: str
    memory_bytes: int


@dataclass(frozen=True)
class WorkerDevice:
    """One device: `facts` as the worker told them, `shares` as many jobs as may have it at once."""

    facts: Mapping[str, Any]
    holders: tuple[Holder, ...] = ()
    shares: int = 1

    @property
    def usable(self) -> bool:
        return bool(self.facts.get("usable"))

    @property
    def foreign(self) -> Foreign | None:
        """Somebody else's process on it. While a job holds it that may be the job's, of another worker here."""
        told = self.facts.get("foreign")
        return Foreign(*told) if told and not self.holders else None

    @property
    def free_shares(self) -> int:
        """How many more jobs could have it now."""
        if not self.usable or self.foreign is not None:
            return 0
        return max(0, self.shares - len(self.holders))

    def live(self, caps: Capabilities) -> LiveDevice | None:
        """As matching judges it; None where the worker's class does not count it."""
        group = _group_of(self.facts, caps)
        if not self.usable or group is None:
            return None
        held_bytes = sum(holder.memory_bytes for holder in self.holders)
        return LiveDevice(
            index=int(self.facts["index"]),
            uuid=str(self.facts["uuid"]),
            group=group,
            free=len(self.holders) < self.shares,
            free_memory_bytes=max(0, int(self.facts["room_bytes"]) - held_bytes),
            foreign=self.foreign,
        )


def devices_of(info: Mapping[str, Any], ledger: Mapping[str, Sequence[bytes]]) -> tuple[WorkerDevice, ...]:
    """The devices that a worker's record tells of, with what the ledger says of each UUID."""
    shares = int(info.get("gpu_share") or 1)
    return tuple(
        WorkerDevice(facts, _holders(ledger.get(str(facts.get("uuid")), ())), shares)
        for facts in info.get("devices") or ()
    )


def _holders(entries: Sequence[bytes]) -> tuple[Holder, ...]:
    """From the values of a device's ledger: `<job>/<token> <MiB>`."""
    pairs = (entry.decode().rsplit(" ", 1) for entry in entries)
    return tuple(Holder(ref.split("/", 1)[0], int(mib) * MIB) for ref, mib in pairs)


def _group_of(facts: Mapping[str, Any], caps: Capabilities) -> int | None:
    """The group of equal devices, whose memory is rounded where it is the machine's own."""
    fitting = [
        (group.memory_bytes, number)
        for number, group in enumerate(caps.groups)
        if (group.kind, group.model, group.unified) == (facts["kind"], facts["name"], facts["unified"])
        and group.memory_bytes <= int(facts["memory_bytes"])
    ]
    return max(fitting)[1] if fitting else None
