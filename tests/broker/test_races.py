"""Calls that arrive twice, at once, or with their reply lost: each changes the queue as one call would."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Grant
from gpulayer_broker.connection import Link, NoAnswer
from gpulayer_broker.functions import Call, Ending, Registration, Running, Submission
from gpulayer_broker.job import new_job_id
from tests import snapshot
from tests.checker import running, violations
from tests.queueing import LEASE_MS, Hand, Machine, signature
from tests.rules.crowd import FINAL, Place, finish_all, lose_all, together
from tests.servers import QueueServer
from tests.snapshot import Snapshot
from tests.support import PATIENCE_S, wait_until
from tests.virtual import virtual_library

CPU = signature()


@pytest.fixture
def hand(link: Link, root: str) -> Hand:
    hand = Hand(link, root)
    hand.introduce(CPU, {})
    return hand


# Lost replies -------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Two jobs that run, one that waits, and the worker that holds them."""

    hand: Hand
    machine: Machine
    grants: tuple[Grant, ...]
    waiting: str

    def calls(self) -> dict[str, Call[Any]]:
        """Every function that writes, as a client would send it."""
        one, two = self.grants
        outbox = [Submission("j_next", CPU, b"")]
        machine = self.machine
        joined = Registration("w1", "w1", "i1", "k1", 3, 64, 64_000, 10_000, 10_000, b"{}", b"{}")
        listed = [Running(g.id, g.token, progress="{}") for g in self.grants]
        ending = Ending(one.id, one.token, "succeeded", fields={"result": b"1"}, outbox=outbox)
        retry = Ending(one.id, one.token, "retry", delay_ms=1000)
        return {
            "submit": fn.submit(Submission("j_new", CPU, b"s", client="c")),
            "submit delayed": fn.submit(Submission("j_new", CPU, b"s", delay_ms=1000)),
            "submit with a key": fn.submit(Submission("j_new", CPU, b"s", idempotency_key="k", digest="d")),
            "introduce": fn.introduce(signature(tag="new"), b"{}", self._version(), {"k1": ()}),
            "register": fn.register(joined, "0", {}),
            "claim": fn.claim(machine.offer(1)),
            "renew": fn.renew("w1", "i1", LEASE_MS, listed),
            "log": fn.log(one.id, one.token, 0, "out", 0, b"x"),
            "checkpoint": fn.checkpoint(one.id, one.token, "digest"),
            "commit": fn.commit(ending),
            "commit and claim": fn.commit(ending, machine.offer(2)),
            "commit a retry": fn.commit(retry),
            "release returned": fn.release(two.id, two.token, "returned"),
            "release lost": fn.release(two.id, two.token, "lost"),
            "release unfit": fn.release(two.id, two.token, "unfit"),
            "cancel queued": fn.cancel(self.waiting),
            "cancel running": fn.cancel(one.id),
            "watch": fn.watch("c2", [one.id, "j_none"]),
            "drain": fn.drain("w1", "draining"),
            "tick": fn.tick(),
        }

    def _version(self) -> str:
        return (self.hand.link.call("GET", self.hand.key("classes_version")) or b"0").decode()


def scene(hand: Hand) -> Scene:
    jobs = [hand.submit(CPU) for _ in range(3)]
    machine = hand.machine("w1", {CPU: ()}, slots=3)
    grants = hand.claim(machine, 2)
    return Scene(hand, machine, grants, jobs[2])


def lasting(s: Snapshot) -> Snapshot:
    """All but what may be said twice: bells in inboxes, and when somebody was last seen."""
    s.streams = {name: stream for name, stream in s.streams.items() if not name.startswith("inbox:")}
    return s


