"""Rule 6: a worker claims only what it can start now; nothing is held that another could run."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions
from tests.checker import running
from tests.queueing import signature
from tests.rules.crowd import CPU, Place, lots, processes, together

pytestmark = pytest.mark.rule_06


def test_a_worker_killed_in_the_middle_holds_one_job_and_all_others_are_free(place: Place) -> None:
    with place.hand() as hand:
        for _ in range(50):
            hand.submit(CPU)
        with processes(place, "w1", pause_at="holds") as (worker,):
            worker.said("holds")
        assert len(running(place.check())) == 1

        other = hand.machine("w2", slots=100, node_cpus=100)
        assert len(hand.claim(other)) == 49


def test_threads_of_one_worker_that_claim_at_once_stay_within_its_slots(place: Place) -> None:
    with place.hand() as hand:
        machine = hand.machine("w1", slots=3)
        for _ in range(30):
            hand.submit(CPU)

    def claim() -> None:
        with place.hand() as hand:
            for _ in range(5):
                assert len(hand.claim(machine, 2)) <= 2

    together(*[claim] * 6)
    assert len(running(place.check())) == 3


def test_what_cannot_start_now_is_not_taken_and_does_not_hold_up_what_can(place: Place) -> None:
    """One that waits for a busy device, one for memory; the small one behind them goes first."""
    gpu, big = signature(gpus=1, tag="gpu"), signature(memory=60_000, tag="big")
    with place.hand() as hand:
        hand.introduce(gpu, {"k1": (0,)})
        hand.introduce(big, {"k1": ()})
        machine = hand.machine("w1", slots=8, memory_mib=70_000, lots=lots(1))
        for sig in (gpu, big):
            hand.submit(sig)
        assert len(hand.claim(machine)) == 2
        waiting = [hand.submit(gpu), hand.submit(big)]
        small = hand.submit(CPU)

        assert [g.id for g in hand.claim(machine)] == [small]
        assert {hand.state(job) for job in waiting} == {"queued"}
    place.check()


def test_what_needs_a_whole_busy_machine_begins_once_that_was_drained(place: Place) -> None:
    """Nothing is held back for it meanwhile: it is passed by what fits."""
    whole, part = signature(memory=60_000, tag="whole"), signature(memory=30_000, tag="part")
    with place.hand() as hand:
        for sig in (whole, part):
            hand.introduce(sig, {"k1": ()})
        machine = hand.machine("w1", slots=8, memory_mib=64_000)
        running_now = [hand.submit(part), hand.submit(part)]
        first, second = hand.claim(machine)
        large, later = hand.submit(whole), [hand.submit(part) for _ in range(3)]
        passed = hand.commit(machine, first, claim_next=True).claimed.grants

        assert {first.id, second.id} == set(running_now)
        assert [grant.id for grant in passed] == later[:1]

        hand.run(functions.drain("w1", "draining"))
        for grant in (second, *passed):
            hand.commit(machine, grant)
        hand.run(functions.drain("w1", "online"))
        assert [grant.id for grant in hand.claim(machine)] == [large]
    place.check()
