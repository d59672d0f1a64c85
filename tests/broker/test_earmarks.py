"""Earmarks: a job that needs much of one busy machine gets its turn, and nothing else suffers for it.

Under a clock that the test sets: `starve` lets a job wait for a minute while a small one runs beside the room that it
lacks, and looks. What the words of `lua/h_earmarks.lua` say is a test each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.answers import Grant
from gpulayer_broker.connection import Link
from gpulayer_broker.earmarks import earmark_in
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.functions import DeviceLot, Submission
from gpulayer_broker.job import new_job_id
from tests import snapshot
from tests.checker import violations
from tests.queueing import HEARTBEAT_MS, Hand, Machine, signature
from tests.rules.costs import cost_of
from tests.virtual import Clock, virtual_library

WAIT_MS, LOOK_MS = 60_000, 6_000
SMALL, LARGE, HALF = signature(), signature(cpus=4, tag="large"), signature(cpus=2, tag="half")
GPU, PAIR = signature(gpus=1, vram=1000, tag="gpu"), signature(gpus=2, vram=1000, tag="pair")
HEAVY = signature(memory=60_000, tag="heavy")
SIGNATURES = (SMALL, LARGE, HALF, GPU, PAIR, HEAVY)
FITS: dict[str, tuple[int, ...]] = {sig: (0,) if sig in (GPU, PAIR) else () for sig in SIGNATURES}
ONLY_SMALL: dict[str, tuple[int, ...]] = {SMALL: ()}
CARDS = tuple(DeviceLot(f"G{n}", 0, 0, 8000) for n in range(3))


@pytest.fixture
def clock(link: Link) -> Iterator[Clock]:
    with virtual_library(link) as clock:
        clock.draw_in_order()
        yield clock


@pytest.fixture
def hand(link: Link, root: str, clock: Clock) -> Iterator[Hand]:
    hand = Hand(link, root)
    for sig in SIGNATURES:
        hand.introduce(sig, {})
    hand.tick()
    yield hand
    assert violations(snapshot.read(link, root)) == []


def worker(hand: Hand, name: str = "w1", fits: dict[str, tuple[int, ...]] = FITS, **facts: Any) -> Machine:
    """A machine with four CPUs, unless said otherwise, that has claimed once."""
    machine = hand.machine(name, fits, **{"slots": 4, "node_cpus": 4, **facts})
    hand.claim(machine)
    return machine


def earmarks(hand: Hand) -> dict[str, str]:
    """Machine → the job that it is kept for."""
    return {
        node: text.split(" ")[0]
        for node, text in snapshot.read(hand.link, hand.root).hashes.get("earmarks", {}).items()
    }


def pass_time(hand: Hand, clock: Clock, machines: list[Machine], for_ms: int) -> None:
    """Everybody's heart goes on beating."""
    for _ in range(0, for_ms, LOOK_MS):
        clock.advance(LOOK_MS)
        for machine in machines:
            hand.renew(machine)
        hand.tick()


def run_two(hand: Hand, machine: Machine, **facts: Any) -> None:
    """Two small jobs, neither of whose ends alone makes room for a large one."""
    for _ in range(2):
        hand.submit(SMALL, **facts)
    assert len(hand.claim(machine, 2)) == 2


def starve(hand: Hand, clock: Clock, *machines: Machine, sig: str = LARGE, **facts: Any) -> str:
    """The id of a job that has waited long enough; on each of these machines two small jobs run."""
    for machine in machines:
        run_two(hand, machine)
    job = hand.submit(sig, **facts)
    pass_time(hand, clock, list(machines), WAIT_MS + LOOK_MS)
    return job


def end(hand: Hand, machine: Machine, count: int = 1) -> None:
    for grant in list(machine.held.values())[:count]:
        hand.commit(machine, grant)


def end_all(hand: Hand, machine: Machine) -> None:
    end(hand, machine, len(machine.held))


def ids(grants: tuple[Grant, ...]) -> list[str]:
    return [grant.id for grant in grants]


# Who gets one -----------------------------------------------------------------------------------------------------


def test_a_job_that_fits_but_finds_no_room_has_a_machine_kept_for_it_when_it_has_waited_for_a_minute(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand)
    run_two(hand, machine)
    job = hand.submit(LARGE)

    pass_time(hand, clock, [machine], WAIT_MS - LOOK_MS)
    assert earmarks(hand) == {}
    pass_time(hand, clock, [machine], 2 * LOOK_MS)

    assert earmarks(hand) == {"w1": job}
    assert hand.get(job, "earmark") == "w1"


