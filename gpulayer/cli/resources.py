"""`gpulayer resources detect`: what this machine has, without joining anything."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import plain, print_json
from gpulayer.cli.quick import Command

if TYPE_CHECKING:
    from gpulayer_worker.detection import Detection, Verification
    from gpulayer_worker.devices.facts import Device

resources = typer.Typer(
    name="resources", help="What this machine has.", rich_markup_mode=None, no_args_is_help=True
)

PythonPath = Annotated[
    str | None, typer.Option("--python", metavar="PATH", help="The Python that runs jobs (this one).")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Run one tensor operation on each device, in a process of its own.")
]


@resources.callback()
def _group() -> None:
    """What this machine has."""


@resources.command("detect", cls=Command)
def detect_resources(json: opt.JsonOption = False, python: PythonPath = None, verify: Verify = False) -> int:
    """Show this machine: devices, what was validated on such hardware, frameworks of the jobs' Python.

    Example: gpulayer resources detect --python /opt/venv/bin/python --verify
    """
    from gpulayer_worker.detection import detect_machine

    found = detect_machine(python or sys.executable, verify=verify)
    if json:
        print_json(document(found))
    else:
        for label, text in facts(found):
            print(f"{label:<10}{plain(text)}")
    return 0


def facts(found: Detection) -> list[tuple[str, str]]:
    """One line per fact: label and text."""
    lines = [("machine", _machine(found)), ("python", f"{found.python.executable} {found.python.version}")]
    lines += [_device(device) for device in found.report.devices]
    lines += [("unusable", f"[-] {reason}") for reason in _unlisted(found)]
    lines += [("framework", f"{name} {version}") for name, version in _shown(found).items()]
    lines += [("verified", _verified(found, key, outcome)) for key, outcome in found.verified.items()]
    return lines


def document(found: Detection) -> dict[str, Any]:
    """The same for scripts."""
    return {
        "schema": 1,
        "name": found.name,
        "os": found.system.lower(),
        "release": found.release,
        "arch": found.arch,
        "cpus": found.cpus,
        "memory_bytes": found.memory_bytes,
        "python": {"executable": found.python.executable, "version": found.python.version},
        "launchers": list(found.python.launchers()),
        "devices": [_device_document(found, device) for device in found.report.devices],
        "drivers": dict(found.report.drivers),
        "driver_answers": found.driver_answers,
        "faults": _unlisted(found),
        "frameworks": _shown(found),
        "distributions": found.frameworks,
        "verified": {key: {"ok": one.ok, "text": one.text} for key, one in found.verified.items()},
    }


def _machine(found: Detection) -> str:
    from gpulayer_broker.units import format_size

    release = ".".join(found.release.split("-")[0].split(".")[:2])
    cpus = "1 CPU" if found.cpus == 1 else f"{found.cpus} CPUs"
    memory = format_size(found.memory_bytes)
    return f"{found.name} {found.system} {release} {found.arch}, {cpus}, {memory} memory"


def _device(device: Device) -> tuple[str, str]:
    from gpulayer.support import validation
    from gpulayer_broker.units import format_size

    place = f"[{device.index}] {device.kind} {device.name}"
    if not device.usable:
        return "unusable", f"{place}: {device.reason}"
    memory = f"({format_size(device.memory_bytes)}{' unified' if device.unified else ''})"
    uuid = [] if device.kind == "mps" else [device.uuid]  # an Apple machine's is the machine's own
    words = [f"{kind}={word}" for kind, word in validation(device.kind).items()]
    return "device", " ".join([place, memory, *uuid, *words])


def _device_document(found: Detection, device: Device) -> dict[str, Any]:
    from dataclasses import asdict

    from gpulayer.cli.worker_document import device_document

    reading = found.report.reading(device.uuid)
    told = {**asdict(device), "usable": device.usable}
    return device_document({**told, "memory_free_bytes": reading.free_bytes if reading else None})


def _unlisted(found: Detection) -> list[str]:
    """What stands against devices that could not even be listed."""
    told = {device.reason for device in found.report.devices}
    faults = [fault for fault in found.report.faults if fault not in told]
    if not found.driver_answers and not found.report.devices:
        faults.append("driver not answering")
    return faults


def _shown(found: Detection) -> dict[str, str]:
    """The frameworks among all that is installed."""
    from gpulayer_broker.workers import well_known

    return well_known(found.frameworks.items())


def _verified(found: Detection, key: str, outcome: Verification) -> str:
    names = {device.uuid: f"[{device.index}] {device.kind}" for device in found.report.devices}
    word = {True: "ok", False: "failed", None: "not tried"}[outcome.ok]
    return f"{names.get(key, key)} {word}: {outcome.text}"
