"""The workers as the queue knows them: a read-only view for whoever shows or explains them.

Read in three round trips, so that a page of many workers costs the queue little. What a worker has free is reckoned as
a claim reckons it: from what is held of its slots, from what all workers of its machine hold, and from what it last
told of its devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gpulayer_broker import capabilities
from gpulayer_broker.availability import Live
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.damage import LAST_MS, document, whole
from gpulayer_broker.earmarks import Earmark, earmark_in
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
_FIELDS = ("node", "class", "slots", "cpus", "memory", "heartbeat_ms", "state", "since_ms", "info")

# What a worker tells of itself, as far as others reckon with it.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "host": str,
    "pid": int,
    "started_s": (int, float),
    "disk_free_bytes": int,
    "gpu_share": int,
    "python": dict,
    "devices": list,
}


@dataclass(frozen=True)
class WorkerRecord:
    """One worker. `capabilities` is None where a newer release wrote them; `node_cpus` are those of its machine.

    `earmark` is what is kept there for a job that waits, `slots_beside` what that leaves free for others.
    """

    id: str
    node: str
    state: Literal["online", "draining", "offline"]
    heartbeat_age_s: float
    node_cpus: int
    slots: int
    free_slots: int
    memory_bytes: int
    free_memory_bytes: int
    running: tuple[str, ...]
    capabilities: Capabilities | None
    info: dict[str, Any]
    devices: tuple[WorkerDevice, ...] = ()
    earmark: Earmark | None = None
    slots_beside: int = 0

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
            disk_full=bool(self.info.get("disk_full", False)),
        )

    def live_beside(self, needs: Requirements) -> Live | None:
        """What is left of it for others than the job that its machine is kept for."""
        live, kept = self.live(needs), self.earmark
        if live is None or kept is None:
            return live
        devices = (replace(each, free=each.free and each.uuid not in kept.devices) for each in live.devices)
        return replace(
            live,
            free_cpus=self.slots_beside,
            free_memory_bytes=max(0, live.free_memory_bytes - kept.memory_bytes),
            devices=tuple(devices),
        )


def shown_frameworks(has: Capabilities, asked: Iterable[str] = ()) -> dict[str, str]:
    """The well-known frameworks that a worker has, and those that were asked for, with their versions."""
    return well_known(has.frameworks, asked)


def well_known(frameworks: Iterable[tuple[str, str]], asked: Iterable[str] = ()) -> dict[str, str]:
    """Those among all that is installed which people call frameworks, or asked for."""
    wanted = (*WELL_KNOWN, *PSEUDO_FRAMEWORKS, *asked)
    return {name: version for name, version in frameworks if any(provides(name, one) for one in wanted)}


def read_workers(queue: Queue) -> list[WorkerRecord]:
    """All workers, sorted by name."""
    pairs, classes, clock = _raised(
        queue.link.pipeline(
            [
                ("ZRANGE", queue.keys.named("workers"), 0, -1, "WITHSCORES"),
                ("HGETALL", queue.keys.named("classcaps")),
                ("TIME",),
            ]
        )
    )
    seen = {pairs[i].decode("utf-8", "replace"): float(pairs[i + 1]) for i in range(0, len(pairs), 2)}
    known = {classes[i].decode("utf-8", "replace"): classes[i + 1] for i in range(0, len(classes), 2)}
    now_ms = int(clock[0]) * 1000 + int(clock[1]) // 1000
    names = sorted(seen)
    commands: list[tuple[str, ...]] = []
    for worker in names:
        commands.append(("HMGET", queue.keys.worker(worker), *_FIELDS))
        commands.append(("SMEMBERS", queue.keys.running(worker)))
    replies = _raised(queue.link.pipeline(commands))
    facts = [_facts(values) for values in replies[0::2]]
    ledger = _ledger(queue, facts)
    records = [
        _as_far_as_readable(worker, now_ms - seen[worker], facts[i], replies[2 * i + 1], known, ledger)
        for i, worker in enumerate(names)
    ]
    return sorted(records, key=lambda record: (record.name, record.id))


@dataclass(frozen=True)
class _Lot:
    """What one attempt holds of its machine, and by which worker."""

    worker: str
    cpus: int
    memory_bytes: int


@dataclass(frozen=True)
class _Ledger:
    """What jobs hold of each machine, the holders of each device, and what each machine is kept for."""

    nodes: dict[str, Sequence[_Lot]]
    devices: dict[str, Sequence[bytes]]
    earmarks: dict[str, Earmark | None]


def _ledger(queue: Queue, facts: Sequence[dict[str, Any]]) -> _Ledger:
    nodes = sorted({str(each["node"]) for each in facts})
    uuids = sorted(
        {str(device.get("uuid")) for each in facts for device in each["info"].get("devices") or ()}
    )
    commands: list[tuple[str, ...]] = [("HVALS", queue.keys.held(node)) for node in nodes]
    commands += [("HVALS", queue.keys.device(uuid)) for uuid in uuids]
    replies = _raised(queue.link.pipeline(commands))
    told = replies[: len(nodes)]
    held = [tuple(filter(None, map(_lot, reply))) for reply in told]
    return _Ledger(
        dict(zip(nodes, held, strict=True)),
        dict(zip(uuids, replies[len(nodes) :], strict=True)),
        dict(zip(nodes, map(earmark_in, told), strict=True)),
    )


def _lot(entry: bytes) -> _Lot | None:
    """From a value of a machine's ledger: `<worker> <CPUs> <MiB>`; None where it is none."""
    worker, _, rest = entry.decode("utf-8", "replace").partition(" ")
    cpus, _, memory_mib = rest.partition(" ")
    numbers = whole(cpus), whole(memory_mib)
    if numbers[0] is None or numbers[1] is None:
        return None
    return _Lot(worker, numbers[0], numbers[1] * MIB)