def test_the_namespace_says_how_long_a_job_waits_for_it_and_zero_is_for_ever(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand)
    hand.link.call("HSET", hand.key("config"), "earmark_ms", 0)
    job = starve(hand, clock, machine)
    assert earmarks(hand) == {}

    hand.link.call("HSET", hand.key("config"), "earmark_ms", 1000)
    pass_time(hand, clock, [machine], LOOK_MS)
    assert earmarks(hand) == {"w1": job}

    hand.link.call("HSET", hand.key("config"), "earmark_ms", 0)
    hand.tick()
    assert earmarks(hand) == {}


def test_a_job_that_asks_for_no_more_than_what_runs_there_needs_none(hand: Hand, clock: Clock) -> None:
    """A line of equal jobs, however long, is served from its head."""
    machine = worker(hand)
    for _ in range(9):
        hand.submit(SMALL)
    hand.claim(machine)
    pass_time(hand, clock, [machine], 2 * WAIT_MS)

    assert len(machine.held) == 4
    assert earmarks(hand) == {}


def test_one_small_job_at_a_time_is_enough_to_keep_a_large_one_waiting_and_for_an_earmark(
    hand: Hand, clock: Clock
) -> None:
    machine = worker(hand)
    hand.submit(SMALL)
    hand.claim(machine, 1)
    job = hand.submit(LARGE)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)

    assert earmarks(hand) == {"w1": job}


def test_a_job_that_no_worker_could_ever_hold_gets_none(hand: Hand, clock: Clock) -> None:
    starve(hand, clock, worker(hand, slots=3))
    assert earmarks(hand) == {}


def test_it_is_made_for_the_job_that_the_worker_would_take_if_it_were_empty(hand: Hand, clock: Clock) -> None:
    """Age decides among an owner's jobs, and the owner who holds least goes before the others."""
    machine = worker(hand)
    hand.submit(HALF, owner="bob")
    hand.submit(SMALL, owner="bob")
    hand.claim(machine)
    hand.submit(LARGE, owner="bob")
    first = hand.submit(LARGE, owner="ann")
    hand.submit(LARGE, owner="ann")

    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)

    assert earmarks(hand) == {"w1": first}


def test_a_small_job_whose_turn_is_first_is_not_overtaken_by_an_earmark(hand: Hand, clock: Clock) -> None:
    machine = worker(hand)
    for _ in range(5):
        hand.submit(SMALL)
    hand.claim(machine)
    hand.submit(LARGE)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)

    assert earmarks(hand) == {}


def test_a_more_important_job_takes_the_place_of_a_less_important_one(hand: Hand, clock: Clock) -> None:
    machine = worker(hand)
    job = starve(hand, clock, machine)
    urgent = hand.submit(LARGE, priority=1)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)

    assert earmarks(hand) == {"w1": urgent}
    assert hand.get(job, "earmark") == ""


def test_two_large_jobs_have_a_machine_each_and_a_third_none(hand: Hand, clock: Clock) -> None:
    machines = [worker(hand, name) for name in ("w1", "w2")]
    for machine in machines:
        run_two(hand, machine)
    one, two, three = (hand.submit(LARGE, owner=owner) for owner in ("ann", "bob", "eve"))
    pass_time(hand, clock, machines, WAIT_MS + LOOK_MS)

    assert sorted(earmarks(hand).values()) == sorted([one, two])
    for machine in machines:
        end_all(hand, machine)
        assert len(hand.claim(machine)) == 1
    for machine in machines:
        end_all(hand, machine)
    assert ids(hand.claim(machines[0])) == [three]


def test_equal_jobs_of_one_owner_have_a_machine_each_and_who_goes_first_leaves_its_own_to_the_next(
    hand: Hand, clock: Clock
) -> None:
    machines = {name: worker(hand, name) for name in ("w1", "w2")}
    for machine in machines.values():
        run_two(hand, machine)
    jobs = [hand.submit(LARGE) for _ in range(3)]
    pass_time(hand, clock, list(machines.values()), WAIT_MS + LOOK_MS)
    found = earmarks(hand)
    assert sorted(found.values()) == sorted(jobs[:2])
    second = next(node for node, job in found.items() if job == jobs[1])
    first = next(node for node, job in found.items() if job == jobs[0])

    end_all(hand, machines[second])
    assert ids(hand.claim(machines[second])) == jobs[:1]
    assert earmarks(hand) == {first: jobs[1]}
    end_all(hand, machines[first])
    assert ids(hand.claim(machines[first])) == [jobs[1]]


def test_what_is_kept_for_an_owner_counts_as_held_by_it(hand: Hand, clock: Clock) -> None:
    machines = [worker(hand, name) for name in ("w1", "w2")]
    for machine in machines:
        run_two(hand, machine, owner=machine.id)
    ann = [hand.submit(LARGE, owner="ann") for _ in range(2)]
    bob = [hand.submit(LARGE, owner="bob") for _ in range(2)]
    pass_time(hand, clock, machines, WAIT_MS + LOOK_MS)

    assert sorted(earmarks(hand).values()) == sorted([ann[0], bob[0]])


