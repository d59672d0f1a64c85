"""NVIDIA devices by NVML, the driver's own library. Only the probe's child calls it: any of its functions may hang.

A function that fails for one device costs that device one fact, or, where its identity or its life is in doubt, its
use; never the other devices. MIG slices are devices; the card that was cut into them is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pynvml
from pynvml import NVMLError

from gpulayer_worker.devices.facts import MISMATCH, Device, Process, Reading, Report
from gpulayer_worker.devices.nvidia_files import listed_cards
from gpulayer_worker.devices.recorded import Machine

T = TypeVar("T")

WRONG_MEMORY = "reports memory that cannot be; reset it or reboot"
LOST = "fallen off the bus; reboot"
RESET = "needs a reset; nvidia-smi --gpu-reset, or reboot"
REASONS = {
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: MISMATCH,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "driver not loaded; modprobe nvidia, or install the driver",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission; see who may open /dev/nvidia*",
    pynvml.NVML_ERROR_GPU_IS_LOST: LOST,
    pynvml.NVML_ERROR_RESET_REQUIRED: RESET,
}
# The device is gone or will not compute, whichever function says so of what it does now.
FATAL = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)


class WrongMemory(Exception):
    """More is used or free than there is."""


def reason_of(error: NVMLError) -> str:
    """Why a device cannot be used, with what to do where that is known."""
    code = getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)
    return REASONS.get(code) or f"NVML: {str(error)[:1].lower()}{str(error)[1:]}"


class Nvml:
    """An open NVML. `open` raises NVMLError; `report` and `readings` do not."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._handles: dict[str, Any] = {}
        self._slices: dict[str, tuple[str, ...]] = {}
        self._unified: set[str] = set()

    def open(self) -> None:
        pynvml.nvmlInit()

    def report(self) -> Report:
        """Every device in PCI order, which is the order of nvidia-smi."""
        self._handles.clear()
        self._slices.clear()
        try:
            count = pynvml.nvmlDeviceGetCount()
        except NVMLError as error:
            reason = reason_of(error)
            return Report(listed_cards(self.machine, reason), faults=(reason,))
        devices = tuple(device for index in range(count) for device in self._card(index))
        version = _told(pynvml.nvmlSystemGetDriverVersion)
        drivers = (("nvidia", _text(version)),) if version else ()
        return Report(devices, self.readings(), drivers)

    def _card(self, index: int) -> list[Device]:
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        except NVMLError as error:
            return [self._unreachable(index, reason_of(error))]
        device = self._device(index, handle)
        try:
            if not device.usable or not _mig_is_on(handle):
                return [device]
        except NVMLError as error:
            return [device.unusable(reason_of(error))]
        slices = [self._slice(device, part) for part in _slices(handle)]
        self._slices[device.uuid] = tuple(each.uuid for each in slices)
        return slices or [device.unusable("MIG is on and no slice is made; nvidia-smi mig -cgi")]

    def _unreachable(self, index: int, reason: str) -> Device:
        """A card that gives no handle, by the name that the kernel's files have for it."""
        listed = listed_cards(self.machine, reason)
        if index < len(listed):
            return listed[index]
        return Device(index, "cuda", "NVIDIA GPU", f"nvml-{index}", reason=reason)

    def _device(self, index: int, handle: Any) -> Device:
        pci = _told(lambda: _address(pynvml.nvmlDeviceGetPciInfo_v3(handle).busId))
        name = _text(_told(lambda: pynvml.nvmlDeviceGetName(handle)) or "NVIDIA GPU")
        uuid = f"pci-{pci}" if pci else f"nvml-{index}"
        try:
            uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
            self._handles[uuid] = handle
            memory_bytes, unified = self._memory(uuid, handle)
        except NVMLError as error:
            return Device(index, "cuda", name, uuid, pci, reason=reason_of(error))
        reason = None if memory_bytes else WRONG_MEMORY
        return Device(index, "cuda", name, uuid, pci, memory_bytes, unified, reason=reason)

    def _slice(self, card: Device, handle: Any) -> Device:
        device = self._device(card.index, handle)
        name = device.name if "MIG" in device.name else f"{card.name} MIG"
        return Device(
            card.index,
            "cuda",
            name,
            device.uuid,
            card.pci,
            device.memory_bytes,
            mig=True,
            reason=device.reason,
        )

    def _memory(self, uuid: str, handle: Any) -> tuple[int, bool]:
        """(bytes, unified): a device whose memory is "not supported" shares the machine's."""
        try:
            return int(_memory_of(handle).total), False
        except NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:
                raise
        self._unified.add(uuid)
        return self.machine.memory_bytes(), True

    def readings(self) -> tuple[Reading, ...]:
        """What each device of the last report does now."""
        return tuple(self._reading(uuid, handle) for uuid, handle in self._handles.items())

    def _reading(self, uuid: str, handle: Any) -> Reading:
        try:
            used, free = self._use(uuid, handle)
            processes = self._processes(handle)
            return Reading(uuid, used, free, _utilisation(handle), processes)
        except NVMLError as error:
            return Reading(uuid, failure=reason_of(error))
        except WrongMemory:
            return Reading(uuid, failure=WRONG_MEMORY)

    def _use(self, uuid: str, handle: Any) -> tuple[int | None, int]:
        if uuid in self._unified:
            return None, self.machine.available_bytes()
        memory = _memory_of(handle)
        if not 0 < memory.total >= max(memory.used, memory.free):
            raise WrongMemory
        return int(memory.used), int(memory.free)

    def _processes(self, handle: Any) -> tuple[Process, ...] | None:
        """Compute and graphics processes, each once; None where the driver lists none of a kind."""
        found: dict[int, Process] = {}
        listed = False
        for ask in (
            pynvml.nvmlDeviceGetComputeRunningProcesses_v3,
            pynvml.nvmlDeviceGetGraphicsRunningProcesses_v3,
        ):
            entries = _does(lambda ask=ask: ask(handle))  # type: ignore[misc]
            listed = listed or entries is not None
            for entry in entries or ():
                known = found.get(entry.pid)
                memory = entry.usedGpuMemory if known is None else (known.memory_bytes or entry.usedGpuMemory)
                found[entry.pid] = Process(entry.pid, self._name(entry.pid), memory)
        return tuple(found.values()) if listed else None

    def _name(self, pid: int) -> str:
        """A program's name without its path and arguments, which may hold secrets."""
        name = self.machine.text(f"/proc/{pid}/comm")
        if name:
            return name
        told = _text(_told(lambda: pynvml.nvmlSystemGetProcessName(pid)) or "")
        return told.split(" ")[0].rsplit("/", 1)[-1] or "unknown"

    def xids(self, wait_ms: int) -> Iterator[tuple[str, int]]:
        """Waits for critical errors for ever: (uuid of the device, Xid). Ends where the driver tells of none.

        The error of a card is one of each of its slices.
        """
        events = _told(pynvml.nvmlEventSetCreate)
        if events is None or not self._register(events):
            return
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(events, wait_ms)
            except NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    continue
                return
            uuid = _told(lambda event=event: _text(pynvml.nvmlDeviceGetUUID(event.device)))  # type: ignore[misc]
            if uuid and event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                yield from ((each, int(event.eventData)) for each in self._slices.get(uuid, (uuid,)))

    def _register(self, events: Any) -> bool:
        """Whether any device tells of its errors."""
        kinds = pynvml.nvmlEventTypeXidCriticalError
        done = [
            _told(lambda handle=handle: _done(pynvml.nvmlDeviceRegisterEvents(handle, kinds, events)))  # type: ignore[misc]
            for handle in self._handles.values()
        ]
        return any(done)


def _done(_: object) -> bool:
    return True


def _told(ask: Callable[[], T]) -> T | None:
    """A fact; None where this driver does not tell it, for whatever reason."""
    try:
        return ask()
    except NVMLError:
        return None


def _does(ask: Callable[[], T]) -> T | None:
    """What a device does now; None where this driver does not tell it. That it will not compute is raised."""
    try:
        return ask()
    except NVMLError as error:
        if error.value in FATAL:
            raise
        return None


def _memory_of(handle: Any) -> Any:
    """Version 2 keeps what the driver reserves apart from what is used."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, pynvml.nvmlMemory_v2)
    except NVMLError as error:
        if error.value in FATAL:
            raise
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


def _utilisation(handle: Any) -> int | None:
    rates = _does(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle))
    return None if rates is None else int(rates.gpu)


def _mig_is_on(handle: Any) -> bool:
    mode = _does(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    return mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def _slices(handle: Any) -> Iterator[Any]:
    for index in range(_told(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0):
        part = _told(lambda index=index: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))  # type: ignore[misc]
        if part is not None:
            yield part


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _address(bus_id: str | bytes) -> str:
    """NVML's 00000000:3B:00.0 as the kernel writes it: 0000:3b:00.0."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{domain[-4:]}:{rest}"
