"""When an earmark goes: with its job, its worker, or what makes it vain; and what is left when it is damaged."""

from __future__ import annotations

import itertools

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.earmarks import earmark_in
from gpulayer_broker.errors import GpulayerError
from tests.queueing import HEARTBEAT_MS, Hand, Machine, signature
from tests.virtual import Clock

from .scene import (
    CARDS,
    GPU,
    LARGE,
    LOOK_MS,
    ONLY_SMALL,
    PAIR,
    SMALL,
    WAIT_MS,
    earmarks,
    end,
    end_all,
    ids,
    pass_time,
    run_two,
    starve,
    worker,
)


@pytest.fixture
def kept(hand: Hand, clock: Clock) -> tuple[Machine, str, str]:
    """A machine, the job that it is kept for, and a small one that must wait for it; the worker sleeps."""
    machine = worker(hand)
    job = starve(hand, clock, machine)
    small = hand.submit(SMALL, owner="bob")
    assert hand.claim(machine) == ()
    assert (earmarks(hand), hand.rung()) == ({"w1": job}, set())
    return machine, job, small


def test_it_goes_with_a_cancel_and_the_worker_is_rung(hand: Hand, kept: tuple[Machine, str, str]) -> None:
    machine, job, small = kept
    hand.run(fn.cancel(job))

    assert earmarks(hand) == {}
    assert hand.rung() == {machine.id}
    assert ids(hand.claim(machine)) == [small]


def test_it_goes_when_another_worker_takes_the_job_and_its_own_is_rung(
    hand: Hand, kept: tuple[Machine, str, str]
) -> None:
    machine, job, small = kept
    other = hand.machine("w2", {LARGE: ()}, class_id="k2", slots=4, node_cpus=4)
    assert ids(hand.claim(other)) == [job]

    assert earmarks(hand) == {}
    assert hand.rung() == {machine.id}
    assert ids(hand.claim(machine)) == [small]


@pytest.mark.parametrize("state", ["draining", "offline"])
def test_it_goes_when_its_worker_drains_or_leaves_and_neighbours_are_rung(
    hand: Hand, clock: Clock, state: str
) -> None:
    one = worker(hand, "w1", node="n")
    other = worker(hand, "w2", ONLY_SMALL, node="n", class_id="k2")
    job = starve(hand, clock, one)
    small = hand.submit(SMALL)
    assert (hand.claim(other), hand.claim(one), earmarks(hand)) == ((), (), {"n": job})

    hand.run(fn.drain(one.id, state))

    assert earmarks(hand) == {}
    assert hand.rung() == {other.id}
    assert ids(hand.claim(other)) == [small]


def test_it_goes_when_its_worker_begins_anew_and_is_made_again(
    hand: Hand, clock: Clock, kept: tuple[Machine, str, str]
) -> None:
    machine, job, _ = kept
    machine.incarnation, machine.held = "i2", {}
    hand.register(machine)

    assert earmarks(hand) == {}
    assert len(hand.claim(machine)) == 3
    pass_time(hand, clock, [machine], LOOK_MS)
    assert earmarks(hand) == {"w1": job}


def test_it_goes_when_its_worker_is_silent(hand: Hand, clock: Clock, kept: tuple[Machine, str, str]) -> None:
    _, job, small = kept
    other = worker(hand, "w2", ONLY_SMALL, class_id="k2")
    pass_time(hand, clock, [other], 3 * HEARTBEAT_MS)

    assert earmarks(hand) == {}
    assert hand.state(job) == "queued"
    assert hand.state(small) == "running"


def test_it_goes_when_its_worker_is_set_aside(
    hand: Hand, clock: Clock, kept: tuple[Machine, str, str]
) -> None:
    assert kept[0].id == "w1"
    hand.link.call("HSET", hand.key("worker:w1"), "quarantined_until", clock.now_ms + 600_000)
    hand.tick()

    assert earmarks(hand) == {}


def test_it_goes_where_the_worker_turns_out_never_to_have_the_devices(hand: Hand, clock: Clock) -> None:
    """Somebody else uses the cards: only the worker's claims tell. It is not tried there again at once."""
    machine = worker(hand, slots=64, node_cpus=64, lots=CARDS)
    hand.submit(GPU)
    hand.claim(machine)
    hand.submit(PAIR)
    machine.lots = CARDS[:1]
    hand.claim(machine)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    small = hand.submit(SMALL, owner="bob")

    assert ids(hand.claim(machine)) == [small]
    assert earmarks(hand) == {}
    pass_time(hand, clock, [machine], LOOK_MS)
    assert earmarks(hand) == {}


def test_a_worker_that_has_room_and_does_not_take_the_job_is_rung_and_then_loses_it(
    hand: Hand, clock: Clock, kept: tuple[Machine, str, str]
) -> None:
    machine, job, _ = kept
    for grant in list(machine.held.values()):
        hand.run(fn.commit(fn.Ending(grant.id, grant.token, "succeeded"), claim_follows=True))
    machine.held = {}
    pass_time(hand, clock, [machine], LOOK_MS)
    assert earmarks(hand) == {"w1": job}
    assert "work" in hand.mail("w1")

    pass_time(hand, clock, [machine], WAIT_MS)
    assert earmarks(hand) == {}


