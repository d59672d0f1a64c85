"""The settings that the queue itself keeps for a namespace: each has its effect, and only what is said changes."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.settings import DAY_S, Settings
from tests.queueing import Hand, signature
from tests.virtual import virtual_library

SIG = signature()


@pytest.fixture
def hand(link: Link, root: str) -> Hand:
    hand = Hand(link, root)
    hand.introduce(SIG, {})
    return hand


@pytest.fixture
def queue(link: Link, namespace: str) -> Queue:
    return Queue(link, namespace)


def kept(hand: Hand) -> dict[str, str]:
    flat = [each.decode() for each in hand.link.call("HGETALL", hand.key("config"))]
    return dict(zip(flat[::2], flat[1::2], strict=True))


def rung_for_each_of_three(hand: Hand) -> list[str]:
    """Which of three equal workers is woken for each of three jobs, every one of which runs on."""
    machines = {name: hand.machine(name, {SIG: ()}, slots=8) for name in ("w0", "w1", "w2")}
    for machine in machines.values():
        hand.claim(machine)
    woken = []
    for _ in range(3):
        hand.submit(SIG)
        [worker] = map(bytes.decode, hand.link.call("ZRANGE", hand.key("rung"), 0, -1))
        assert len(hand.claim(machines[worker])) == 1
        woken.append(worker)
    return woken


def test_spread_wakes_the_least_busy_and_is_the_default(hand: Hand) -> None:
    assert len(set(rung_for_each_of_three(hand))) == 3


def test_pack_wakes_the_busiest_that_has_room(hand: Hand, queue: Queue) -> None:
    queue.configure(Settings(placement="pack"))

    assert len(set(rung_for_each_of_three(hand))) == 1


def test_a_full_queue_is_as_long_as_its_setting_says(hand: Hand, queue: Queue) -> None:
    queue.configure(Settings(queued_jobs=2))

    answers = [hand.run(fn.submit(Submission(new_job_id(), SIG, b"spec"))).outcome for _ in range(3)]
    assert answers == ["added", "added", "full"]


def test_the_live_tail_is_as_long_as_its_setting_says(hand: Hand, queue: Queue) -> None:
    queue.configure(Settings(log_tail_bytes=100_000))
    job = hand.submit(SIG)
    [grant] = hand.claim(hand.machine("w0", {SIG: ()}))
    for at in range(0, 1_000_000, 10_000):
        assert hand.run(fn.log(job, grant.token, 0, "out", at, b"x" * 10_000)) == "ok"

    entries = hand.link.call("XRANGE", hand.key(f"log:{job}:1:0"), "-", "+")
    held = sum(len(dict(zip(values[::2], values[1::2], strict=True)).get(b"d", b"")) for _, values in entries)
    assert 90_000 <= held <= 200_000


def test_whoever_changes_nothing_writes_nothing(hand: Hand, queue: Queue) -> None:
    queue.configure(Settings(placement="pack", lost_workers=7))
    queue.configure(Settings(), changed_only=True)
    assert (kept(hand)["placement"], kept(hand)["lost_workers"]) == ("pack", "7")

    queue.configure(Settings(lost_workers=9), changed_only=True)
    assert (kept(hand)["placement"], kept(hand)["lost_workers"]) == ("pack", "9")

    queue.configure(Settings())
    assert kept(hand) == {
        "placement": "spread",
        "lost_workers": "3",
        "max_queued": "2000000",
        "log_tail": "1048576",
        "lease_ms": "60000",
        "earmark_ms": "60000",
        "job_keep_ms": "2592000000",
        "result_keep_ms": "604800000",
    }


def test_records_and_results_last_as_long_as_the_namespace_says_whoever_keeps_its_clock(
    hand: Hand, queue: Queue
) -> None:
    worker = hand.machine("w0", {SIG: ()})
    with virtual_library(hand.link) as clock:
        jobs = []
        for keep in (
            Settings(job_keep_s=DAY_S / 4, result_keep_s=DAY_S / 8),
            Settings(job_keep_s=60, result_keep_s=10),
        ):
            queue.configure(keep)
            jobs.append(hand.submit(SIG))
            hand.commit(worker, hand.claim(worker, 1)[0], fields={"result": b"42"})
            clock.advance(int(keep.result_keep_s * 1000) - 1)
            hand.tick()
            assert hand.get(jobs[-1], "result") == "42"
            clock.advance(2)
            hand.tick()
            assert (hand.state(jobs[-1]), hand.get(jobs[-1], "result")) == ("succeeded", "")
            clock.advance(int((keep.job_keep_s - keep.result_keep_s) * 1000))
            hand.tick()
            assert hand.state(jobs[-1]) == ""


def test_a_lease_lasts_after_an_outage_as_long_as_the_namespace_says(hand: Hand, queue: Queue) -> None:
    queue.configure(Settings(lease_s=6, heartbeat_s=2))
    with virtual_library(hand.link) as clock:
        hand.tick()
        job, worker = hand.submit(SIG), hand.machine("w0", {SIG: ()})
        hand.claim(worker)
        hand.expire(job)
        clock.advance(3001)
        assert hand.tick().reaped == 0
        for _ in range(3):
            clock.advance(2000)
            reaped = hand.tick().reaped

    assert reaped == 1
