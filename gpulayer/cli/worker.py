"""`gpulayer worker …`: the workers of this machine."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gpulayer.cli import options as opt
from gpulayer.cli.output import plain, print_json
from gpulayer.cli.quick import Command
from gpulayer_broker.errors import UnknownName

if TYPE_CHECKING:
    from gpulayer_broker.workers import WorkerRecord

worker = typer.Typer(
    name="worker", help="The workers of this machine.", rich_markup_mode=None, no_args_is_help=True
)

Name = Annotated[str | None, typer.Argument(metavar="[NAME]", help="The worker's name.")]


@worker.callback()
def _group() -> None:
    """The workers of this machine."""


@worker.command("status", cls=Command)
def worker_status(
    name: Name = None,
    target: opt.TargetOption = None,
    redis: opt.RedisOption = None,
    json: opt.JsonOption = False,
) -> int:
    """Show the workers that run on this machine: devices, room, frameworks, jobs.

    Example: gpulayer worker status --json
    """
    from gpulayer.cli.worker_document import worker_document

    with opt.open_client(target, redis) as client:
        found = _chosen(client.workers(), name)
    documents = [worker_document(one) for one in found]
    if json:
        print_json(documents[0] if len(documents) == 1 else documents)
        return 0
    for document in documents:
        for label, text in _facts(document):
            print(f"{label:<10}{plain(text)}")
    if not documents:
        print("no worker runs here")
    return 0


def _chosen(workers: list[WorkerRecord], name: str | None) -> list[WorkerRecord]:
    """The one of that name, wherever it runs; else all of this machine."""
    if name is None:
        return [one for one in workers if one.info.get("host") == platform.node()]
    found = [one for one in workers if name in (one.name, one.id)]
    if not found:
        raise UnknownName.among("worker", name, [one.name for one in workers])
    return found


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    """One line per fact, as `resources detect` prints them."""
    from gpulayer_broker.units import format_size

    cpu, gpu = document["slots"]["cpu"], document["slots"]["gpu"]
    python = document["python"]
    memory = format_size(document["memory_bytes"])
    cpus = "1 CPU" if document["cpus"] == 1 else f"{document['cpus']} CPUs"
    machine = f"{document['os']} {document['arch']}, {cpus}, {memory} memory"
    lines = [
        ("worker", f"{document['name']} ({document['id']}) {document['state']}"),
        ("machine", machine),
        ("python", f"{python['executable'] or ''} {python['version']}".strip()),
        ("slots", f"{cpu['free']} of {cpu['total']} CPU free, {gpu['free']} of {gpu['total']} GPU free"),
    ]
    lines += [_device(device) for device in document["devices"]]
    lines += [("framework", f"{name} {version}") for name, version in document["frameworks"].items()]
    lines += [("job", job) for job in document["jobs"]]
    return lines


def _device(device: dict[str, Any]) -> tuple[str, str]:
    from gpulayer_broker.units import format_size

    place = f"[{device['index']}] {device['kind']} {device['name']}"
    if not device["usable"]:
        return "unusable", f"{place}: {device['reason']}"
    free = device["memory_free_bytes"]
    memory = format_size(device["memory_bytes"]) + (" unified" if device["unified"] else "")
    told = "" if free is None else f", {format_size(free)} free"
    held = f" job={device['job']}" if device["job"] else ""
    return "device", f"{place} ({memory}{told}){held}"
