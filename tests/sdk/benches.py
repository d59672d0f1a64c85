"""A worker by hand for clients under test: it takes what was submitted, and the test says how each job ends."""

from __future__ import annotations

import base64
import json
import pickle
import platform
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle

from gpulayer_broker import spec as specs
from gpulayer_broker.answers import Grant
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.connection import plain_client
from gpulayer_broker.functions import ItemsEnding, Registration, commit_items
from gpulayer_broker.items import ItemOutcome, Items, pack_outcomes
from gpulayer_broker.queue import Queue
from gpulayer_broker.store.blobs import QueueStore
from tests.queueing import GRACE_MS, HEARTBEAT_MS, Hand, Machine
from tests.support import PATIENCE_S, wait_until

CAPABILITIES = Capabilities(
    os="linux",
    arch="x86_64",
    cpus=64,
    memory_bytes=64 << 30,
    disk_bytes=1 << 40,
    python=platform.python_version(),
    frameworks=(("numpy", "2.4.6"), ("obscure", "1.0")),
    features=("warm",),
)


class Bench:
    """One machine with room for everything, and what it holds."""

    def __init__(self, hand: Hand, namespace: str, name: str = "w_bench") -> None:
        self.hand = hand
        self.machine = Machine(name, class_id=CAPABILITIES.class_id, slots=64)
        self.queue = Queue(hand.link, namespace)
        self.queue.register(self._registration(name))
        self._taken: set[str] = set()

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

        grant = wait_until(claimed, PATIENCE_S, f"{job_id} is granted")
        assert grant is not None
        return grant

    def end(self, job_id: str, verdict: str = "succeeded", **facts: Any) -> None:
        assert self.hand.commit(self.machine, self.take(job_id), verdict, **facts).verdict == "ok"

    def give(self, job_id: str, value: Any) -> None:
        """The job succeeds with a plain value."""
        self.end(job_id, fields={"result": json.dumps(value).encode(), "result_kind": "json"})

    def fail(self, job_id: str, error: BaseException, *, traceback: str = "") -> None:
        """The job's function raised this."""
        self.end(job_id, "failed", reason="user_error", fields={"error": told_error(error, traceback)})

    def serve(self, count: int, answer: Callable[[Grant], Any]) -> list[str]:
        """Takes so many jobs and gives each what `answer` says; their ids, in the order in which they were taken."""
        done: list[str] = []
        while len(done) < count:
            grants = wait_until(
                lambda: self.hand.claim(self.machine), PATIENCE_S, f"job {len(done) + 1} is granted"
            )
            for grant in grants:
                self.give(grant.id, answer(grant))
                done.append(grant.id)
        return done

    # Arrays -----------------------------------------------------------------------------------------------------------

    def chunk(self, array_id: str) -> Grant | None:
        """A range of this array, if one is to be had; others that are granted on the way are kept."""
        while True:
            for grant in [*self.machine.held.values()]:
                if grant.id.startswith(f"{array_id}/") and grant.id not in self._taken:
                    self._taken.add(grant.id)
                    return grant
            if not self.hand.claim(self.machine, most=1):
                return None

    def end_chunk(self, grant: Grant, outcomes: Sequence[ItemOutcome], us_each: int = 20_000) -> None:
        """The items of a range ended so; those that are left over go back."""
        failed = sum(not outcome.ok for outcome in outcomes)
        upto, took_us = grant.start + len(outcomes), us_each * len(outcomes)
        ending = ItemsEnding(grant.id, grant.token, upto, failed, took_us, pack_outcomes(outcomes))
        assert self.hand.run(commit_items(ending)).verdict == "ok"
        self.machine.held.pop(grant.id, None)

    def serve_array(
        self,
        array_id: str,
        answer: Callable[[Any], ItemOutcome],
        *,
        chunks: int | None = None,
        us_each: int = 1000,
    ) -> list[Any]:
        """Runs the array, or so many of its ranges; the first argument of each item, in the order of running."""
        items, seen = self.items(array_id), []
        while (chunks is None or chunks > 0) and (grant := self.chunk(array_id)):
            arguments = [pickle.loads(items[number])[0][0] for number in range(grant.start, grant.stop)]
            seen += arguments
            self.end_chunk(grant, [answer(argument) for argument in arguments], us_each)
            chunks = None if chunks is None else chunks - 1
        return seen

    def items(self, array_id: str) -> Items:
        """The array's items, read as a worker reads them."""
        call = specs.decode(self.queue.record(array_id).spec).call
        assert call is not None
        data = call.arguments.data
        if data is None:
            with plain_client(self.hand.link.endpoint) as plain:
                store = QueueStore(plain, self.queue.keys.blob, limit_bytes=1 << 30)
                data = store.read_bytes(call.arguments.sha256, 1 << 30)
        return Items(data)


def good(value: Any) -> ItemOutcome:
    """An item that returned a plain value."""
    return ItemOutcome(True, "json", json.dumps(value).encode())


def bad(error: BaseException, *, traceback: str = "line 7") -> ItemOutcome:
    """An item whose function raised this."""
    return ItemOutcome(False, "error", told_error(error, traceback))


def told_error(error: BaseException, traceback: str) -> bytes:
    """An error as a worker reports it."""
    told = {
        "type": type(error).__qualname__,
        "module": type(error).__module__,
        "message": str(error),
        "traceback": traceback,
        "pickle": base64.b85encode(cloudpickle.dumps(error)).decode(),
    }
    return json.dumps(told).encode()
