"""Rule 5: a job that needs a whole busy machine neither deadlocks nor starves behind small jobs.

Small jobs keep coming, and every worker takes another before it ends one, so that without an earmark the machine would
never be empty. Real time, with an earmark after a tenth of a second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.queueing import Hand, Machine, signature
from tests.rules.crowd import CPU, Place, each, lose_all, together
from tests.servers import QueueServer
from tests.support import PATIENCE_S

pytestmark = pytest.mark.rule_05
WHOLE = signature(cpus=4, tag="whole")
AHEAD = 2


def prepare(place: Place) -> Place:
    with place.hand() as hand:
        hand.introduce(WHOLE, {"k1": ()})
        hand.link.call("HSET", hand.key("config"), "earmark_ms", 100)
    return place


@pytest.fixture
def busy(place: Place) -> Place:
    return prepare(place)


def turn(hand: Hand, machine: Machine) -> list[str]:
    """One more small job comes, the worker takes what it can, and ends its oldest job if it has others."""
    hand.submit(CPU)
    taken = [grant.signature for grant in hand.claim(machine, AHEAD)]
    if len(machine.held) > 1 or not taken:
        for grant in list(machine.held.values())[:1]:
            hand.commit(machine, grant)
    hand.tick()
    return taken


def turns(hand: Hand, *machines: Machine) -> Iterator[list[str]]:
    """What the workers take in turn, for as long as a test has patience."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        for machine in machines:
            yield turn(hand, machine)


def kept(hand: Hand) -> set[str]:
    return {node.decode() for node in hand.link.call("HKEYS", hand.key("earmarks"))}


def test_a_whole_machine_is_granted_behind_racing_streams_of_small_jobs(busy: Place) -> None:
    """Two workers of one machine race; either may take the large job, and each leaves it the room."""
    granted = threading.Event()
    with busy.hand() as hand:
        machines = {
            name: hand.machine(name, {CPU: (), WHOLE: ()}, node="n", slots=4, node_cpus=4)
            for name in ("w1", "w2")
        }
        for machine in machines.values():
            turn(hand, machine)
        job = hand.submit(WHOLE)

    def work(name: str) -> None:
        with busy.hand() as hand:
            for taken in turns(hand, machines[name]):
                if WHOLE in taken:
                    granted.set()
                if granted.is_set():
                    return

    together(*each(work, *machines))

    assert granted.is_set()
    with busy.hand() as hand:
        assert hand.state(job) == "running"
    busy.check()


def test_two_whole_machines_are_granted_to_two_large_jobs_at_once(busy: Place) -> None:
    with busy.hand() as hand:
        machines = [hand.machine(name, {CPU: (), WHOLE: ()}, slots=4, node_cpus=4) for name in ("w1", "w2")]
        for machine in machines:
            turn(hand, machine)
            turn(hand, machine)
        large = [hand.submit(WHOLE, owner=owner) for owner in ("ann", "bob")]
        for _ in turns(hand, *machines):
            if all(hand.state(job) == "running" for job in large):
                break

        assert [hand.state(job) for job in large] == ["running", "running"]
    busy.check()


def test_the_large_job_gets_its_turn_though_the_worker_that_was_kept_for_it_dies(busy: Place) -> None:
    with busy.hand() as hand:
        machines = {
            name: hand.machine(name, {CPU: (), WHOLE: ()}, slots=4, node_cpus=4) for name in ("w1", "w2")
        }
        for machine in machines.values():
            turn(hand, machine)
            turn(hand, machine)
        job = hand.submit(WHOLE)
        for _ in turns(hand, *machines.values()):
            if kept(hand):
                break
        (dead,) = kept(hand)
        alive = next(name for name in machines if name != dead)
        turn(hand, machines[alive])
        hand.link.call("ZADD", hand.key("workers"), 1, dead)  # it has not been heard for long
        lose_all(hand)
        machines[alive].held = {}
        assert dead not in kept(hand)

        for taken in turns(hand, machines[alive]):
            if WHOLE in taken:
                break

        assert hand.get(job, "worker") == alive
    busy.check()


def test_a_killed_server_keeps_the_machine_for_the_job(server: QueueServer, durable: Place) -> None:
    place = prepare(durable)
    with place.hand() as hand:
        machine = hand.machine("w1", {CPU: (), WHOLE: ()}, slots=4, node_cpus=4)
        turn(hand, machine)
        turn(hand, machine)
        job = hand.submit(WHOLE)
        for _ in turns(hand, machine):
            if kept(hand):
                break

    server.kill()
    server.start()

    with place.hand() as hand:
        assert kept(hand) == {"w1"}
        for taken in turns(hand, machine):
            if WHOLE in taken:
                break
        assert hand.state(job) == "running"
    place.check()
