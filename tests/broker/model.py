"""A plain Python model of the queue: what each function must do, without indexes, streams or Lua.

One `Model` stands beside the real server. It predicts states, grants, ledgers, events and notices; it is written from
the protocol, not from the Lua, and keeps no index that it could get wrong. Gates, barriers and arrays are in
`model_gates.py` and `model_arrays.py`, on top of this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha1

from gpulayer_broker.functions import DeviceLot, Offer, Submission
from gpulayer_broker.job import CANCELLED, FAILED, FINAL, MESSAGE, QUEUED, RUNNING, SCHEDULED, SUCCEEDED
from tests.checker import MAX_LOSSES, amounts
from tests.queueing import GRACE_MS, HEARTBEAT_MS, LEASE_MS, Machine

QUARANTINE_MS = 600_000
DEATHS = 3
MESSAGE_KEEP_MS, MESSAGE_KEEP_DEAD_MS = 600_000, 7 * 86_400_000


@dataclass
class Job:
    """One job; `entry` is its age among those that can run now, None while it cannot."""

    s: Submission
    seq: int
    state: str = QUEUED
    phase: str = "ready"
    entry: int | None = None
    due_ms: int | None = None
    attempt: int = 0
    losses: int = 0
    token: str = ""
    ended_token: str = ""
    worker: str = ""
    node: str = ""
    lots: tuple[tuple[str, int], ...] = ()
    lease_ms: int = 0
    granted_ms: int = 0
    queued_ms: int = 0
    ended_ms: int = 0
    cancel: bool = False
    reported: bool = False
    ride: str = ""
    watchers: set[str] = field(default_factory=set)

    @property
    def runs(self) -> bool:
        """Whether a worker holds it: an array is held by nobody, its ranges are."""
        return self.state in (SCHEDULED, RUNNING) and not self.s.count

    @property
    def waits(self) -> bool:
        return self.entry is not None and not self.runs


@dataclass
class Worker:
    """A worker as it last registered, and what the queue remembers of it."""

    machine: Machine
    incarnation: str
    state: str = "online"
    nonce: str = ""
    grants: list[tuple[str, str]] = field(default_factory=list)
    quarantined_until_ms: int = 0
    deaths: int = 0
    killed: tuple[str, ...] = ()
    seen_ms: int = 0


Grants = list[tuple[str, str, tuple[tuple[str, int], ...]]]


class Model:
    """The queue. Every method is one function call at `now_ms`."""

    def __init__(self, fits: dict[str, dict[str, tuple[int, ...]]]) -> None:
        self.fits = {c: dict(sigs) for c, sigs in fits.items()}
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, Worker] = {}
        self.purged: list[str] = []
        self.idem: dict[tuple[str, str], tuple[str, str]] = {}
        self.seq = 0
        self.now_ms = 0
        self.last_tick_ms: int | None = None
        self.floor_ms = 0
        self.events: list[tuple[str, str]] = []
        self.told: list[tuple[str, str, str]] = []

    # Reading --------------------------------------------------------------------------------------------------------

    def attempts(self) -> dict[str, Job]:
        """Everything that a worker can hold."""
        return self.jobs

    def running(self, worker: str | None = None) -> list[Job]:
        return [j for j in self.attempts().values() if j.runs and worker in (None, j.worker)]

    def holding(self, worker: str | None = None) -> list[Job]:
        """One of those that share a slot, for each slot."""
        return list({j.ride or j.token: j for j in self.running(worker)}.values())

    def holds(self, job_id: str, token: str) -> bool:
        j = self.attempts().get(job_id)
        return j is not None and j.runs and j.token == token

    # Functions ------------------------------------------------------------------------------------------------------

    def submit(self, s: Submission) -> tuple[str, str]:
        s = self._place_of(s)
        if s.id in self.jobs:
            return "existing", s.id
        if (s.owner, s.idempotency_key) in self.idem:
            job_id, digest = self.idem[s.owner, s.idempotency_key]
            return ("existing" if digest == s.digest else "conflict"), job_id
        if s.idempotency_key:
            self.idem[s.owner, s.idempotency_key] = (s.id, s.digest)
        self.seq += 1
        j = self.jobs[s.id] = Job(s, self.seq)
        self._event(j)
        self._begin(j)
        return "added", s.id

    def _place_of(self, s: Submission) -> Submission:
        """The same message enqueued again takes the place of one that has ended, or a name of its own beside it."""
        known = self.jobs.get(s.id)
        if known is None or s.kind != MESSAGE or known.s.spec == s.spec:
            return s
        if known.state in FINAL:
            self._purge(known)
            return s
        return replace(s, id=f"{s.id}~{sha1(s.spec).hexdigest()[:16]}")

    def requeue(self, s: Submission) -> str:
        dead = self.jobs.get(s.id)
        if dead is None or dead.state != FAILED:
            return "missing"
        self._purge(dead)
        return self.submit(s)[0]

    def purge(self, until_ms: int) -> int:
        """How many jobs have left that had ended by then."""
        old = [j for j in self.jobs.values() if j.state in FINAL and j.ended_ms <= until_ms]
        for j in old:
            self._purge(j)
        return len(old)

    def register(self, machine: Machine) -> None:
        old = self.workers.get(machine.id)
        worker = self.workers[machine.id] = Worker(machine, machine.incarnation)
        if old:
            worker.deaths, worker.quarantined_until_ms = old.deaths, old.quarantined_until_ms
            worker.killed = old.killed
            worker.seen_ms = old.seen_ms
            if old.incarnation == machine.incarnation:
                worker.nonce, worker.grants = old.nonce, old.grants
                worker.state = "draining" if old.state == "draining" else "online"
            else:
                self._died(machine.id, self.running(machine.id))
        worker.seen_ms = self.now_ms

    def claim(self, o: Offer) -> Grants | None:
        """The grants, None for a worker that must register."""
        w = self.workers[o.worker]
        if w.incarnation != o.incarnation:
            return None
        w.seen_ms = self.now_ms
        if w.nonce != o.nonce:
            w.nonce, w.grants = o.nonce, []
            if w.state == "online" and w.quarantined_until_ms <= self.now_ms:
                self._take(w, o)
        return [(job, t, self.attempts()[job].lots) for job, t in w.grants if self.holds(job, t)]

    def commit(
        self, job_id: str, token: str, verdict: str, delay_ms: int, outbox: Iterable[Submission]
    ) -> str:
        j = self.attempts().get(job_id)
        if j is None or not self.holds(job_id, token):
            return self._refused(j, token)
        self._forgive(j.worker)
        j.reported = True
        answer = "ok"
        if j.cancel and verdict != SUCCEEDED:
            self._finish(j, CANCELLED)
            answer = "cancelled"
        elif verdict == "retry":
            self._later(j, delay_ms)
        else:
            self._finish(j, verdict)
        for s in outbox:
            self.submit(s)
        return answer

    def release(self, job_id: str, token: str, how: str) -> str:
        j = self.attempts().get(job_id)
        if j is None or not self.holds(job_id, token):
            return self._refused(j, token)
        j.reported = True
        if how == "unfit":
            self.fits[self.workers[j.worker].machine.class_id].pop(j.s.signature, None)
        if how == "lost":
            self._lost(j)
        else:
            self._again(j, "ready")
        return "ok"

    def renew(self, worker: str, listed: dict[str, tuple[str, bool]]) -> tuple[list[str], list[str]]:
        """(stale, cancelled) of what is listed: job → (token, started)."""
        stale, cancelled, kept = [], [], set()
        for job, (token, started) in listed.items():
            if not self.holds(job, token):
                stale.append(job)
                continue
            j = self.attempts()[job]
            kept.add(job)
            j.lease_ms = self.now_ms + LEASE_MS + GRACE_MS
            if started:
                self._started(j)
            if j.cancel:
                cancelled.append(job)
        for j in sorted(self.running(worker), key=lambda j: j.s.id):
            if j.s.id not in kept and j.granted_ms < self.now_ms - HEARTBEAT_MS:
                self._again(j, "retrying")
        self.workers[worker].seen_ms = self.now_ms
        return stale, cancelled

    def log(self, job_id: str, token: str) -> str:
        if not self.holds(job_id, token):
            return "stale"
        self._started(self.attempts()[job_id])
        return "ok"

    def cancel(self, job_id: str) -> str:
        j = self.jobs[job_id]
        if j.state in FINAL:
            return "too_late"
        if j.runs:
            j.cancel = True
            return "asked"
        self._finish(j, CANCELLED)
        return "cancelled"

    def watch(self, client: str, job_id: str) -> dict[str, str]:
        j = self.jobs[job_id]
        if j.state in FINAL:
            return {job_id: j.state}
        j.watchers.add(client)
        return {}

    def drain(self, worker: str, state: str) -> None:
        self.workers[worker].state = state

    def tick(self) -> tuple[int, int]:
        """How many jobs were promoted and how many leases reaped."""
        due = [j for j in self.jobs.values() if j.due_ms is not None and j.due_ms <= self.now_ms]
        for j in sorted(due, key=lambda j: (j.due_ms or 0, j.s.id)):
            j.due_ms = None
            self._enter(j)
            self._event(j)
        reaped = 0 if self._outage() else self._reap()
        for j in [j for j in self.jobs.values() if self._is_past(j)]:
            self._purge(j)
        return len(due), reaped

    # Parts ----------------------------------------------------------------------------------------------------------

    def _is_past(self, j: Job) -> bool:
        """Whether it is a message whose record's own time is over."""
        keep_ms = MESSAGE_KEEP_DEAD_MS if j.state == FAILED else MESSAGE_KEEP_MS
        return j.s.kind == MESSAGE and j.state in FINAL and j.ended_ms + keep_ms <= self.now_ms

    def _purge(self, j: Job) -> None:
        del self.jobs[j.s.id]
        self.purged.append(j.s.id)
        self.idem = {key: known for key, known in self.idem.items() if known[0] != j.s.id}

    def _refused(self, j: Job | None, token: str) -> str:
        return "already" if j is not None and token and j.ended_token == token else "stale"

    def _event(self, j: Job) -> None:
        self.events.append((j.s.id, j.state))

    def _begin(self, j: Job) -> None:
        if j.s.delay_ms > 0:
            j.phase, j.due_ms = "delayed", self.now_ms + j.s.delay_ms
        elif j.s.after or j.s.permit or j.s.rate:
            self._enter(j)
        else:
            j.entry, j.phase, j.queued_ms = j.seq, "ready", self.now_ms

    def _enter(self, j: Job) -> None:
        """Through what stands between a job and its place in line: nothing, without gates."""
        self._ready(j)

    def _ready(self, j: Job) -> None:
        self.seq += 1
        j.entry, j.phase, j.queued_ms = self.seq, "ready", self.now_ms

    def _take(self, w: Worker, o: Offer) -> None:
        for _ in range(o.max):
            found = self._next(w, o)
            if found is None:
                return
            j, lots = found
            self._give(j, w, o, lots)

    def _give(self, j: Job, w: Worker, o: Offer, lots: tuple[tuple[str, int], ...]) -> None:
        j.attempt += 1
        self._grant(j, w, lots, f"{j.attempt}:{o.nonce}{len(w.grants)}")

    def _grant(self, j: Job, w: Worker, lots: tuple[tuple[str, int], ...], token: str) -> None:
        j.state, j.phase = (SCHEDULED if j.s.prepare else RUNNING), ""
        self._hold(j, w, lots, token)
        self._event(j)

    def _hold(self, j: Job, w: Worker, lots: tuple[tuple[str, int], ...], token: str) -> None:
        j.token, j.worker, j.node, j.lots = token, w.machine.id, w.machine.node, lots
        j.granted_ms, j.lease_ms = self.now_ms, self.now_ms + LEASE_MS + GRACE_MS
        w.grants.append((j.s.id, j.token))

    def _next(self, w: Worker, o: Offer) -> tuple[Job, tuple[tuple[str, int], ...]] | None:
        """Importance first, then the owner who holds least, then age, of what fits now."""
        fitting = [
            (j, lots) for j in self.jobs.values() if j.waits and (lots := self._fit(j, w, o)) is not None
        ]
        return self._best(fitting)

    def _best(
        self, fitting: list[tuple[Job, tuple[tuple[str, int], ...]]]
    ) -> tuple[Job, tuple[tuple[str, int], ...]] | None:
        held = {j.s.owner: sum(r.s.owner == j.s.owner for r in self.holding()) for j, _ in fitting}
        return min(fitting, key=lambda f: (f[0].s.priority, held[f[0].s.owner], f[0].entry), default=None)

    def _fit(
        self,
        j: Job,
        w: Worker,
        o: Offer,
        kept: tuple[int, ...] = (0, 0),
        kept_at: str = "",
        kept_devices: tuple[str, ...] = (),
    ) -> tuple[tuple[str, int], ...] | None:
        """The shares that it would have; of the machine these CPUs, this memory and these devices are not to be had."""
        groups = self.fits[w.machine.class_id].get(j.s.signature)
        letter, gpus, vram, cpus, memory = amounts(j.s.signature)
        on_node = [amounts(r.s.signature) for r in self.holding() if r.node == w.machine.node]
        mine = sum(amounts(r.s.signature)[3] for r in self.holding(w.machine.id))
        own_cpus = w.machine.slots - mine - (kept[0] if kept_at == w.machine.id else 0)
        free_cpus = max(0, min(own_cpus, w.machine.node_cpus - sum(a[3] for a in on_node) - kept[0]))
        free_memory = max(0, w.machine.memory_mib - sum(a[4] for a in on_node) - kept[1])
        if groups is None or cpus > free_cpus or memory > free_memory:
            return None
        offered = tuple(lot for lot in o.lots if lot.uuid not in kept_devices)
        lots = self._devices(offered, gpus, vram, groups)
        return () if letter == "a" and len(lots) < gpus else lots if len(lots) == gpus else None

    def _devices(
        self, offered: tuple[DeviceLot, ...], gpus: int, vram: int, groups: tuple[int, ...]
    ) -> tuple[tuple[str, int], ...]:
        """The first shares, of distinct devices, that nobody holds and that have the memory left."""
        taken: dict[str, int] = {}
        busy: set[tuple[str, int]] = set()
        for r in self.running():
            for uuid, share in r.lots:
                busy.add((uuid, share))
                taken[uuid] = taken.get(uuid, 0) + amounts(r.s.signature)[2]
        chosen: dict[str, int] = {}
        for lot in offered:
            free_mib = lot.free_mib - taken.get(lot.uuid, 0)
            usable = (lot.uuid, lot.share) not in busy and lot.group in groups and free_mib >= vram
            if usable and lot.uuid not in chosen and len(chosen) < gpus:
                chosen[lot.uuid] = lot.share
        return tuple(chosen.items())

    def _started(self, j: Job) -> None:
        if j.state == SCHEDULED:
            j.state = RUNNING
            self._event(j)

    def _detach(self, j: Job) -> None:
        j.ended_token, j.token = (j.token if j.reported else ""), ""
        j.reported, j.ride = False, ""

    def _finish(self, j: Job, state: str) -> None:
        if j.runs:
            self._detach(j)
        j.state, j.phase, j.due_ms, j.entry, j.ended_ms = state, "", None, None, self.now_ms
        self._event(j)
        for client in sorted(j.watchers | ({j.s.client} - {""})):
            self.told.append((client, j.s.id, state))
        j.watchers.clear()

    def _later(self, j: Job, delay_ms: int) -> None:
        self._detach(j)
        j.state, j.phase, j.entry, j.due_ms = QUEUED, "retrying", None, self.now_ms + delay_ms
        self._event(j)

    def _again(self, j: Job, phase: str) -> None:
        if j.cancel:
            self._finish(j, CANCELLED)
            return
        self._detach(j)
        j.state, j.phase, j.queued_ms = QUEUED, phase, self.now_ms
        self._event(j)

    def _lost(self, j: Job) -> None:
        if not j.cancel:
            j.losses += 1
        if not j.cancel and j.losses >= MAX_LOSSES:
            self._finish(j, FAILED)
        else:
            self._again(j, "retrying")

    def _died(self, worker: str, lost: list[Job]) -> None:
        for j in sorted(lost, key=lambda j: j.s.id):
            self._lost(j)
        self._count_death(worker, lost)

    def _count_death(self, worker: str, lost: list[Job]) -> None:
        w = self.workers[worker]
        ids = {j.s.id for j in lost}
        if not ids or ids & set(w.killed):
            return
        # Which of several jobs it is counted on is the queue's to say; `adopt_deaths` learns it.
        w.deaths += 1
        w.killed += (min(ids),) if len(ids) == 1 else ("?",)
        others = (other for name, other in self.workers.items() if name != worker)
        if w.deaths >= DEATHS and any(
            o.seen_ms >= self.now_ms - 60_000 and o.quarantined_until_ms <= self.now_ms for o in others
        ):
            w.quarantined_until_ms = self.now_ms + QUARANTINE_MS
            self._forgive(worker)

    def _forgive(self, worker: str) -> None:
        self.workers[worker].deaths, self.workers[worker].killed = 0, ()

    def adopt_deaths(self, worker: str, killed: set[str]) -> None:
        """What the queue counts a worker's deaths on, checked for its number."""
        w = self.workers[worker]
        assert len(killed) == w.deaths, (worker, killed, w.deaths)
        w.killed = tuple(killed)

    def _outage(self) -> bool:
        last = self.now_ms if self.last_tick_ms is None else self.last_tick_ms
        self.last_tick_ms = self.now_ms
        if self.now_ms - last > LEASE_MS / 2 or self.now_ms < last:
            self.floor_ms = self.now_ms + LEASE_MS
        return self.now_ms < self.floor_ms

    def _reap(self) -> int:
        due = [j for j in self.running() if j.lease_ms <= self.now_ms]
        kept = [j for j in due if j.s.on_outage == "keep" and not j.cancel]
        for j in kept:
            j.lease_ms = self.now_ms + LEASE_MS
        lost = sorted((j for j in due if j not in kept), key=lambda j: (j.lease_ms, j.s.id))
        by_worker = {j.worker: [other for other in lost if other.worker == j.worker] for j in lost}
        for j in lost:
            self._lost(j)
        for worker, dead in by_worker.items():
            self._count_death(worker, dead)
        return len(lost)
