"""Earmarks: which job gets one, of which machine, and what that costs everybody else.

A job that needs much of one busy machine gets its turn, and nothing else suffers for it. What the words of
`lua/h_earmarking.lua` say is a test each.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import new_job_id
from tests.queueing import Hand
from tests.rules.costs import cost_of
from tests.virtual import Clock

from .scene import (
    HALF,
    LARGE,
    LOOK_MS,
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
