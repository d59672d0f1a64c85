"""A worker's claims when the queue has moved on: a place that comes free late is filled all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gpulayer_broker.attempts import Attempt
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.functions import CallEnding, CallsEnding, Ending
from gpulayer_broker.queue import Queue
from tests.queueing import Claimer, Hand, signature

CPU = signature()


@dataclass
class Worker(Claimer):
    """One that holds one job at a time."""

    def __post_init__(self) -> None:
        self.joins(CPU, slots=1, capacity=1)

    def loses_its_job(self) -> Attempt:
        """Its lease ran out; the bell for the room rang, and was answered, while the worker did not know of it."""
        self.hand.submit(CPU)
        assert self.claims.claim() == 1
        attempt = self.delivered.pop()
        self.hand.expire(attempt.id)
        self.hand.tick()
        assert self.hand.rung() == {"w1"}
        assert self.claims.claim() == 0
        return attempt


@pytest.fixture
def worker(link: Link, root: str, valkey: Endpoint, namespace: str) -> Iterator[Worker]:
    queue = Queue(Link(valkey), namespace)
    yield Worker(Hand(link, root), queue)
    queue.link.close()


def test_a_worker_that_gives_back_what_was_not_its_own_any_more_takes_the_next_job(worker: Worker) -> None:
    attempt = worker.loses_its_job()

    assert worker.claims.release((attempt,), "returned") == ["stale"]

    assert [a.id for a in worker.delivered] == [attempt.id]


def test_a_worker_whose_report_is_refused_takes_the_next_job(worker: Worker) -> None:
    attempt = worker.loses_its_job()
    ending = Ending(attempt.id, attempt.token, "failed", "undecodable")

    assert worker.claims.commit((attempt,), ending, claim_next=False).verdict == "stale"

    assert [a.id for a in worker.delivered] == [attempt.id]


def test_a_worker_without_room_brings_no_next_job_with_its_report(worker: Worker) -> None:
    worker.hand.submit(CPU)
    assert worker.claims.claim() == 1
    attempt = worker.delivered.pop()
    worker.hand.submit(CPU)
    worker.claims.has_room = lambda: False

    committed = worker.claims.commit((attempt,), Ending(attempt.id, attempt.token, "failed", "undecodable"))

    assert committed.verdict == "ok"
    assert worker.delivered == []
    worker.claims.has_room = lambda: True
    assert worker.claims.claim() == 1


def test_calls_that_ride_together_take_one_place_and_are_delivered_with_the_first(worker: Worker) -> None:
    worker.hand.machine("w1", {CPU: ()}, slots=2)
    worker.claims.open(2)
    worker.hand.link.call("SET", worker.hand.key("lane:l"), "1000", "PX", 60_000)
    jobs = [worker.hand.submit(CPU, lane="l") for _ in range(80)]

    worker.claims.claim()

    rides = [[attempt.id, *(rider.id for rider in attempt.riders)] for attempt in worker.delivered]
    assert rides == [jobs[:10], jobs[10:20]]
    assert worker.claims.free == 0
    first = worker.delivered[0]
    ended = (first, *first.riders)
    calls = tuple(CallEnding(Ending(a.id, a.token, "succeeded")) for a in ended)
    worker.claims.commit(ended, CallsEnding(calls))
    assert len(worker.delivered) == 3
    assert worker.attempts.slots() == 2
