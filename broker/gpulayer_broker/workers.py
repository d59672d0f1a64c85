"""The workers as the queue knows them: a read-only view for whoever shows or explains them.

Read in three round trips, so that a page of many workers costs the queue little. What a worker has free is reckoned
from the jobs that it holds, and from what it last told of its devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpulayer_broker import capabilities
from gpulayer_broker.availability import Live
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.names import PSEUDO_FRAMEWORKS, provides
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.units import MIB
from gpulayer_broker.worker_devices import WorkerDevice, devices_of

# So many heartbeats missed, and a worker counts as offline.
MISSED_HEARTBEATS = 3
# Of all that is installed in a worker's Python, what is shown; anything can be asked for.
WELL_KNOWN = ("cupy", "jax", "mlx", "numpy", "onnxruntime", "paddlepaddle", "tensorflow", "torch")
_FIELDS = ("node", "class", "slots", "memory", "heartbeat_ms", "state", "since_ms", "info")


@dataclass(frozen=True)
class WorkerRecord:
    """One worker. `capabilities` is None where a newer release wrote them."""

    id: str
    node: str
    state: Literal["online", "draining", "offline"]
    heartbeat_age_s: float
    slots: int
    free_slots: int
    memory_bytes: int
    free_memory_bytes: int
    running: tuple[str, ...]
    capabilities: Capabilities | None
    info: dict[str, Any]
    devices: tuple[WorkerDevice, ...] = ()

    @property
    def name(self) -> str:
        """What people call it."""
        return str(self.info.get("name") or self.id)

    def live(self, needs: Requirements) -> Live | None:
        """What it has left now; None for a GPU job where it tells nothing of its devices."""
        caps = self.capabilities
        if caps is None or (self.state == "online" and needs.gpus and "devices" not in self.info):
            return None
        devices = (device.live(caps) for device in self.devices)
        return Live(
            free_cpus=self.free_slots,
            free_memory_bytes=self.free_memory_bytes,
            free_disk_bytes=int(self.info.get("disk_free_bytes", caps.disk_bytes)),
            devices=tuple(device for device in devices if device is not None),
            state=self.state,
            offline_s=self.heartbeat_age_s,
            driver_answers=bool(self.info.get("driver_answers", True)),
        )


def shown_frameworks(has: Capabilities, asked: Iterable[str] = ()) -> dict[str, str]:
    """The well-known frameworks that a worker has, and those that were asked for, with their versions."""
    return well_known(has.frameworks, asked)


def well_known(frameworks: Iterable[tuple[str, str]], asked: Iterable[str] = ()) -> dict[str, str]:
    """Those among all that is installed which people call frameworks, or asked for."""
    wanted = (*WELL_KNOWN, *PSEUDO_FRAMEWORKS, *asked)
    return {name: version for name, version in frameworks if any(provides(name, one) for one in wanted)}


def read_workers(queue: Queue) -> list[WorkerRecord]:
    """All workers, sorted by id."""
    pairs, classes, clock = _raised(
        queue.link.pipeline(
            [
                ("ZRANGE", queue.keys.named("workers"), 0, -1, "WITHSCORES"),
                ("HGETALL", queue.keys.named("classcaps")),
                ("TIME",),
            ]
        )
    )
    seen = {pairs[i].decode(): float(pairs[i + 1]) for i in range(0, len(pairs), 2)}
    known = {classes[i].decode(): classes[i + 1] for i in range(0, len(classes), 2)}
    now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000
    names = sorted(seen)
    commands: list[tuple[str, ...]] = []
    for worker in names:
        commands.append(("HMGET", queue.keys.worker(worker), *_FIELDS))
        commands.append(("SMEMBERS", queue.keys.running(worker)))
    replies = _raised(queue.link.pipeline(commands))
    facts = [_facts(values) for values in replies[0::2]]
    ledger = _ledger(queue, [job for running in replies[1::2] for job in running], [f["info"] for f in facts])
    return [
        _record(worker, now_ms - seen[worker], facts[i], replies[2 * i + 1], known, ledger)
        for i, worker in enumerate(names)
    ]


@dataclass(frozen=True)
class _Ledger:
    """What jobs hold: the signature of each running job, and the holders of each device."""

    signatures: dict[bytes, bytes]
    devices: dict[str, Sequence[bytes]]


def _ledger(queue: Queue, job_ids: Sequence[bytes], infos: Iterable[dict[str, Any]]) -> _Ledger:
    uuids = sorted({str(facts.get("uuid")) for info in infos for facts in info.get("devices") or ()})
    commands: list[tuple[str, ...]] = [("HGET", queue.keys.job(job.decode()), "sig") for job in job_ids]
    commands += [("HVALS", queue.keys.device(uuid)) for uuid in uuids]
    replies = _raised(queue.link.pipeline(commands))
    signatures = dict(zip(job_ids, (reply or b"" for reply in replies), strict=False))
    return _Ledger(signatures, dict(zip(uuids, replies[len(job_ids) :], strict=True)))


def _facts(values: Sequence[bytes | None]) -> dict[str, Any]:
    texts = {name: (value or b"").decode() for name, value in zip(_FIELDS, values, strict=True)}
    return {**texts, "info": json.loads(texts["info"] or "{}")}


def _record(
    worker: str,
    age_ms: float,
    facts: dict[str, Any],
    running: Iterable[bytes],
    classes: dict[str, bytes],
    ledger: _Ledger,
) -> WorkerRecord:
    jobs = sorted(running)
    amounts = [amounts_of(ledger.signatures.get(job, b"").decode()) for job in jobs]
    slots, memory_bytes = int(facts["slots"] or 0), int(facts["memory"] or 0) * MIB
    late = age_ms > MISSED_HEARTBEATS * int(facts["heartbeat_ms"] or 10_000)
    return WorkerRecord(
        id=worker,
        node=facts["node"],
        state=_state(facts["state"], late),
        heartbeat_age_s=max(0.0, age_ms / 1000),
        slots=slots,
        free_slots=max(0, slots - sum(cpus for cpus, _ in amounts)),
        memory_bytes=memory_bytes,
        free_memory_bytes=max(0, memory_bytes - sum(memory for _, memory in amounts)),
        running=tuple(job.decode() for job in jobs),
        capabilities=_decoded(classes.get(facts["class"], b"")),
        info=facts["info"],
        devices=devices_of(facts["info"], ledger.devices),
    )


def _state(told: str, late: bool) -> Literal["online", "draining", "offline"]:
    if late or told == "offline":
        return "offline"
    return "draining" if told == "draining" else "online"


def amounts_of(signature: str) -> tuple[int, int]:
    """(CPUs, bytes of memory) that a signature takes; nothing for what is no signature."""
    parts = signature.split(".")
    if len(parts) < 5 or not (parts[2].isdigit() and parts[3].isdigit()):
        return 0, 0
    return int(parts[2]), int(parts[3]) * MIB


def _decoded(record: bytes) -> Capabilities | None:
    try:
        return capabilities.decode(record)
    except GpulayerError:
        return None


def _raised(replies: Sequence[Any]) -> Sequence[Any]:
    for reply in replies:
        if isinstance(reply, GpulayerError):
            raise reply
    return replies
