"""What is known of a machine's devices: what they are (`Device`) and what they do now (`Reading`).

These records travel as JSON between the process that asks the drivers and the worker. A fact that a driver does not
tell is None, and never a reason to drop the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

MISMATCH = "driver/library version mismatch; reload the driver or reboot"
NOT_ANSWERING = "driver not answering"


@dataclass(frozen=True)
class Device:
    """One device. `index` is its number among those of its kind, in the order that its vendor's tools and masks use.

    `uuid` is its name for ever; a device without one is named after its PCI address. `reason` says why it cannot be
    used. A `unified` device's memory is the machine's own; a `mig` one is a slice of another.
    """

    index: int
    kind: str
    name: str
    uuid: str
    pci: str | None = None
    memory_bytes: int = 0
    unified: bool = False
    mig: bool = False
    reason: str | None = None

    @property
    def usable(self) -> bool:
        return self.reason is None

    def unusable(self, reason: str) -> Device:
        return replace(self, reason=reason)


@dataclass(frozen=True)
class Process:
    """A process on a device; its memory is None where the driver does not say."""

    pid: int
    name: str
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Reading:
    """What one device does now. `processes` is None where the driver does not list them."""

    uuid: str
    used_bytes: int | None = None
    free_bytes: int | None = None
    utilisation: int | None = None
    processes: tuple[Process, ...] | None = None
    failure: str | None = None


@dataclass(frozen=True)
class Report:
    """All devices and readings of a machine at one moment, and what could not be found out."""

    devices: tuple[Device, ...] = ()
    readings: tuple[Reading, ...] = ()
    drivers: tuple[tuple[str, str], ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def usable(self) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.usable)

    def reading(self, uuid: str) -> Reading | None:
        return next((reading for reading in self.readings if reading.uuid == uuid), None)

    def joined(self, other: Report) -> Report:
        """Two vendors' reports as one."""
        return Report(
            self.devices + other.devices,
            self.readings + other.readings,
            self.drivers + other.drivers,
            self.faults + other.faults,
        )


def as_record(report: Report) -> dict[str, Any]:
    return asdict(report)


def report_of(record: Mapping[str, Any]) -> Report:
    return Report(
        tuple(Device(**device) for device in record["devices"]),
        readings_of(record["readings"]),
        tuple((name, version) for name, version in record["drivers"]),
        tuple(record["faults"]),
    )


def readings_of(records: Iterable[Mapping[str, Any]]) -> tuple[Reading, ...]:
    return tuple(_reading(record) for record in records)


def _reading(record: Mapping[str, Any]) -> Reading:
    listed = record["processes"]
    processes = None if listed is None else tuple(Process(**process) for process in listed)
    return Reading(**{**record, "processes": processes})
