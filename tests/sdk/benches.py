"""A worker by hand for clients under test: it takes what was submitted, and the test says how each job ends."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import cloudpickle

from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.functions import Grant, Registration
from gpulayer_broker.queue import Queue
from tests.queueing import GRACE_MS, HEARTBEAT_MS, Hand, Machine
from tests.support import wait_until

CAPABILITIES = Capabilities(
    os="linux",
    arch="x86_64",
    cpus=64,
    memory_bytes=64 << 30,
    disk_bytes=1 << 40,
    python="3.11.7",
    frameworks=(("numpy", "2.4.6"), ("obscure", "1.0")),
)


class Bench:
    """One machine with room for everything, and what it holds."""

    def __init__(self, hand: Hand, namespace: str, name: str = "w_bench") -> None:
        self.hand = hand
        self.machine = Machine(name, class_id=CAPABILITIES.class_id, slots=64)
        Queue(hand.link, namespace).register(self._registration(name))

    def _registration(self, name: str) -> Registration:
        return Registration(
            worker=name,
            node=name,
            incarnation=self.machine.incarnation,
            class_id=CAPABILITIES.class_id,
            slots=64,
            node_cpus=64,
            memory_mib=65_536,
            heartbeat_ms=HEARTBEAT_MS,
            grace_ms=GRACE_MS,
            info=json.dumps({"name": "alpha"}).encode(),
            capabilities=CAPABILITIES.canonical(),
        )

    def take(self, job_id: str) -> Grant:
        """The grant of this job; others that are granted on the way are kept."""

        def claimed() -> Grant | None:
            if job_id not in self.machine.held:
                self.hand.claim(self.machine, most=1)
            return self.machine.held.get(job_id)

        grant = wait_until(claimed, 5, f"{job_id} is granted")
        assert grant is not None
        return grant

    def end(self, job_id: str, verdict: str = "succeeded", **facts: Any) -> None:
        assert self.hand.commit(self.machine, self.take(job_id), verdict, **facts).verdict == "ok"

    def give(self, job_id: str, value: Any) -> None:
        """The job succeeds with a plain value."""
        self.end(job_id, fields={"result": json.dumps(value).encode(), "result_kind": "json"})

    def fail(self, job_id: str, error: BaseException, *, traceback: str = "") -> None:
        """The job's function raised this."""
        told = {
            "type": type(error).__qualname__,
            "module": type(error).__module__,
            "message": str(error),
            "traceback": traceback,
            "pickle": base64.b85encode(cloudpickle.dumps(error)).decode(),
        }
        self.end(job_id, "failed", reason="user_error", fields={"error": json.dumps(told)})

    def serve(self, count: int, answer: Callable[[Grant], Any]) -> list[str]:
        """Takes so many jobs and gives each what `answer` says; their ids, in the order in which they were taken."""
        done: list[str] = []
        while len(done) < count:
            grants = wait_until(lambda: self.hand.claim(self.machine), 5, f"job {len(done) + 1} is granted")
            for grant in grants:
                self.give(grant.id, answer(grant))
                done.append(grant.id)
        return done
