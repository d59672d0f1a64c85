"""Groups: their callbacks enter the queue with the commit of the last child that succeeds, and with no other."""

from __future__ import annotations

import pytest

from gpulayer_broker import functions as fn
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import new_job_id
from tests.queueing import Hand, Machine, signature

CPU = signature()
LIFE_MS = 60_000


@pytest.fixture
def worker(hand: Hand) -> Machine:
    return hand.machine("w1", {CPU: ()}, slots=8)


def commit_child(hand: Hand, worker: Machine, child: str, callback: str, verdict: str = "succeeded") -> None:
    """Commits a child of group g, whose only callback is this one."""
    outbox = [Submission(callback, CPU, b"")]
    hand.commit(worker, worker.held[child], verdict, fields={"barrier": "g 1"}, outbox=outbox)


def test_the_callback_enters_with_the_last_child(hand: Hand, worker: Machine) -> None:
    children, callback = [hand.submit(CPU) for _ in range(3)], new_job_id()
    hand.run(fn.barrier("g", 3, LIFE_MS))
    hand.claim(worker)

    for child in children:
        assert hand.state(callback) == ""
        commit_child(hand, worker, child, callback)

    assert hand.state(callback) == "queued"
    assert not hand.link.call("EXISTS", hand.key("barrier:g"))


@pytest.mark.parametrize("verdict", ["failed", "timed_out", "cancelled", "retry"])
def test_a_child_that_did_not_succeed_lets_nothing_in(hand: Hand, worker: Machine, verdict: str) -> None:
    children, callback = [hand.submit(CPU) for _ in range(2)], new_job_id()
    hand.run(fn.barrier("g", 2, LIFE_MS))
    hand.claim(worker)

    commit_child(hand, worker, children[0], callback)
    commit_child(hand, worker, children[1], callback, verdict)

    assert hand.state(callback) == ""


def test_a_group_that_is_announced_twice_keeps_its_count(hand: Hand, worker: Machine) -> None:
    children, callback = [hand.submit(CPU) for _ in range(2)], new_job_id()
    assert hand.run(fn.barrier("g", 2, LIFE_MS)) == "ok"
    hand.claim(worker)
    commit_child(hand, worker, children[0], callback)

    assert hand.run(fn.barrier("g", 2, LIFE_MS)) == "existing"

    commit_child(hand, worker, children[1], callback)
    assert hand.state(callback) == "queued"
