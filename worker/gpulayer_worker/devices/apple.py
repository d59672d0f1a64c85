"""The GPU of an Apple machine, by system_profiler: one device, whose memory is the machine's own."""

from __future__ import annotations

from typing import Any

from gpulayer_worker.devices.facts import Device, Reading, Report
from gpulayer_worker.devices.recorded import Machine

PROFILE = ("system_profiler", "-json", "SPDisplaysDataType", "SPHardwareDataType")


class Apple:
    """The Metal device of a machine with Apple's own processor."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._uuid = ""

    def report(self) -> Report:
        if self.machine.system != "Darwin" or self.machine.arch != "arm64":
            return Report()
        profile = self.machine.document(*PROFILE)
        profile = profile if isinstance(profile, dict) else {}
        hardware, display = _first(profile, "SPHardwareDataType"), _first(profile, "SPDisplaysDataType")
        self._uuid = f"MPS-{hardware.get('platform_UUID', '0')}"
        chip = display.get("sppci_model") or hardware.get("chip_type") or "Apple arm64"
        metal = display.get("spdisplays_mtlgpufamilysupport") or display.get("spdisplays_metal") or "yes"
        reason = None if "unsupported" not in str(metal) else "Metal is not supported"
        memory_bytes = self.machine.memory_bytes()
        device = Device(
            0, "mps", f"{chip} GPU (Metal)", self._uuid, None, memory_bytes, unified=True, reason=reason
        )
        return Report((device,), self.readings())

    def readings(self) -> tuple[Reading, ...]:
        return (Reading(self._uuid, None, self.machine.available_bytes()),) if self._uuid else ()


def _first(profile: dict[str, Any], name: str) -> dict[str, Any]:
    entries = profile.get(name)
    return entries[0] if isinstance(entries, list) and entries and isinstance(entries[0], dict) else {}
