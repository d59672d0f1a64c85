"""The machine as one worker offers it: its capabilities, what it could start now, and what is told about it.

CPU slots and GPU slots are apart. A GPU job takes a GPU slot and, unless it says `cpus=`, no CPU slot: CPU jobs never
keep a GPU idle, nor GPU jobs the cores. One that says `cpus=` takes these as well. With `--gpu-share N` each GPU is N
slots, and only jobs that say how much GPU memory they need may have one.

Devices are offered by UUID, as they are at that very moment: one that somebody else's process uses, that its driver
does not show any more or that told of an error is not offered, and jobs on a device that is lost are handed back.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpulayer_broker.attempts import DEVICE_LOST, Attempt
from gpulayer_broker.capabilities import GPU_SHARE, WARM, Capabilities, DeviceGroup
from gpulayer_broker.functions import DeviceLot
from gpulayer_broker.local_facts import own_capabilities
from gpulayer_broker.member import Member
from gpulayer_broker.requirements import DEFAULT_QUEUE
from gpulayer_broker.settings import Settings
from gpulayer_broker.units import GIB, MIB
from gpulayer_worker.devices.facts import Device, Reading
from gpulayer_worker.devices.selection import Selection
from gpulayer_worker.devices.use import judge
from gpulayer_worker.devices.watch import Sight, Watch
from gpulayer_worker.frameworks import Interpreter
from gpulayer_worker.processes.pool import HAS_FORK_SERVER
from gpulayer_worker.runner import proctree

log = logging.getLogger("gpulayer")

# A job's memory is given back a moment after its processes are gone.
JUST_HELD_S = 5.0
# With less free than this, or than that share of a small disk, no job is begun.
RESERVE_BYTES, RESERVE_SHARE, RESERVE_FILES = 64 * MIB, 20, 32
# Of that reserve: with less free the disk is full, and what runs has to give way too.
FULL_SHARE = 8
SHOWN_STEP_BYTES = 64 * MIB


class DeviceLost(Exception):
    """A device that was granted cannot be used any more."""


@dataclass(frozen=True)
class Offered:
    """What the operator lets a worker offer; nothing said is all that is there."""

    cpus: int | None = None
    gpus: str = ""
    gpu_share: int = 1
    labels: tuple[tuple[str, str], ...] = ()
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)
    python: str = sys.executable


class Hardware:
    """Devices, frameworks and room of this machine, watched while the worker runs. `start` first, `stop` last."""

    def __init__(
        self, settings: Settings, offered: Offered, scratch: Path, recording: Path | None = None
    ) -> None:
        self._selection = Selection(offered.gpus)
        self.offered, self.scratch = offered, scratch
        self._trouble = ""
        self.interpreter = Interpreter(offered.python)
        self._watch = Watch(
            limit_s=settings.probe_limit_s,
            every_s=settings.probe_every_s,
            read_every_s=settings.heartbeat_s,
            root=recording,
            on_change=self._changed,
        )
        self._member: Member | None = None
        self._held_s: dict[str, float] = {}

    def start(self) -> Capabilities:
        """Looks at the machine; ConfigError if the Python of its jobs cannot be asked."""
        self._watch.start()
        try:
            self.interpreter.python()
            self._watch.first()
            return self.capabilities()
        except BaseException:
            self._watch.stop()
            raise

    def attach(self, member: Member) -> None:
        """This member offers what is here."""
        self._member = member
        member.claims.lots = self.lots
        member.claims.disk_mib = self._disk_free_mib
        if DEFAULT_QUEUE in self.offered.queues:  # the tasks of other apps have no folders here
            member.claims.has_room = self.has_room

    def stop(self) -> None:
        self._watch.stop()

    # --- what it is ---

    def devices(self, sight: Sight | None = None) -> tuple[Device, ...]:
        """The devices that this worker may offer, unusable ones among them."""
        return self._selection.of((sight or self._watch.sight).report.devices)

    @property
    def gpu_slots(self) -> int:
        """How many GPU jobs could run here at once, were every device usable."""
        return len(self.devices()) * self.offered.gpu_share

    def capabilities(self) -> Capabilities:
        """The static facts, rounded so that equal machines are of one class."""
        python, usable = self.interpreter.python(), [d for d in self.devices() if d.usable]
        own = own_capabilities(
            queues=self.offered.queues,
            cpus=self.offered.cpus,
            labels=self.offered.labels,
            python=python.version,
            frameworks=python.frameworks({device.kind for device in usable}),
        )
        return replace(
            own,
            memory_bytes=rounded(own.memory_bytes),
            disk_bytes=rounded(own.disk_bytes),
            groups=tuple(DeviceGroup(*_identity(device)) for device in usable),
            launchers=python.launchers(),
            features=self._features(),
        )

    def _features(self) -> tuple[str, ...]:
        """What not every worker can do."""
        keeps_warm = HAS_FORK_SERVER and DEFAULT_QUEUE in self.offered.queues
        shares = self.offered.gpu_share > 1
        return ((GPU_SHARE,) if shares else ()) + ((WARM,) if keeps_warm else ())

    def refresh(self) -> None:
        """Tells the queue when what is here has changed: devices, or the packages of the jobs' Python."""
        member = self._member
        if member is not None and (found := self.capabilities()) != member.capabilities:
            member.change(found)

    # --- what is free ---

    def lots(self) -> tuple[DeviceLot, ...]:
        """The shares of devices that nobody outside the queue uses now."""
        assert self._member is not None
        if not any(device.usable for device in self.devices()):
            return ()
        sight, caps, held = self._watch.fresh(), self._member.capabilities, self._held()
        if not sight.answers:
            return ()
        lots: list[DeviceLot] = []
        for device in self.devices(sight):
            group = group_number(caps, device)
            if group is None:
                continue
            use = judge(device, sight.reading(device.uuid), is_ours, device.uuid in held)
            if use.foreign is None:
                free_mib = use.free_bytes // MIB
                lots += [DeviceLot(device.uuid, n, group, free_mib) for n in range(self.offered.gpu_share)]
        return tuple(lots)

    def _held(self) -> set[str]:
        """The devices that a job of this worker has, or had a moment ago."""
        now_s = time.monotonic()
        for attempt in self._member.attempts.all() if self._member else ():
            self._held_s.update((uuid, now_s) for uuid, _ in attempt.grant.lots)
        return {uuid for uuid, held_s in self._held_s.items() if now_s - held_s < JUST_HELD_S}

    def has_room(self) -> bool:
        """Whether the disk has room to begin a job at all: a worker without would fail one job after another."""
        try:
            facts = self._disk()
        except OSError as error:
            self._tell_trouble(f"this worker takes no job: {error}")
            return False
        self._trouble = ""
        files = facts.f_files == 0 or facts.f_favail >= RESERVE_FILES
        return files and facts.f_bavail * facts.f_frsize >= _reserve_bytes(facts)

    def _disk(self) -> os.statvfs_result:
        """A folder that somebody has removed, as a job may, is made again."""
        try:
            return os.statvfs(self.scratch)
        except FileNotFoundError:
            self.scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
            log.warning("%s was gone and has been made again", self.scratch)
            return os.statvfs(self.scratch)

    def _tell_trouble(self, trouble: str) -> None:
        """Once: it is looked at with each claim."""
        if trouble != self._trouble:
            log.warning("%s", trouble)
        self._trouble = trouble

    def lacking_bytes(self) -> int:
        """Of a disk that is full, what must be freed so that jobs can begin; 0 of one that is not."""
        try:
            facts = os.statvfs(self.scratch)
        except OSError:
            return 0
        free, reserve = facts.f_bavail * facts.f_frsize, _reserve_bytes(facts)
        return reserve - free if free < reserve // FULL_SHARE else 0

    def _disk_free_mib(self) -> int:
        return free_bytes(self.scratch) // MIB

    # --- what a job was given ---

    def granted(self, attempt: Attempt) -> tuple[Device, ...]:
        """The devices of an attempt, in the order that they were offered in; DeviceLost if one is not there."""
        sight = self._watch.sight
        names = {uuid for uuid, _ in attempt.grant.lots}
        devices = tuple(device for device in self.devices(sight) if device.uuid in names and device.usable)
        if len(devices) < len(names) or sight.dead:
            raise DeviceLost(self.why_lost(attempt))
        return devices

    def is_named_by_uuid(self, device: Device) -> bool:
        """Whether a job must be given the UUID: a slice has no number, and CUDA may skip a broken card in counting."""
        if device.kind != "cuda" or not device.uuid.startswith(("GPU-", "MIG-")):
            return False
        cards = [other for other in self._watch.sight.report.devices if other.kind == "cuda"]
        return any(other.mig or not other.usable for other in cards)

    def readings(self) -> tuple[Reading, ...]:
        """What the usable devices do now."""
        sight = self._watch.fresh()
        found = (sight.reading(device.uuid) for device in self.devices(sight) if device.usable)
        return tuple(reading for reading in found if reading is not None)

    def why_lost(self, attempt: Attempt) -> str:
        """What became of the attempt's devices, in a line."""
        names, sight = {uuid for uuid, _ in attempt.grant.lots}, self._watch.sight
        reasons = [
            f"gpu {device.index} ({device.name}): {device.reason}"
            for device in sight.report.devices
            if device.uuid in names and device.reason
        ]
        gone = sorted(names - {device.uuid for device in sight.report.devices})
        reasons += [f"{uuid} is no longer shown by its driver" for uuid in gone if not sight.dead]
        return "; ".join(reasons) or "the device driver does not answer"

    def _changed(self, sight: Sight) -> None:
        """Devices came, went or fell silent: the queue is told, and jobs on lost ones are ended."""
        member = self._member
        if member is None:
            return
        usable = set() if sight.dead else {device.uuid for device in sight.usable}
        for attempt in member.attempts.all():
            if any(uuid not in usable for uuid, _ in attempt.grant.lots):
                attempt.stop(DEVICE_LOST)
        self.refresh()

    # --- what is told ---

    def facts(self) -> dict[str, Any]:
        """What status and explain show of this machine, from the last reading; it asks no driver."""
        sight, python = self._watch.sight, self.interpreter.known
        return {
            "python": {"executable": python.executable, "version": python.version},
            "devices": [self._shown(device, sight) for device in self.devices(sight)],
            "driver_answers": sight.answers,
            "gpu_share": self.offered.gpu_share,
            "disk_free_bytes": stepped(free_bytes(self.scratch), GIB // 4),
            "disk_full": not self.has_room(),
        }

    def _shown(self, device: Device, sight: Sight) -> dict[str, Any]:
        reading = sight.reading(device.uuid)
        use = judge(device, reading, is_ours, device.uuid in self._held())
        free = None if reading is None or reading.free_bytes is None else reading.free_bytes
        return {
            "index": device.index,
            "kind": device.kind,
            "name": device.name,
            "uuid": device.uuid,
            "pci": device.pci,
            "memory_bytes": device.memory_bytes,
            "memory_free_bytes": None if free is None else stepped(free, SHOWN_STEP_BYTES),
            "room_bytes": stepped(use.free_bytes, SHOWN_STEP_BYTES),
            "unified": device.unified,
            "mig": device.mig,
            "usable": device.usable,
            "reason": device.reason,
            "foreign": list(use.foreign) if use.foreign else None,
        }


def _identity(device: Device) -> tuple[str, str, int, int, bool]:
    """The facts by which a device belongs to its group."""
    size = rounded(device.memory_bytes) if device.unified else device.memory_bytes
    return device.kind, device.name, size, 1, device.unified


def group_number(caps: Capabilities, device: Device) -> int | None:
    """The device's group in these capabilities; None if they were taken without it, or it cannot be used."""
    if not device.usable:
        return None
    kind, name, size, _, unified = _identity(device)
    try:
        return caps.group_of(kind, name, size, unified)
    except ValueError:
        return None


def is_ours(pid: int) -> bool:
    """Whether a process is this one or descends from it, as all jobs of a worker do."""
    while pid > 1:
        if pid == os.getpid():
            return True
        status = proctree.status(pid)
        if status is None:
            return False
        pid = status.parent
    return False


def rounded(size_bytes: int) -> int:
    """The size less at most a thirty-second part: machines sold as equal differ by a few MB."""
    step = 1 << max(0, size_bytes.bit_length() - 6)
    return size_bytes // step * step


def stepped(size_bytes: int, step_bytes: int) -> int:
    """In whole steps, so that what is told changes only when it matters."""
    return size_bytes // step_bytes * step_bytes


def _reserve_bytes(facts: os.statvfs_result) -> int:
    return min(RESERVE_BYTES, facts.f_blocks * facts.f_frsize // RESERVE_SHARE)


def free_bytes(folder: Path) -> int:
    """What the folder's file system could still take; 0 where that cannot be told."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize
