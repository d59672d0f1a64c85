"""Which of the machine's devices a worker offers, by `--gpus`, and in which order."""

from __future__ import annotations

from collections.abc import Iterable

from gpulayer_broker.errors import UsageError
from gpulayer_worker.devices.facts import Device

NONE = "none"
UUIDS = ("GPU-", "MIG-", "MPS-", "TEGRA-", "PCI-")


class Selection:
    """The devices that a choice names, in its order; all of them if nothing is chosen.

    A name is a number as nvidia-smi counts, a UUID or its beginning; the number of a card that was cut into MIG slices
    means all of them. A number means the card that had it first: the others count anew when one vanishes. A device
    that is not there now is no error: it may come.
    """

    def __init__(self, choice: str = "") -> None:
        self._names = None if not choice.strip() else _parsed(choice)
        self._places: dict[str, str] = {}

    def of(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        here = tuple(devices)
        if self._names is None:
            return here
        found = [device for name in self._names for device in self._named(name, here)]
        return tuple(dict.fromkeys(found))

    def _named(self, name: str, devices: tuple[Device, ...]) -> list[Device]:
        if not name.isdigit():
            return [device for device in devices if device.uuid.casefold().startswith(name.casefold())]
        if name not in self._places:
            numbered = [device for device in devices if device.index == int(name)]
            self._places.update((name, _place(device)) for device in numbered[:1])
        return [device for device in devices if _place(device) == self._places.get(name)]


def _place(device: Device) -> str:
    return device.pci or device.uuid


def _parsed(choice: str) -> tuple[str, ...]:
    """The names of a choice; UsageError for one that has no sense."""
    names = tuple(part.strip() for part in choice.split(","))
    if names == (NONE,):
        return ()
    for name in names:
        if not name.isdigit() and not name.upper().startswith(UUIDS):
            raise UsageError(
                f"--gpus {choice}: '{name}' is no device: give numbers such as 0,1, UUIDs such as GPU-5a1c…, or none",
                value=name,
            )
    if len(set(names)) < len(names):
        raise UsageError(f"--gpus {choice}: a device is named twice", value=choice)
    return names