def test_a_disk_that_is_full_just_now_costs_the_others_nothing(hand: Hand, clock: Clock) -> None:
    """It fits the machine as such; the machine is not emptied for it again and again."""
    machine, much = worker(hand), signature(cpus=4, disk=2_000_000, tag="disk")
    hand.introduce(much, {machine.class_id: ()})
    for _ in range(400):
        hand.submit(SMALL)
    hand.claim(machine, 4)
    hand.submit(much, priority=1)
    busy = 0
    for _ in range(100):
        pass_time(hand, clock, [machine], LOOK_MS)
        end(hand, machine)
        hand.claim(machine, 4 - len(machine.held))
        busy += len(machine.held)

    assert busy >= 390
    assert earmarks(hand) == {}


def test_one_that_is_in_vain_is_tried_again_after_twice_the_time_for_that_job_alone(
    hand: Hand, clock: Clock
) -> None:
    machine, much = worker(hand), signature(cpus=4, disk=2_000_000, tag="disk")
    hand.introduce(much, {machine.class_id: ()})
    waits = starve(hand, clock, machine, sig=much, priority=1)
    tried = []
    for n in range(90):
        if earmarks(hand):
            assert earmarks(hand) == {"w1": waits}
            tried.append(n)
            hand.claim(machine)
        pass_time(hand, clock, [machine], LOOK_MS)
    assert [b - a for a, b in itertools.pairwise(tried)] == [10, 20, 40]

    job = hand.submit(LARGE)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    assert earmarks(hand) == {"w1": job}


def test_devices_that_are_free_and_not_taken_are_kept_no_longer_though_other_work_runs_there(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand, slots=8, node_cpus=8, lots=CARDS)
    hand.submit(SMALL)
    for _ in range(2):
        hand.submit(GPU)
    (small, *gpus) = hand.claim(machine)
    job = hand.submit(PAIR, priority=1)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    hand.claim(machine)
    for grant in gpus:
        hand.run(fn.commit(fn.Ending(grant.id, grant.token, "succeeded"), claim_follows=True))
    machine.held = {small.id: small}
    pass_time(hand, clock, [machine], LOOK_MS)
    assert earmarks(hand) == {"w1": job}

    pass_time(hand, clock, [machine], WAIT_MS)
    assert earmarks(hand) == {}


def test_devices_are_kept_while_one_of_them_is_held_however_long(hand: Hand, clock: Clock) -> None:
    machine = worker(hand, slots=8, node_cpus=8, lots=CARDS)
    for _ in range(2):
        hand.submit(GPU)
    hand.claim(machine)
    job = hand.submit(PAIR)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    hand.claim(machine)
    pass_time(hand, clock, [machine], 3 * WAIT_MS)

    assert earmarks(hand) == {"w1": job}


def test_a_job_whose_card_somebody_else_uses_keeps_no_other_from_an_earmark_for_ever(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand, lots=CARDS)
    machine.lots = ()
    hand.submit(GPU)
    starve(hand, clock, machine)
    assert earmarks(hand) == {}

    pass_time(hand, clock, [machine], 10 * WAIT_MS)
    assert list(earmarks(hand)) == ["w1"]


def test_it_stays_over_a_change_of_keepers(hand: Hand, clock: Clock, kept: tuple[Machine, str, str]) -> None:
    machine, job, _ = kept
    hand.link.call("DEL", hand.key("keeper"))
    pass_time(hand, clock, [machine], 2 * LOOK_MS)

    assert earmarks(hand) == {"w1": job}


def test_an_array_whose_items_are_large_has_it_for_each_in_turn(hand: Hand, clock: Clock) -> None:
    machine = worker(hand)
    array = starve(hand, clock, machine, count=2)
    assert earmarks(hand) == {"w1": array}
    end_all(hand, machine)
    (first,) = hand.claim(machine)
    assert (first.start, earmarks(hand)) == (0, {})
    hand.run(fn.commit_items(fn.ItemsEnding(first.id, first.token, 1, 0, 1000, b"0-1")))
    machine.held = {}
    run_two(hand, machine, priority=1)
    pass_time(hand, clock, [machine], LOOK_MS)
    assert earmarks(hand) == {"w1": array}

    hand.run(fn.cancel(array))
    assert earmarks(hand) == {}
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)  # what is kept of the chunk for a minute is gone


def test_an_earmark_that_cannot_be_read_is_told_by_a_claim_and_goes_with_the_next_tick(
    hand: Hand, clock: Clock, kept: tuple[Machine, str, str]
) -> None:
    machine, job, _ = kept
    hand.link.call("HSET", hand.key("held:w1"), "earmark", "nonsense")
    with pytest.raises(GpulayerError, match=r"held:w1 does not hold what the queue wrote \(nonsense\)"):
        hand.claim(machine)

    hand.tick()

    assert (earmarks(hand), hand.get(job, "earmark")) == ({}, "")
    assert len(hand.claim(machine)) == 1


def test_an_earmark_whose_job_is_gone_goes_with_the_next_claim(
    hand: Hand, clock: Clock, kept: tuple[Machine, str, str]
) -> None:
    machine, job, small = kept
    hand.link.call("HDEL", hand.key(f"job:{job}"), "earmark")

    assert ids(hand.claim(machine)) == [small]
    assert earmarks(hand) == {}


def test_who_explains_reads_past_what_is_no_earmark() -> None:
    assert earmark_in([b"w1 1 0", b"earmark nonsense", b"\xff"]) is None
