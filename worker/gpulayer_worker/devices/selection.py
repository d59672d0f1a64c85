"""Which of the machine's devices a worker offers, by `--gpus`, and in which order."""

from __future__ import annotations

from collections.abc import Sequence

from gpulayer_broker.errors import UsageError
from gpulayer_worker.devices.facts import Device

ALL, NONE = "", "none"


def selected(devices: Sequence[Device], choice: str) -> tuple[Device, ...]:
    """The devices that the choice names, in its order; all of them if nothing is chosen.

    A name is a number as nvidia-smi counts, a UUID or its beginning; a number that was cut into MIG slices means all
    of them. A device that is not there now is no error: it may come.
    """
    if choice.strip() == ALL:
        return tuple(devices)
    found = [device for name in parsed(choice) for device in devices if is_named(device, name)]
    return tuple(dict.fromkeys(found))


def parsed(choice: str) -> tuple[str, ...]:
    """The names of a choice; UsageError for one that has no sense."""
    names = tuple(part.strip() for part in choice.split(","))
    if names == (NONE,):
        return ()
    for name in names:
        if not name.isdigit() and not name.upper().startswith(("GPU-", "MIG-", "MPS-", "TEGRA-", "PCI-")):
            raise UsageError(
                f"--gpus {choice}: '{name}' is no device: give numbers such as 0,1, UUIDs such as GPU-5a1c…, or none",
                value=name,
            )
    if len(set(names)) < len(names):
        raise UsageError(f"--gpus {choice}: a device is named twice", value=choice)
    return names


def is_named(device: Device, name: str) -> bool:
    if name.isdigit():
        return device.index == int(name)
    return device.uuid.casefold().startswith(name.casefold())
