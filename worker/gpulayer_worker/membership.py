"""Worker processes of an existing Dramatiq app that offer this machine's devices, by the same ledger as all others.

    broker = CapabilityBroker("redis://queue:6379/0")
    offer_devices(broker, gpus="0,1")

    @dramatiq.actor(accelerator="cuda", gpus=1)
    def train(…): …

The app's threads share one process, so nothing can be masked for one task: an actor asks `granted_devices` which
devices are its own, and uses these.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from os import getpid
from pathlib import Path
from secrets import token_hex

from dramatiq.broker import MessageProxy

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.consumer import CapabilityMessage
from gpulayer_broker.errors import UsageError
from gpulayer_broker.folders import locate_folders, machine_name
from gpulayer_broker.functions import DeviceLot
from gpulayer_broker.local_facts import usable_cpus
from gpulayer_broker.member import Callbacks, Identity, Member
from gpulayer_worker.devices.facts import Device
from gpulayer_worker.devices.selection import Selection
from gpulayer_worker.hardware import Hardware, Offered


def offer_devices(broker: CapabilityBroker, *, gpus: str = "", gpu_share: int = 1) -> None:
    """Worker processes of this broker offer devices: all of them, or those that `gpus` names as `--gpus` would."""
    Selection(gpus)
    if gpu_share < 1:
        raise UsageError(f"gpu_share={gpu_share}: at least 1 job has a GPU", value=gpu_share)

    def member(callbacks: Callbacks) -> Member:
        offered = Offered(gpus=gpus, gpu_share=gpu_share, queues=broker.consumed_queues)
        return DeviceMember(
            broker, Hardware(broker.settings, offered, Path(tempfile.gettempdir())), callbacks
        )

    broker.use_member(member)


def granted_devices(broker: CapabilityBroker, message: MessageProxy) -> tuple[Device, ...]:
    """The devices that a message's task may use, while it is being processed by a worker of this broker."""
    if not isinstance(broker.member, DeviceMember) or not isinstance(message, CapabilityMessage):
        return ()
    return broker.member.hardware.granted(message.attempt)


class DeviceMember(Member):
    """A membership that watches the devices of its machine from its making to its end."""

    def __init__(self, broker: CapabilityBroker, hardware: Hardware, callbacks: Callbacks) -> None:
        self.hardware = hardware
        name = f"{socket.gethostname()}-{getpid()}"
        node = machine_name(locate_folders().state.parent)[:16]
        super().__init__(
            broker.endpoint,
            broker.settings,
            Identity(worker=f"w_{name}-{token_hex(3)}", node=node),
            hardware.start(),
            callbacks,
            info=lambda: _record(name, hardware),
            node_cpus=usable_cpus(),
        )
        hardware.attach(self)

    def join(self, capacity: int, lots: Callable[[], tuple[DeviceLot, ...]] | None = None) -> None:
        try:
            super().join(capacity, lots)
        except BaseException:
            self.hardware.stop()
            raise

    def leave(self) -> None:
        try:
            super().leave()
        finally:
            self.hardware.stop()


def _record(name: str, hardware: Hardware) -> bytes:
    import orjson

    return orjson.dumps({"name": name, "host": socket.gethostname(), "pid": getpid(), **hardware.facts()})
