"""Drives the queue's functions by hand: signatures, workers and jobs without processes around them.

A `Hand` is one connection that speaks for clients and workers alike, so that a test decides every interleaving.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpulayer_broker import functions as fn
from gpulayer_broker import library
from gpulayer_broker.answers import Claimed, Committed, Grant, Renewed, Ticked
from gpulayer_broker.attempts import Attempt, Attempts
from gpulayer_broker.claims import Claims
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import Call, DeviceLot, Ending, Offer, Running, Submission
from gpulayer_broker.job import new_job_id
from gpulayer_broker.queue import Queue

T = TypeVar("T")
LEASE_MS, GRACE_MS, HEARTBEAT_MS = 60_000, 10_000, 10_000
NO_RETENTION = 30 * 86_400_000


def claims_of(queue: Queue, attempts: Attempts, deliver: Callable[[Attempt], None]) -> Claims:
    """The claims of worker w1 in its first life, which is registered by hand."""
    return Claims(
        queue,
        attempts,
        worker="w1",
        incarnation="i1",
        lease_s=60,
        deliver=deliver,
        register=lambda: None,
        on_superseded=lambda: None,
    )


def signature(
    cpus: int = 1,
    gpus: int = 0,
    vram: int = 0,
    memory: int = 0,
    letter: str = "",
    tag: str = "0",
    disk: int = 0,
) -> str:
    """A signature's name with these amounts; `tag` tells signatures of equal amounts apart."""
    return f"{letter or ('g' if gpus else 'c')}{gpus}.{vram}.{cpus}.{memory}.{disk}.{tag}"


@dataclass
class Machine:
    """A worker as the queue sees it."""

    id: str
    incarnation: str = "i1"
    class_id: str = "k1"
    node: str = ""
    slots: int = 2
    node_cpus: int = 64
    memory_mib: int = 64_000
    threads: int = 64
    lots: tuple[DeviceLot, ...] = ()
    held: dict[str, Grant] = field(default_factory=dict)

    def offer(self, most: int | None = None, nonce: str | None = None) -> Offer:
        return Offer(
            self.id,
            self.incarnation,
            self.threads if most is None else most,
            nonce or secrets.token_hex(16),
            LEASE_MS,
            1_000_000,
            self.lots,
        )


class Hand:
    """Speaks to one namespace over one link."""

    def __init__(self, link: Link, root: str) -> None:
        self.link = link
        self.root = root
        library.load(link)

    def run(self, call: Call[T]) -> T:
        return call.parse(self.link.call(*call.command(self.root)))

    def key(self, name: str) -> str:
        return self.root + name

    def get(self, job_id: str, name: str) -> str:
        return (self.link.call("HGET", self.key(f"job:{job_id}"), name) or b"").decode()

    def state(self, job_id: str) -> str:
        return self.get(job_id, "state")

    def introduce(self, sig: str, fits: dict[str, tuple[int, ...]]) -> None:
        while True:
            version = (self.link.call("GET", self.key("classes_version")) or b"0").decode()
            if self.run(fn.introduce(sig, b"{}", version, fits)).outcome == "ok":
                return

    def register(self, machine: Machine, fits: dict[str, tuple[int, ...]] | None = None) -> None:
        version = (self.link.call("GET", self.key("signatures_version")) or b"0").decode()
        registration = fn.Registration(
            machine.id,
            machine.node or machine.id,
            machine.incarnation,
            machine.class_id,
            machine.slots,
            machine.node_cpus,
            machine.memory_mib,
            HEARTBEAT_MS,
            GRACE_MS,
            b"{}",
            b"{}",
        )
        assert self.run(fn.register(registration, version, fits or {})).outcome == "ok"

    def machine(self, name: str, fits: dict[str, tuple[int, ...]] | None = None, **facts: Any) -> Machine:
        machine = Machine(name, **facts)
        self.register(machine, fits)
        return machine

    def submit(self, sig: str, **facts: Any) -> str:
        job_id = facts.pop("id", None) or new_job_id()
        answer = self.run(fn.submit(Submission(job_id, sig, facts.pop("spec", b"spec"), **facts)))
        assert answer.outcome in ("added", "existing"), answer
        return answer.id or job_id

    def claim(self, machine: Machine, most: int | None = None, nonce: str | None = None) -> tuple[Grant, ...]:
        answer: Claimed = self.run(fn.claim(machine.offer(most, nonce)))
        assert answer.known
        machine.held.update({g.id: g for g in answer.grants})
        return answer.grants

    def commit(self, machine: Machine, grant: Grant, verdict: str = "succeeded", **facts: Any) -> Committed:
        next_claim = machine.offer(1) if facts.pop("claim_next", False) else None
        committed = self.run(fn.commit(Ending(grant.id, grant.token, verdict, **facts), next_claim))
        machine.held.pop(grant.id, None)
        machine.held.update({g.id: g for g in committed.claimed.grants})
        return committed

    def renew(self, machine: Machine, **facts: Any) -> Renewed:
        attempts = [Running(g.id, g.token) for g in machine.held.values()]
        return self.run(fn.renew(machine.id, machine.incarnation, facts.pop("lease_ms", LEASE_MS), attempts))

    def tick(self) -> Ticked:
        return self.run(fn.tick())

    def expire(self, job_id: str) -> None:
        """The job's lease ran out long ago, as far as the index of leases tells."""
        self.link.call("ZADD", self.key("leases"), 1, job_id)

    def rung(self) -> set[str]:
        """Workers whose bell has a deadline: no claim has answered it."""
        return {worker.decode() for worker in self.link.call("ZRANGE", self.key("rung"), 0, -1)}

    def mail(self, worker: str) -> list[str]:
        """Kinds of everything that lies in a worker's inbox."""
        entries = self.link.call("XRANGE", self.key(f"inbox:{worker}"), "-", "+")
        return [dict(zip(e[1][::2], e[1][1::2], strict=True))[b"kind"].decode() for e in entries]


@dataclass
class Claimer:
    """Worker w1 with the claims that a real one makes, and a hand on its queue: what it is granted, it keeps."""

    hand: Hand
    queue: Queue
    attempts: Attempts = field(default_factory=Attempts)
    delivered: list[Attempt] = field(default_factory=list)

    def joins(self, sig: str, slots: int, capacity: int) -> None:
        """It can run jobs of this signature, and takes so many at once."""
        self.hand.introduce(sig, {})
        self.hand.machine("w1", {sig: ()}, slots=slots)
        self.claims = claims_of(self.queue, self.attempts, self.delivered.append)
        self.claims.open(capacity)
