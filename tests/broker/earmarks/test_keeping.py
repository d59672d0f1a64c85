"""What an earmark keeps from others, and who passes it all the same."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.functions import DeviceLot
from tests.queueing import Hand, Machine, signature
from tests.virtual import Clock

from .scene import (
    CARDS,
    GPU,
    HEAVY,
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


def test_what_is_kept_is_not_granted_to_others_and_the_job_goes_first_when_there_is_room(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand)
    job = starve(hand, clock, machine)
    small = hand.submit(SMALL, owner="bob")

    assert hand.claim(machine) == ()
    end(hand, machine)
    assert hand.claim(machine) == ()
    end(hand, machine)

    assert ids(hand.claim(machine)) == [job]
    assert earmarks(hand) == {}
    end(hand, machine)
    assert ids(hand.claim(machine)) == [small]


def test_memory_is_kept_as_cpus_are_and_what_lies_beyond_goes_on_being_granted(
    hand: Hand, clock: Clock
) -> None:
    machine, some = worker(hand), signature(memory=5000, tag="some")
    hand.introduce(some, {machine.class_id: ()})
    for _ in range(2):
        hand.submit(some)
    hand.claim(machine)
    job = hand.submit(HEAVY)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    assert earmarks(hand) == {"w1": job}
    hand.submit(some)
    beyond, beneath = hand.submit(SMALL), hand.submit(SMALL)

    assert ids(hand.claim(machine)) == [beyond]
    end(hand, machine, 2)
    assert ids(hand.claim(machine))[:2] == [job, beneath]


def test_as_many_devices_are_kept_as_the_job_needs_those_that_are_free_first(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand, slots=64, node_cpus=64, lots=CARDS)
    for _ in range(3):
        hand.submit(GPU)
    (first, second, third) = hand.claim(machine)
    job = hand.submit(PAIR)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    assert earmarks(hand) == {"w1": job}
    younger = hand.submit(GPU)

    hand.commit(machine, third)
    assert hand.claim(machine) == ()
    hand.commit(machine, first)
    assert ids(hand.claim(machine)) == [job]
    hand.commit(machine, second)
    assert ids(hand.claim(machine)) == [younger]


def test_devices_beyond_those_that_are_kept_are_granted(hand: Hand, clock: Clock) -> None:
    machine = worker(hand, slots=64, node_cpus=64, lots=(*CARDS, DeviceLot("G3", 0, 0, 500)))
    tiny = signature(gpus=1, vram=100, tag="tiny")
    hand.introduce(tiny, {machine.class_id: (0,)})
    for _ in range(2):
        hand.submit(GPU)
    hand.claim(machine)
    job = hand.submit(PAIR)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    small = hand.submit(tiny)

    assert earmarks(hand) == {"w1": job}
    assert [(g.id, g.lots) for g in hand.claim(machine)] == [(small, (("G3", 0),))]


def test_neighbours_on_the_machine_leave_it_alone_too(hand: Hand, clock: Clock) -> None:
    one, other = (worker(hand, name, node="n", slots=4, node_cpus=4, lots=CARDS) for name in ("w1", "w2"))
    job = starve(hand, clock, one)
    hand.submit(SMALL)
    assert earmarks(hand) == {"n": job}

    assert hand.claim(other) == ()
    end_all(hand, one)
    assert ids(hand.claim(other)) == [job]
    assert earmarks(hand) == {}


def test_more_important_jobs_pass(hand: Hand, clock: Clock) -> None:
    machine = worker(hand)
    starve(hand, clock, machine)
    hand.claim(machine)
    urgent = hand.submit(SMALL, priority=1)

    assert machine.id in hand.rung()
    assert ids(hand.claim(machine)) == [urgent]


def kept_until(hand: Hand, clock: Clock, timeout_ms: int) -> Machine:
    """A worker whose machine is kept while two small jobs run there, which end by their timeouts at the latest."""
    machine = worker(hand)
    run_two(hand, machine, timeout_ms=timeout_ms)
    job = hand.submit(LARGE)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    assert earmarks(hand) == {"w1": job}
    hand.claim(machine)
    return machine


def test_a_job_passes_whose_timeout_ends_before_what_runs_there_does(hand: Hand, clock: Clock) -> None:
    machine = kept_until(hand, clock, 600_000)
    long, unknown = hand.submit(SMALL, timeout_ms=600_000), hand.submit(SMALL, owner="bob")
    assert hand.claim(machine) == ()

    short = hand.submit(SMALL, owner="eve", timeout_ms=300_000)

    assert machine.id in hand.rung()
    assert ids(hand.claim(machine)) == [short]
    assert {hand.state(each) for each in (long, unknown)} == {"queued"}


@pytest.fixture
def passed_by(hand: Hand, clock: Clock) -> tuple[Machine, Machine, str, str]:
    """A kept machine that sleeps, a small worker that is full, and in one line a long job and a short one."""
    machine = kept_until(hand, clock, 7_200_000)
    other = hand.machine("w2", ONLY_SMALL, slots=1, node_cpus=1, class_id="k2")
    hand.submit(SMALL)
    hand.claim(other)
    hand.claim(machine)
    long, short = hand.submit(SMALL), hand.submit(SMALL, timeout_ms=60_000)
    assert hand.rung() == set()
    return machine, other, long, short


def test_a_short_job_whose_turn_comes_when_another_worker_takes_the_one_before_it_rings(
    hand: Hand, passed_by: tuple[Machine, Machine, str, str]
) -> None:
    machine, other, long, short = passed_by
    (grant,) = other.held.values()
    hand.commit(other, grant, claim_next=True)

    assert list(other.held) == [long]
    assert hand.rung() == {machine.id}
    assert ids(hand.claim(machine)) == [short]


def test_a_short_job_whose_turn_comes_when_the_one_before_it_is_cancelled_rings(
    hand: Hand, passed_by: tuple[Machine, Machine, str, str]
) -> None:
    machine, _, long, short = passed_by
    hand.run(fn.cancel(long))

    assert hand.rung() == {machine.id}
    assert ids(hand.claim(machine)) == [short]


def test_no_timeout_lets_a_job_pass_where_it_is_not_known_when_the_others_end(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand)
    starve(hand, clock, machine)
    hand.submit(SMALL, timeout_ms=1)

    assert hand.claim(machine) == ()


def test_what_prepares_first_does_not_pass_by_its_timeout(hand: Hand, clock: Clock) -> None:
    machine = worker(hand)
    run_two(hand, machine, timeout_ms=600_000)
    hand.submit(LARGE)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    hand.submit(SMALL, timeout_ms=1, prepare=True)

    assert hand.claim(machine) == ()
