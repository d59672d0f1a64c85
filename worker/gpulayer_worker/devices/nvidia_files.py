"""NVIDIA devices as the kernel's own files tell of them: for when the driver's library cannot, or there is none.

The driver's `/proc` lists its cards even when library and driver do not fit; the PCI bus lists cards without a driver;
the device tree names a Jetson.
"""

from __future__ import annotations

from gpulayer_worker.devices.facts import Device
from gpulayer_worker.devices.recorded import Machine

CARDS = "/proc/driver/nvidia/gpus"
PCI = "/sys/bus/pci/devices"
NVIDIA_VENDOR = 0x10DE
DISPLAY_CLASSES = (0x0300, 0x0302)
TREE = "/proc/device-tree"
JETSON_UUID = "tegra-"


def listed_cards(machine: Machine, reason: str) -> tuple[Device, ...]:
    """The cards that are in the machine, in PCI order, none of them usable, for the given reason."""
    names = {address: _driver_facts(machine, address) for address in machine.names(CARDS)}
    addresses = sorted(names) or _pci_cards(machine)
    devices = []
    for index, address in enumerate(addresses):
        facts = names.get(address, {})
        name, uuid = facts.get("Model") or "NVIDIA GPU", facts.get("GPU UUID") or f"pci-{address}"
        devices.append(Device(index, "cuda", name, uuid, address, reason=reason))
    return tuple(devices)


def _driver_facts(machine: Machine, address: str) -> dict[str, str]:
    lines = (machine.text(f"{CARDS}/{address}/information") or "").splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _pci_cards(machine: Machine) -> list[str]:
    return [
        address
        for address in machine.names(PCI)
        if machine.number(f"{PCI}/{address}/vendor") == NVIDIA_VENDOR
        and (machine.number(f"{PCI}/{address}/class") or 0) >> 8 in DISPLAY_CLASSES
    ]


def jetson(machine: Machine) -> Device | None:
    """The GPU of a Jetson, which older releases of its software do not show through NVML."""
    compatible = (machine.text(f"{TREE}/compatible") or "").split("\0")
    if not any(name.startswith("nvidia,tegra") for name in compatible):
        return None
    name = machine.text(f"{TREE}/model") or "NVIDIA Tegra"
    serial = machine.text(f"{TREE}/serial-number") or "0"
    return Device(0, "cuda", name, JETSON_UUID + serial, memory_bytes=machine.memory_bytes(), unified=True)