NAMES = [
    "submit",
    "submit delayed",
    "submit with a key",
    "introduce",
    "register",
    "claim",
    "renew",
    "log",
    "checkpoint",
    "commit",
    "commit and claim",
    "commit a retry",
    "release returned",
    "release lost",
    "release unfit",
    "cancel queued",
    "cancel running",
    "watch",
    "drain",
    "tick",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_sent_again_because_its_reply_was_lost_changes_nothing_more(hand: Hand, name: str) -> None:
    with virtual_library(hand.link):
        calls = scene(hand).calls()
        assert sorted(calls) == sorted(NAMES)

        first = hand.run(calls[name])
        once = lasting(snapshot.read(hand.link, hand.root))
        second = hand.run(calls[name])

        assert lasting(snapshot.read(hand.link, hand.root)) == once
        if name in ("claim", "commit and claim"):
            grants = [
                answer.grants if name == "claim" else answer.claimed.grants for answer in (first, second)
            ]
            assert grants[0] == grants[1] != ()
        assert violations(once) == []


# Duplicate submits --------------------------------------------------------------------------------------------------


def test_fifty_clients_that_submit_one_key_at_once_make_one_job(hand: Hand) -> None:
    ids: list[str] = []

    def submit() -> None:
        with Link(hand.link.endpoint) as link:
            ids.append(Hand(link, hand.root).submit(CPU, idempotency_key="k", digest="d"))

    together(*[submit] * 50)

    assert len(ids) == 50
    assert len(set(ids)) == 1
    assert set(snapshot.read(hand.link, hand.root).jobs) == set(ids)


def test_submits_under_one_key_across_a_kill_of_the_server_make_one_job_each(
    queue_server: Callable[..., QueueServer],
) -> None:
    """Clients that got no answer send again, to the server that came back: never lost, never two."""
    server = queue_server(append_only=True)
    place = Place(server.endpoint, "gpulayer:{t}:")
    with place.hand() as hand:
        hand.introduce(CPU, {})
    ids: dict[str, set[str]] = {f"k{n}": set() for n in range(300)}
    back, lock = threading.Event(), threading.Lock()

    def submit() -> None:
        for key in ids:
            job = _submit_until_answered(place, key, back)
            with lock:
                ids[key].add(job)

    def crash() -> None:
        wait_until(lambda: bool(ids["k40"]), PATIENCE_S, "forty keys have been submitted under")
        server.kill()
        server.start()
        back.set()

    together(*[submit] * 8, crash)
    assert all(len(jobs) == 1 for jobs in ids.values())
    assert len(place.check().jobs) == 300


def _submit_until_answered(place: Place, key: str, back: threading.Event) -> str:
    while True:
        try:
            with place.hand() as hand:
                return hand.submit(CPU, id=new_job_id(), idempotency_key=key, digest="d")
        except NoAnswer:
            back.wait(PATIENCE_S)


# Cancel -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transition",
    ["submit", "promote", "claim", "start", "commit", "fail", "retry", "release", "lose", "return"],
)
def test_a_cancel_at_any_transition_ends_the_job_once(hand: Hand, transition: str) -> None:
    """The cancel races with the transition, twenty times; afterwards the holder learns of it and reports."""
    root, endpoint = hand.root, hand.link.endpoint
    machine = hand.machine("w1", {CPU: ()}, slots=1)
    for _ in range(20):
        job = new_job_id()
        act = prepared(hand, machine, transition, job)

        def cancel(job: str = job) -> None:
            with Link(endpoint) as link:
                Hand(link, root).run(fn.cancel(job))

        together(act, cancel)
        hand.run(fn.cancel(job))
        seen = snapshot.read(hand.link, root)
        assert violations(seen) == []
        for holder in running(seen).values():
            hand.run(fn.commit(Ending(job, holder["token"], "failed", "signal")))
        assert hand.state(job) in (
            ("cancelled", "succeeded", "failed") if transition in ("commit", "fail") else ("cancelled",)
        )
        machine.held.clear()
        hand.link.call("DEL", hand.key("deaths:w1"))
    events = snapshot.read(hand.link, root).streams["events"].entries.values()
    finals = [e["job"] for e in events if e["state"] in FINAL]
    assert len(finals) == len(set(finals)) == 20


def prepared(hand: Hand, machine: Machine, transition: str, job: str) -> Callable[[], object]:
    """Brings the job to just before the transition; what is returned makes it, over a link of its own."""
    endpoint, root = hand.link.endpoint, hand.root

    def alone(work: Callable[[Hand], object]) -> Callable[[], object]:
        def run() -> object:
            with Link(endpoint) as link:
                return work(Hand(link, root))

        return run

    if transition == "submit":
        return alone(lambda mine: mine.submit(CPU, id=job))
    hand.submit(CPU, id=job, delay_ms=1 if transition == "promote" else 0, prepare=transition == "start")
    if transition == "promote":
        return alone(lambda mine: mine.tick())
    if transition == "claim":
        return alone(lambda mine: mine.claim(machine))
    grant = _granted(hand, machine)
    if transition == "return":
        machine.incarnation += "x"
    acts: dict[str, Callable[[Hand], object]] = {
        "start": lambda mine: mine.run(fn.log(job, grant.token, 0, "out", 0, b"x")),
        "commit": lambda mine: mine.run(fn.commit(Ending(job, grant.token, "succeeded"))),
        "fail": lambda mine: mine.run(fn.commit(Ending(job, grant.token, "failed"))),
        "retry": lambda mine: mine.run(fn.commit(Ending(job, grant.token, "retry"))),
        "release": lambda mine: mine.run(fn.release(job, grant.token, "returned")),
        "lose": lose_all,
        "return": lambda mine: mine.register(machine),
    }
    return alone(acts[transition])


def _granted(hand: Hand, machine: Machine) -> Grant:
    (grant,) = hand.claim(machine, 1)
    return grant


def test_a_cancelled_wait_leaves_nothing_to_claim(hand: Hand) -> None:
    jobs = [hand.submit(CPU, delay_ms=n % 2 * 5000) for n in range(10)]
    for job in jobs:
        hand.run(fn.cancel(job))
    machine = hand.machine("w1", {CPU: ()})
    finish_all(hand, machine)

    seen = snapshot.read(hand.link, hand.root)
    assert {j["state"] for j in seen.jobs.values()} == {"cancelled"}
    assert violations(seen) == []
