"""What time does: leases, outages and jumps of the clock, seen through `tick` under a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link
from tests import snapshot
from tests.checker import violations
from tests.queueing import GRACE_MS, HEARTBEAT_MS, LEASE_MS, NO_RETENTION, Hand, signature
from tests.virtual import Clock, virtual_library

CPU = signature()
YEAR_MS = 365 * 86_400_000


@pytest.fixture
def clock(link: Link) -> Iterator[Clock]:
    with virtual_library(link) as clock:
        yield clock


@pytest.fixture
def hand(link: Link, root: str, clock: Clock) -> Hand:
    hand = Hand(link, root)
    hand.introduce(CPU, {})
    hand.tick()
    return hand


def ticks(hand: Hand, clock: Clock, for_ms: int) -> int:
    """Ticks a third of a lease apart; how many leases were reaped."""
    reaped = 0
    for _ in range(0, for_ms, LEASE_MS // 3):
        clock.advance(LEASE_MS // 3)
        reaped += hand.tick().reaped
    return reaped


def test_a_job_moves_on_only_after_lease_and_grace(hand: Hand, clock: Clock) -> None:
    job = hand.submit(CPU)
    hand.claim(hand.machine("w1", {CPU: ()}))

    clock.advance(LEASE_MS // 2)
    hand.tick()
    clock.advance(LEASE_MS // 2 + GRACE_MS - 1 - LEASE_MS // 2)
    hand.tick()
    clock.advance(LEASE_MS // 2)
    assert hand.tick().reaped == 0
    clock.advance(1)
    assert hand.tick().reaped == 1
    assert hand.state(job) == "queued"


def test_after_an_outage_every_lease_gets_its_full_length_once_and_the_clock_sleeps_meanwhile(
    hand: Hand, clock: Clock
) -> None:
    job = hand.submit(CPU)
    hand.claim(hand.machine("w1", {CPU: ()}))
    clock.advance(10 * LEASE_MS)

    ticked = hand.tick()

    assert (ticked.reaped, hand.state(job)) == (0, "running")
    assert ticked.next_ms == LEASE_MS // 3
    assert ticks(hand, clock, LEASE_MS) == 1


@pytest.mark.parametrize("jump_ms", [-3_600_000, 3_600_000, 10 * YEAR_MS])
def test_a_jump_of_the_clock_ends_no_attempt(hand: Hand, clock: Clock, jump_ms: int) -> None:
    hand.submit(CPU)
    worker = hand.machine("w1", {CPU: ()})
    (grant,) = hand.claim(worker)
    ticks(hand, clock, LEASE_MS // 2)

    clock.set(max(1, clock.now_ms + jump_ms))
    assert hand.tick().reaped == 0
    hand.renew(worker)
    assert ticks(hand, clock, LEASE_MS // 2) == 0
    assert hand.commit(worker, grant).verdict == "ok"
    assert violations(snapshot.read(hand.link, hand.root)) == []


def test_a_job_that_may_outlive_an_outage_keeps_its_devices_until_it_is_cancelled(
    hand: Hand, clock: Clock
) -> None:
    job = hand.submit(CPU, on_outage="keep")
    hand.claim(hand.machine("w1", {CPU: ()}))

    assert ticks(hand, clock, 4 * LEASE_MS) == 0
    hand.run(fn.cancel(job))
    assert ticks(hand, clock, 2 * LEASE_MS) == 1
    assert hand.state(job) == "cancelled"


def test_a_delayed_job_rings_the_keeper_and_runs_when_it_is_due(hand: Hand, clock: Clock) -> None:
    worker = hand.machine("w1", {CPU: ()})
    assert hand.renew(worker).keeper
    hand.submit(CPU, delay_ms=5000)

    assert "timer" in hand.mail("w1")
    assert (hand.tick().next_ms, hand.claim(worker)) == (5000, ())
    clock.advance(5000)
    hand.tick()
    assert len(hand.claim(worker)) == 1


def test_an_unanswered_bell_rings_another_worker(hand: Hand, clock: Clock) -> None:
    for name in ("w1", "w2"):
        hand.claim(hand.machine(name, {CPU: ()}))
    hand.submit(CPU)
    assert sorted([hand.mail("w1"), hand.mail("w2")]) == [[], ["work"]]

    clock.advance(501)

    assert hand.tick().rung == 1
    assert [hand.mail("w1"), hand.mail("w2")] == [["work"], ["work"]]


def test_many_results_that_are_due_together_are_dropped_without_a_pause(hand: Hand, clock: Clock) -> None:
    worker = hand.machine("w1", {CPU: ()})
    jobs = [hand.submit(CPU) for _ in range(150)]
    for _ in jobs:
        (grant,) = hand.claim(worker, 1)
        hand.commit(worker, grant, fields={"result": b"42"})
    hand.link.call("HSET", hand.key("config"), "result_keep_ms", 500)

    clock.advance(1000)
    ticked = [hand.tick() for _ in range(3)]

    assert [tick.faded for tick in ticked] == [100, 50, 0]
    assert [tick.next_ms > 0 for tick in ticked] == [False, True, True]
    assert {hand.get(job, "result") for job in jobs} == {""}


def test_what_is_past_its_retention_leaves_with_all_its_keys(hand: Hand, clock: Clock) -> None:
    job = hand.submit(CPU, idempotency_key="k", digest="d", client="c1")
    worker = hand.machine("w1", {CPU: ()})
    (grant,) = hand.claim(worker)
    hand.run(fn.log(job, grant.token, 0, "out", 0, b"x"))
    hand.commit(worker, grant, fields={"result": b"42"})

    clock.advance(1000)
    hand.run(fn.tick(older_than_ms=NO_RETENTION, results_older_than_ms=500))
    assert (hand.state(job), hand.get(job, "result")) == ("succeeded", "")
    assert hand.run(fn.tick(older_than_ms=500, results_older_than_ms=500)).purged == 1

    names = {name for keys in vars(snapshot.read(hand.link, hand.root)).values() for name in keys}
    assert not [name for name in names if job in name or name.startswith(("jobs:", "idem:", "log:"))]


def test_a_worker_silent_for_a_day_and_its_class_are_forgotten(hand: Hand, clock: Clock) -> None:
    hand.claim(hand.machine("w1", {CPU: ()}))
    clock.advance(3 * 86_400_000)
    ticks(hand, clock, 2 * LEASE_MS)

    found = snapshot.read(hand.link, hand.root)
    assert not [n for keys in vars(found).values() for n in keys if "w1" in n or "k1" in n or n == "room"]
    assert found.hashes.get("classcaps", {}) == found.hashes.get("signatures", {}) == {}


def test_a_worker_that_slept_for_days_with_a_job_is_asked_to_register_and_gets_work_again(
    hand: Hand, clock: Clock
) -> None:
    job = hand.submit(CPU, on_outage="keep")
    worker = hand.machine("w1", {CPU: ()})
    (grant,) = hand.claim(worker)
    clock.advance(3 * 86_400_000)
    ticks(hand, clock, 2 * LEASE_MS)

    assert not hand.renew(worker).known
    hand.introduce(CPU, {})
    hand.register(worker, {CPU: ()})
    assert hand.renew(worker).known
    second = hand.submit(CPU)
    assert [g.id for g in hand.claim(worker)] == [second]
    assert (grant.id, hand.commit(worker, grant).verdict) == (job, "ok")


def test_a_worker_that_has_been_silent_is_not_rung(hand: Hand, clock: Clock) -> None:
    for name in ("silent", "alive"):
        hand.claim(hand.machine(name, {CPU: ()}))
    clock.advance(3 * HEARTBEAT_MS)
    hand.claim(hand.machine("alive"))

    hand.submit(CPU)
    hand.submit(CPU)

    assert (hand.mail("silent"), hand.mail("alive")) == ([], ["work"])


def test_a_worker_on_which_three_different_jobs_died_is_set_aside_for_a_while(
    hand: Hand, clock: Clock
) -> None:
    worker = hand.machine("w1", {CPU: ()}, slots=1)
    hand.machine("w2", class_id="other")
    for n in range(3):
        hand.submit(CPU, priority=3 - n)
        hand.claim(worker)
        worker.incarnation = f"i{n}x"
        hand.register(worker)

    assert hand.claim(worker) == ()
    clock.advance(600_001)
    assert len(hand.claim(worker)) == 1


def test_the_last_worker_that_takes_jobs_is_not_set_aside_too(hand: Hand, clock: Clock) -> None:
    workers = [hand.machine(name, {CPU: ()}, slots=1) for name in ("w1", "w2")]
    for worker in workers:
        for n in range(3):
            job = hand.submit(CPU)
            assert [grant.id for grant in hand.claim(worker)] == [job]
            worker.incarnation = f"{worker.id}{n}"
            hand.register(worker)
            hand.run(fn.cancel(job))
    hand.submit(CPU)

    assert [len(hand.claim(worker)) for worker in workers] == [0, 1]
