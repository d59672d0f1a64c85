"""`gpulayer workers`: the machines that take jobs from a queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    from gpulayer.cli.worker_document import worker_document

    with opt.open_client(target, redis) as client:
        workers = client.workers()
    if json:
        print_json([worker_document(worker) for worker in workers])
    else:
        columns = ("worker", "state", "cpus free", "memory free", "gpus free", "python", "jobs")
        print_table(columns, [_row(worker) for worker in workers])
    return 0


def _row(worker: WorkerRecord) -> tuple[str, ...]:
    from gpulayer.cli.worker_document import gpu_slots
    from gpulayer_broker.units import format_duration, format_size

    has = worker.capabilities
    gpus = ", ".join(f"{group.count} {group.model}" for group in has.groups) if has else ""
    slots = gpu_slots(worker)
    state = worker.state
    gone = state == "offline"
    free_memory = "-" if gone else format_size(worker.free_memory_bytes)
    return (
        worker.name,
        f"{state} for {format_duration(worker.heartbeat_age_s)}" if gone else state,
        f"{'-' if gone else worker.free_slots}/{worker.slots}",
        f"{free_memory}/{format_size(worker.memory_bytes)}",
        f"{slots['free']}/{slots['total']} ({gpus})" if gpus else "-",
        has.python if has else "-",
        str(len(worker.running)),
    )
