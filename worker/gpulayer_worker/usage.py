"""What jobs and machine use: the record of one attempt, and the worker's samples over time.

An attempt's record has wall and processor time, the largest process (`max_rss_bytes`), the peak of the whole tree where
it had a control group (`peak_memory_bytes`, which counts the files that it had in memory), and for each granted device
the peak of its memory and its mean utilisation. A device is read once a second while somebody has it.

A sample of the machine goes into the capped stream `samples:<worker>` as often as the worker's heartbeat.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.queue import Queue
from gpulayer_worker.processes.cgroup import GroupFacts
from gpulayer_worker.processes.job import Usage

log = logging.getLogger("gpulayer")

KEPT_SAMPLES = 8640
READ_DEVICES_S = 1.0


class DeviceReading(Protocol):
    """What one device does at one moment; None for what its driver does not tell. Utilisation is in percent."""

    @property
    def uuid(self) -> str: ...

    @property
    def used_bytes(self) -> int | None: ...

    @property
    def utilisation(self) -> int | None: ...


Readings = Callable[[], Iterable[DeviceReading]]


def no_devices() -> tuple[DeviceReading, ...]:
    """The readings of a machine without devices."""
    return ()


def usage_record(
    wall_s: float, process: Usage, group: GroupFacts | None = None, devices: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """As a job's record keeps it."""
    cpu_s = max(process.user_s + process.system_s, (group.cpu_s or 0.0) if group else 0.0)
    record: dict[str, Any] = {
        "wall_s": round(wall_s, 6),
        "cpu_s": round(cpu_s, 6),
        "max_rss_bytes": process.max_rss_bytes,
    }
    if group is not None and group.peak_bytes is not None:
        record["peak_memory_bytes"] = group.peak_bytes
    if devices:
        record["devices"] = list(devices)
    return record


@dataclass
class _Meter:
    """One device while one attempt has it."""

    uuid: str
    peak_bytes: int | None = None
    utilisations: list[int] = field(default_factory=list)

    def take(self, reading: DeviceReading) -> None:
        if reading.used_bytes is not None:
            self.peak_bytes = max(self.peak_bytes or 0, reading.used_bytes)
        if reading.utilisation is not None:
            self.utilisations.append(reading.utilisation)

    def record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"uuid": self.uuid}
        if self.peak_bytes is not None:
            record["peak_memory_bytes"] = self.peak_bytes
        if self.utilisations:
            record["mean_utilisation"] = round(sum(self.utilisations) / len(self.utilisations), 1)
        return record


class DeviceMeters:
    """The meters of all granted devices. Safe between threads."""

    def __init__(self, readings: Readings = no_devices) -> None:
        self._readings = readings
        self._lock = threading.Lock()
        self._meters: dict[str, list[_Meter]] = {}

    @property
    def busy(self) -> bool:
        """Whether a device has to be read."""
        return bool(self._meters)

    def begin(self, token: str, uuids: Iterable[str]) -> None:
        """An attempt has these devices from now on."""
        meters = [_Meter(uuid) for uuid in uuids]
        if meters:
            with self._lock:
                self._meters[token] = meters

    def read(self) -> tuple[DeviceReading, ...]:
        """The devices' readings of now, entered in every meter."""
        readings = {reading.uuid: reading for reading in self._readings()}
        with self._lock:
            for meter in (meter for meters in self._meters.values() for meter in meters):
                if meter.uuid in readings:
                    meter.take(readings[meter.uuid])
        return tuple(readings.values())

    def end(self, token: str) -> list[dict[str, Any]]:
        """The records of an attempt's devices, with a last reading."""
        if token in self._meters:
            self.read()
        with self._lock:
            return [meter.record() for meter in self._meters.pop(token, ())]


class Sampler(threading.Thread):
    """Writes a sample every `every_s`, and reads the devices more often while a job has one."""

    def __init__(
        self, queue: Queue, worker: str, every_s: float, meters: DeviceMeters, tasks: Callable[[], int]
    ) -> None:
        super().__init__(name="gpulayer-sampler", daemon=True)
        self._queue, self._worker, self._every_s = queue, worker, every_s
        self._meters, self._tasks = meters, tasks
        self._stopped = threading.Event()

    def run(self) -> None:
        import psutil

        psutil.cpu_percent()  # the first answer says nothing: it counts from here
        due_s = time.monotonic() + self._every_s
        while not self._stopped.wait(self._pause_s(due_s)):
            try:
                readings = self._meters.read() if self._meters.busy else ()
                if time.monotonic() >= due_s:
                    due_s += self._every_s * (1 + (time.monotonic() - due_s) // self._every_s)
                    self._write(sample(self._tasks(), readings or self._meters.read()))
            except GpulayerError as error:
                log.debug("sample of %s: %s", self._worker, error)
            except Exception:
                # A thread that has ended would leave charts and meters empty without a word.
                log.exception("sample of %s", self._worker)

    def stop(self) -> None:
        self._stopped.set()
        if self.ident is not None:
            self.join()

    def _pause_s(self, due_s: float) -> float:
        until_due_s = max(0.0, due_s - time.monotonic())
        return min(until_due_s, READ_DEVICES_S) if self._meters.busy else until_due_s

    def _write(self, fields: Mapping[str, str | float]) -> None:
        flat = [part for name, value in fields.items() for part in (name, str(value))]
        key = self._queue.keys.samples(self._worker)
        self._queue.link.call("XADD", key, "MAXLEN", "~", KEPT_SAMPLES, "*", *flat)


def sample(tasks: int, readings: Iterable[DeviceReading]) -> dict[str, str | float]:
    """The machine at this moment: processor in percent of all cores, memory, task processes, devices."""
    import orjson
    import psutil

    memory = psutil.virtual_memory()
    devices = [
        {"uuid": reading.uuid, "utilisation": reading.utilisation, "used_bytes": reading.used_bytes}
        for reading in readings
    ]
    fields: dict[str, str | float] = {
        "cpu": round(psutil.cpu_percent(), 1),
        "memory_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
        "tasks": tasks,
    }
    if devices:
        fields["devices"] = orjson.dumps(devices).decode()
    return fields
