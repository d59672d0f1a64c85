"""One look at all of a machine's devices, by whatever its platform offers. It runs in the probe's child."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gpulayer_worker.devices.apple import Apple
from gpulayer_worker.devices.facts import NOT_ANSWERING, Reading, Report
from gpulayer_worker.devices.nvidia_files import jetson, listed_cards
from gpulayer_worker.devices.recorded import Machine
from gpulayer_worker.devices.rocm import Rocm


class Survey:
    """Asks every vendor's source; what one of them cannot tell is no other's loss."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._rocm, self._apple = Rocm(machine), Apple(machine)
        self._nvidia = None if machine.system == "Darwin" else _Nvidia(machine)

    def listed(self) -> Report:
        """What is there by the kernel's files alone, should the drivers not answer."""
        return Report(listed_cards(self.machine, NOT_ANSWERING))

    def report(self) -> Report:
        found = _unless_it_fails("NVIDIA", self._nvidia.report) if self._nvidia else Report()
        found = found.joined(_unless_it_fails("AMD", self._rocm.report))
        return found.joined(_unless_it_fails("Apple", self._apple.report))

    def readings(self) -> tuple[Reading, ...]:
        own = self._nvidia.readings() if self._nvidia else ()
        return own + self._rocm.readings() + self._apple.readings()

    def xids(self, wait_ms: int) -> Iterator[tuple[str, int]]:
        return self._nvidia.xids(wait_ms) if self._nvidia else iter(())


def _unless_it_fails(vendor: str, look: Callable[[], Report]) -> Report:
    """What is found; a source that holds what nobody expected is told as a fault."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - files and tools of a machine may hold anything
        return Report(faults=(f"{vendor} devices could not be looked at: {type(error).__name__}: {error}",))


class _Nvidia:
    """NVML where there is one; else the kernel's files, and what they say about why there is none."""

    def __init__(self, machine: Machine) -> None:
        from gpulayer_worker.devices.nvml import Nvml

        self.machine = machine
        self._nvml = Nvml(machine)
        self._open = False
        self._tegra = ""

    def report(self) -> Report:
        from pynvml import NVML_ERROR_LIBRARY_NOT_FOUND, NVMLError

        from gpulayer_worker.devices.nvml import reason_of

        try:
            self._nvml.open()
            self._open = True
        except NVMLError as error:
            if error.value == NVML_ERROR_LIBRARY_NOT_FOUND:
                return self._without("driver not installed: libnvidia-ml.so.1 is missing")
            reason = reason_of(error)
            return replace(self._without(reason), faults=(reason,))
        found = self._nvml.report()
        return found if found.devices or found.faults else self._without("not shown by the driver")

    def _without(self, reason: str) -> Report:
        tegra = jetson(self.machine)
        if tegra is None:
            return Report(listed_cards(self.machine, reason))
        self._tegra = tegra.uuid
        return Report((tegra,), self.readings())

    def readings(self) -> tuple[Reading, ...]:
        if self._tegra:
            return (Reading(self._tegra, None, self.machine.available_bytes()),)
        return self._nvml.readings() if self._open else ()

    def xids(self, wait_ms: int) -> Iterator[tuple[str, int]]:
        return self._nvml.xids(wait_ms) if self._open else iter(())