def _facts(values: Sequence[bytes | None]) -> dict[str, Any]:
    texts = {
        name: (value or b"").decode("utf-8", "replace") for name, value in zip(_FIELDS, values, strict=True)
    }
    told = document(texts["info"])
    info: dict[str, Any] = {}
    for name, value in told.items():
        if isinstance(value, _KINDS.get(name, object)):
            info[name] = value
    if not all(map(_is_device, info.get("devices", ()))):
        del info["devices"]
    if not 0 <= info.get("started_s", 0) <= LAST_MS / 1000:
        del info["started_s"]
    return {**texts, "info": info}


def _is_device(told: object) -> bool:
    return (
        isinstance(told, dict)
        and all(isinstance(told.get(name), str) for name in ("kind", "name", "uuid"))
        and _is_process(told.get("foreign"))
    )


def _is_process(told: object) -> bool:
    """Whether it is what stands for somebody's process on a device, or for none."""
    if not told:
        return True
    return isinstance(told, list) and [type(each) for each in told] == [int, str, int]


def _as_far_as_readable(worker: str, age_ms: float, facts: dict[str, Any], *rest: Any) -> WorkerRecord:
    """A worker of which not all can be read is listed all the same, and does not hide the others."""
    try:
        return _record(worker, age_ms, facts, *rest)
    except (ValueError, TypeError, LookupError, AttributeError):
        return _record(worker, age_ms, {**facts, "info": {}}, *rest)


def _record(
    worker: str,
    age_ms: float,
    facts: dict[str, Any],
    running: Iterable[bytes],
    classes: dict[str, bytes],
    ledger: _Ledger,
) -> WorkerRecord:
    lots = ledger.nodes[facts["node"]]
    slots, memory_bytes = whole(facts["slots"]) or 0, (whole(facts["memory"]) or 0) * MIB
    own_cpus = slots - sum(lot.cpus for lot in lots if lot.worker == worker)
    node_cpus = whole(facts["cpus"]) or 0
    left_cpus = node_cpus - sum(lot.cpus for lot in lots)
    kept = ledger.earmarks[facts["node"]]
    late = age_ms > MISSED_HEARTBEATS * (whole(facts["heartbeat_ms"]) or 10_000)
    return WorkerRecord(
        id=worker,
        node=facts["node"],
        state=_state(facts["state"], late),
        heartbeat_age_s=max(0.0, age_ms / 1000),
        node_cpus=node_cpus,
        slots=slots,
        free_slots=max(0, min(own_cpus, left_cpus)),
        memory_bytes=memory_bytes,
        free_memory_bytes=max(0, memory_bytes - sum(lot.memory_bytes for lot in lots)),
        running=tuple(job.decode("utf-8", "replace") for job in sorted(running)),
        capabilities=_decoded(classes.get(facts["class"], b"")),
        info=facts["info"],
        devices=devices_of(facts["info"], ledger.devices),
        earmark=kept,
        slots_beside=_beside(kept, worker, own_cpus, left_cpus),
    )


def _beside(kept: Earmark | None, worker: str, own_cpus: int, left_cpus: int) -> int:
    """As a claim reckons it: slots are kept of the worker that the earmark is at, CPUs of all that machine's."""
    if kept is None:
        return max(0, min(own_cpus, left_cpus))
    own_kept = kept.cpus if kept.worker == worker else 0
    return max(0, min(own_cpus - own_kept, left_cpus - kept.cpus))


def _state(told: str, late: bool) -> Literal["online", "draining", "offline"]:
    if late or told == "offline":
        return "offline"
    return "draining" if told == "draining" else "online"


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