def test_the_machine_that_is_nearest_to_having_room_is_kept(hand: Hand, clock: Clock) -> None:
    full, nearly = worker(hand, "w1"), worker(hand, "w2")
    hand.submit(HALF)
    hand.claim(full, 1)
    job = starve(hand, clock, full, nearly)

    assert earmarks(hand) == {"w2": job}


def test_64_machines_are_kept_at_most(hand: Hand, clock: Clock) -> None:
    machines = [worker(hand, f"w{n:02}") for n in range(70)]
    for machine in machines:
        run_two(hand, machine)
    for n in range(70):
        hand.submit(LARGE, owner=f"o{n}", priority=2 + n % 2)
    pass_time(hand, clock, machines, WAIT_MS + 9 * LOOK_MS)

    assert len(earmarks(hand)) == 64


# What it keeps ----------------------------------------------------------------------------------------------------


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


def test_a_job_passes_whose_timeout_ends_before_what_runs_there_does(hand: Hand, clock: Clock) -> None:
    machine = worker(hand)
    run_two(hand, machine, timeout_ms=600_000)
    job = hand.submit(LARGE)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    assert earmarks(hand) == {"w1": job}
    hand.claim(machine)
    long, unknown = hand.submit(SMALL, timeout_ms=600_000), hand.submit(SMALL, owner="bob")
    assert hand.claim(machine) == ()

    short = hand.submit(SMALL, owner="eve", timeout_ms=300_000)

    assert machine.id in hand.rung()
    assert ids(hand.claim(machine)) == [short]
    assert {hand.state(each) for each in (long, unknown)} == {"queued"}


@pytest.fixture
def passed_by(hand: Hand, clock: Clock) -> tuple[Machine, Machine, str, str]:
    """A kept machine that sleeps, a small worker that is full, and in one line a long job and a short one."""
    machine = worker(hand)
    run_two(hand, machine, timeout_ms=7_200_000)
    job = hand.submit(LARGE)
    pass_time(hand, clock, [machine], WAIT_MS + LOOK_MS)
    assert earmarks(hand) == {"w1": job}
    hand.claim(machine)
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


# When it goes -----------------------------------------------------------------------------------------------------


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


# Others -----------------------------------------------------------------------------------------------------------


def test_an_owner_of_large_jobs_takes_turns_with_an_owner_of_small_ones(hand: Hand, clock: Clock) -> None:
    """Neither starves: whoever holds least is first in line for the machine, and so for the earmark."""
    machine, begun = worker(hand), {"ann": 0, "bob": 0}
    for _ in range(12):
        hand.submit(LARGE, owner="ann")
        for _ in range(8):
            hand.submit(SMALL, owner="bob")
    for _ in range(90):
        for grant in hand.claim(machine):
            begun[grant.owner] += 1
        clock.advance(2 * LOOK_MS)
        hand.renew(machine)
        hand.tick()
        end(hand, machine, 2)

    assert begun["ann"] >= 5
    assert begun["bob"] >= 20


def test_a_claim_where_nothing_is_kept_costs_as_many_commands_as_ever(hand: Hand) -> None:
    """The ledger that says so is read anyway."""
    machine = worker(hand)
    hand.submit(SMALL)
    hand.link.call("CONFIG", "RESETSTAT")
    hand.run(fn.claim(replace(machine).offer(1)))
    stats = hand.link.call("INFO", "commandstats").decode()

    assert "cmdstat_hvals:calls=1," in stats


def commands_of_a_submit(hand: Hand) -> int:
    cost = cost_of(hand, fn.submit(Submission(new_job_id(), SMALL, b"spec", owner="me")))
    return cost.commands.total()


@pytest.mark.rule_09
def test_a_submit_costs_the_same_however_many_machines_are_kept_and_owners_wait(
    hand: Hand, clock: Clock
) -> None:
    """What the kept rooms are compared with is read once, of the job's own line, and they are read many at once."""
    machines = [worker(hand, f"m{n:02}") for n in range(64)]
    for machine in machines:
        run_two(hand, machine, timeout_ms=7_200_000)
    for machine in machines:
        assert hand.claim(machine) == ()
    without = commands_of_a_submit(hand)
    (rung,) = hand.rung()
    one = next(m for m in machines if m.id == rung)
    (grant,) = hand.claim(one)
    hand.commit(one, grant)
    for n in range(64):
        hand.submit(LARGE, owner=f"big{n}")
    pass_time(hand, clock, machines, WAIT_MS + 9 * LOOK_MS)
    for machine in machines:
        assert hand.claim(machine) == ()
    for n in range(64):
        hand.submit(SMALL, owner=f"o{n}")
    assert (len(earmarks(hand)), hand.rung()) == (64, set())

    assert commands_of_a_submit(hand) <= without + 10


# Damage -----------------------------------------------------------------------------------------------------------


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
