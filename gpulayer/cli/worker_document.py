"""A worker as scripts see it: the one document of `workers --json` and `worker status --json`.

Every key is always there; what is not known is null.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpulayer_broker.worker_devices import WorkerDevice
    from gpulayer_broker.workers import WorkerRecord

DEVICE_KEYS = (
    "index",
    "kind",
    "name",
    "uuid",
    "pci",
    "memory_bytes",
    "memory_free_bytes",
    "unified",
    "mig",
    "usable",
    "reason",
)


def worker_document(worker: WorkerRecord) -> dict[str, Any]:
    """Everything that status shows of a worker."""
    from gpulayer_broker.workers import shown_frameworks

    has, info = worker.capabilities, worker.info
    python = info.get("python") or {}
    return {
        "schema": 1,
        "id": worker.id,
        "name": worker.name,
        "version": info.get("version"),
        "state": worker.state,
        "target": info.get("target"),
        "started_at": _utc(info.get("started_s")),
        "heartbeat_age_s": round(worker.heartbeat_age_s, 1),
        "python": {
            "executable": python.get("executable"),
            "version": python.get("version") or (has.python if has else None),
        },
        "os": has.os if has else None,
        "arch": has.arch if has else None,
        "cpus": worker.node_cpus,
        "memory_bytes": worker.memory_bytes,
        "disk_free_bytes": info.get("disk_free_bytes"),
        "labels": dict(has.labels) if has else {},
        "launchers": list(has.launchers) if has else [],
        "slots": {
            "cpu": {"total": worker.slots, "free": 0 if worker.state == "offline" else worker.free_slots},
            "gpu": gpu_slots(worker),
        },
        "devices": [_device(device) for device in worker.devices],
        "frameworks": dict(sorted(shown_frameworks(has).items())) if has else {},
        "jobs": list(worker.running),
    }


def gpu_slots(worker: WorkerRecord) -> dict[str, int]:
    """How many GPU jobs the worker could run, and how many more now."""
    usable = [device for device in worker.devices if device.usable]
    free = sum(device.free_shares for device in usable) if worker.state == "online" else 0
    answers = worker.info.get("driver_answers", True)
    return {"total": sum(device.shares for device in usable), "free": free if answers else 0}


def device_document(facts: dict[str, Any]) -> dict[str, Any]:
    """A device's facts with the words for what was validated on such hardware."""
    from gpulayer.support import validation

    return {**{key: facts.get(key) for key in DEVICE_KEYS}, **validation(str(facts.get("kind")))}


def _device(device: WorkerDevice) -> dict[str, Any]:
    job = device.holders[0].job if device.holders else None
    return {**device_document(dict(device.facts)), "job": job}


def _utc(time_s: float | None) -> str | None:
    if time_s is None:
        return None
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
