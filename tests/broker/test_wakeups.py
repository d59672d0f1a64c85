"""No wake-up is lost: once every worker that was rung has claimed, no idle worker fits a job that waits.

Random histories with several classes, device needs, workers that share a node, drains, releases, losses and retries.
The workers follow the one rule of claiming: whoever got as many jobs as it asked for asks again when it has a thread.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import DeviceLot, Ending
from tests import snapshot
from tests.checker import amounts, running, violations
from tests.queueing import HEARTBEAT_MS, LEASE_MS, NO_RETENTION, Hand, Machine, signature
from tests.snapshot import Snapshot
from tests.virtual import Clock, virtual_library

HISTORIES, STEPS, SETTLED_ONE_IN = 100, 40, 6
SIGNATURES = (
    signature(),
    signature(cpus=2, tag="two"),
    signature(cpus=3, memory=3000, tag="three"),
    signature(gpus=1, vram=3000, tag="gpu"),
    signature(gpus=2, vram=1000, tag="pair"),
    signature(gpus=1, letter="a", tag="any"),
)
CLASSES = ("k1", "k2", "k3")


class History:
    """Workers that claim when they were rung, jobs that come and go, and the check at rest."""

    def __init__(self, link: Link, clock: Clock, seed: int) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.hand = Hand(link, f"gpulayer:{{h{secrets.token_hex(6)}}}:")
        self.machines = {m.id: m for m in self._machines()}
        self.read = dict.fromkeys(self.machines, "0-0")
        self.fits: dict[str, dict[str, tuple[int, ...]]] = {
            c: {s: (0,) for s in SIGNATURES if self.random.random() < 0.6} for c in CLASSES
        }
        for sig in SIGNATURES:
            self.hand.introduce(sig, {})
        for machine in self.machines.values():
            self.hand.register(machine, self.fits[machine.class_id])
            self.claim(machine.id)
        self.submitted = 0

    def _machines(self) -> Iterator[Machine]:
        """Six workers on four nodes: two nodes are shared, and each worker of a node offers all its devices."""
        for n in range(6):
            node = f"n{n % 4}"
            lots = tuple(DeviceLot(f"G{node}{k}", 0, 0, 8000) for k in range(2 if n % 4 < 2 else 0))
            slots, threads = self.random.choice([1, 2, 4]), self.random.choice([1, 3, 8])
            class_id = self.random.choice(CLASSES)
            yield Machine(f"w{n}", "i0", class_id, node, slots, 4, 6000, threads, lots)

    # Steps ----------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        moves = (self.submit, self.submit, self.submit, self.answer, self.answer, self.commit, self.commit)
        rare = (self.release, self.drain, self.crash, self.cancel, self.beat, self.expire)
        self.random.choice(rare if self.random.random() < 0.25 else moves)()

    def submit(self) -> None:
        self.submitted += 1
        self.hand.submit(
            self.random.choice(SIGNATURES),
            owner=self.random.choice(["ann", "bob"]),
            priority=self.random.choice([1, 2]),
            delay_ms=self.random.choice([0, 0, 0, 10]),
        )

    def claim(self, worker: str) -> None:
        """Claims while it gets all that it asked for and has threads left."""
        machine = self.machines[worker]
        newest = self.hand.link.call("XREVRANGE", self.hand.key(f"inbox:{worker}"), "+", "-", "COUNT", 1)
        self.read[worker] = newest[0][0].decode() if newest else self.read[worker]
        while (free := machine.threads - len(machine.held)) > 0:
            most = self.random.randint(1, free)
            answer = self.hand.run(fn.claim(machine.offer(most)))
            machine.held.update({g.id: g for g in answer.grants})
            if len(answer.grants) < most:
                return

    def answer(self) -> None:
        if rung := sorted(self._rung()):
            self.claim(self.random.choice(rung))

    def commit(self) -> None:
        if found := self._held():
            machine, grant = found
            free = machine.threads - len(machine.held) + 1
            next_claim = machine.offer(free) if self.random.random() < 0.6 else None
            verdict = self.random.choice(["succeeded", "failed", "retry"])
            ending = Ending(grant, machine.held.pop(grant).token, verdict)
            grants = self.hand.run(fn.commit(ending, next_claim)).claimed.grants
            machine.held.update({g.id: g for g in grants})
            if next_claim and len(grants) == next_claim.max:
                self.claim(machine.id)

    def release(self) -> None:
        if found := self._held():
            machine, grant = found
            token = machine.held.pop(grant).token
            self.hand.run(fn.release(grant, token, self.random.choice(["returned", "lost", "unfit"])))

    def drain(self) -> None:
        state = self.random.choice(["draining", "online", "online"])
        self.hand.run(fn.drain(self.random.choice(list(self.machines)), state))

    def crash(self) -> None:
        """The worker dies, comes back as its next incarnation and claims once, unasked."""
        machine = self.random.choice(list(self.machines.values()))
        machine.incarnation, machine.held = f"i{int(machine.incarnation[1:]) + 1}", {}
        self.hand.register(machine)
        self.claim(machine.id)

    def cancel(self) -> None:
        if jobs := sorted(self._snapshot().jobs):
            self.hand.run(fn.cancel(self.random.choice(jobs)))

    def beat(self) -> None:
        """A heartbeat that forgot some of its attempts: they go back."""
        machine = self.random.choice(list(self.machines.values()))
        self.clock.advance(HEARTBEAT_MS + 1)
        machine.held = {job: grant for job, grant in machine.held.items() if self.random.random() < 0.5}
        stale = self.hand.renew(machine).stale
        machine.held = {job: grant for job, grant in machine.held.items() if job not in stale}
        self._others_beat()

    def expire(self) -> None:
        """A lease runs out; the worker that had it is alive and finds out at its next heartbeat."""
        if found := self._held():
            machine, grant = found
            self.hand.expire(grant)
            self.tick()
            machine.held.pop(grant)

    def _others_beat(self) -> None:
        for machine in self.machines.values():
            self.hand.renew(machine)

    # At rest --------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        self.hand.run(fn.tick(LEASE_MS, NO_RETENTION, NO_RETENTION))

    def settle(self) -> None:
        """What is due is promoted, and every rung worker claims until none is rung."""
        self.clock.advance(20)
        self.tick()
        for _ in range(200):
            rung = sorted(self._rung())
            if not rung:
                return
            self.claim(self.random.choice(rung))
        raise AssertionError("workers ring each other for ever")

    def stuck(self) -> list[str]:
        """A waiting job and a worker that could take it and has not been told."""
        s = self._snapshot()
        assert violations(s) == []
        waiting = {
            j["sig"]
            for j in s.jobs.values()
            if j["state"] == "queued" and j["phase"] != "delayed" and j["entry"]
        }
        online = [m for m in self.machines.values() if self._takes_work(s, m)]
        return [f"{sig} waits, {m.id} fits" for m in online for sig in waiting if self._fits(s, m, sig)]

    def _takes_work(self, s: Snapshot, m: Machine) -> bool:
        facts = s.hashes[f"worker:{m.id}"]
        awake = int(facts.get("quarantined_until", 0)) <= self.clock.now_ms
        return facts["state"] == "online" and awake and len(m.held) < m.threads

    def _fits(self, s: Snapshot, m: Machine, sig: str) -> bool:
        letter, gpus, vram, cpus, memory = amounts(sig)
        if sig not in s.hashes.get(f"fits:{m.class_id}", {}):
            return False
        alive = list(running(s).values())
        on_node = [amounts(j["sig"]) for j in alive if j["node"] == m.node]
        mine = sum(amounts(j["sig"])[3] for j in alive if j["worker"] == m.id)
        free_cpus = min(m.slots - mine, m.node_cpus - sum(a[3] for a in on_node))
        free = [lot for lot in m.lots if f"device:{lot.uuid}" not in s.hashes and lot.free_mib >= vram]
        devices = letter in "ca" or len(free) >= gpus
        return devices and cpus <= free_cpus and memory <= m.memory_mib - sum(a[4] for a in on_node)

    def _rung(self) -> set[str]:
        """Workers with a bell in their inbox that they have not answered."""
        commands = [("XRANGE", self.hand.key(f"inbox:{w}"), f"({self.read[w]}", "+") for w in self.machines]
        unread = zip(self.machines, self.hand.link.pipeline(commands), strict=True)
        return {w for w, mail in unread if any(b"work" in fields for _, fields in mail)}

    def _held(self) -> tuple[Machine, str] | None:
        held = [(m, job) for m in self.machines.values() for job in sorted(m.held)]
        return self.random.choice(held) if held else None

    def _snapshot(self) -> Snapshot:
        return snapshot.read(self.hand.link, self.hand.root)

    def remove(self) -> None:
        self.hand.link.call("UNLINK", *self.hand.link.call("KEYS", self.hand.key("*")))


def test_no_idle_worker_fits_a_waiting_job_once_all_bells_are_answered(link: Link) -> None:
    with virtual_library(link) as clock:
        for seed in range(HISTORIES):
            history = History(link, clock, seed)
            for _ in range(STEPS):
                history.step()
                if history.random.randrange(SETTLED_ONE_IN) == 0:
                    history.settle()
                    assert history.stuck() == [], f"seed {seed}"
            history.settle()
            assert history.stuck() == [], f"seed {seed}"
            history.remove()


def test_a_worker_whose_chunk_of_an_array_ended_without_a_claim_is_rung(link: Link, root: str) -> None:
    hand = Hand(link, root)
    hand.introduce(SIGNATURES[0], {})
    worker = hand.machine("w1", {SIGNATURES[0]: ()}, slots=1)
    hand.submit(SIGNATURES[0], count=2)
    (chunk,) = hand.claim(worker, 1)

    hand.run(fn.commit_items(fn.ItemsEnding(chunk.id, chunk.token, chunk.stop, 0, 1000, b"page")))

    assert hand.mail("w1") == ["work"]
    (last,) = hand.claim(worker, 1)
    hand.run(fn.commit_items(fn.ItemsEnding(last.id, last.token, last.stop, 0, 1000, b"page")))
