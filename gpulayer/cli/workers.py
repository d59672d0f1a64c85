"""`gpulayer workers`: the machines that take jobs from a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_json, print_table

if TYPE_CHECKING:
    from gpulayer_broker.workers import WorkerRecord


def list_workers(
    target: opt.TargetOption = None, redis: opt.RedisOption = None, json: opt.JsonOption = False
) -> int:
    """List the workers that the queue knows.

    Example: gpulayer workers --json
    """
    with opt.open_client(target, redis) as client:
        workers = client.workers()
    if json:
        print_json([_document(worker) for worker in workers])
    else:
        columns = ("worker", "state", "cpus free", "memory free", "gpus", "python", "jobs")
        print_table(columns, [_row(worker) for worker in workers])
    return 0


def _row(worker: WorkerRecord) -> tuple[str, ...]:
    from gpulayer_broker.units import format_duration, format_size

    has = worker.capabilities
    gpus = ", ".join(f"{group.count} {group.model}" for group in has.groups) if has else ""
    state = worker.state
    return (
        worker.name,
        f"{state} for {format_duration(worker.heartbeat_age_s)}" if state == "offline" else state,
        f"{worker.free_slots}/{worker.slots}",
        f"{format_size(worker.free_memory_bytes)}/{format_size(worker.memory_bytes)}",
        gpus or "-",
        has.python if has else "-",
        str(len(worker.running)),
    )


def _document(worker: WorkerRecord) -> dict[str, Any]:
    from gpulayer_broker.workers import shown_frameworks

    has = worker.capabilities
    return {
        "schema": 1,
        "id": worker.id,
        "name": worker.name,
        "node": worker.node,
        "state": worker.state,
        "heartbeat_age_s": round(worker.heartbeat_age_s, 1),
        "os": has.os if has else None,
        "arch": has.arch if has else None,
        "python": has.python if has else None,
        "cpus": has.cpus if has else None,
        "memory_bytes": worker.memory_bytes,
        "slots": {"cpu": {"total": worker.slots, "free": worker.free_slots}},
        "gpus": [
            {
                "kind": group.kind,
                "model": group.model,
                "memory_bytes": group.memory_bytes,
                "count": group.count,
            }
            for group in (has.groups if has else ())
        ],
        "frameworks": shown_frameworks(has) if has else {},
        "labels": dict(has.labels) if has else {},
        "launchers": list(has.launchers) if has else [],
        "jobs": list(worker.running),
    }
