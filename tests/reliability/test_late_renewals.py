"""A renewal that reaches the queue long after it was made: what its worker was granted meanwhile stays its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from gpulayer_broker.attempts import Attempt, Attempts
from gpulayer_broker.connection import Link
from gpulayer_broker.heartbeat import Heartbeat
from gpulayer_broker.queue import Queue
from gpulayer_broker.settings import Settings
from tests.queueing import Hand, claims_of, signature
from tests.reliability.proxy import Proxy
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until

CPU = signature()
BEAT_MS, LATE_S = 20, 0.5


@dataclass
class Worker:
    """Its heartbeat goes through the proxy, its claims go straight."""

    hand: Hand
    straight: Queue
    slow: Queue
    attempts: Attempts = field(default_factory=Attempts)
    delivered: list[Attempt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hand.introduce(CPU, {})
        self.hand.machine("w1", {CPU: ()})
        self.hand.link.call("HSET", self.hand.key("worker:w1"), "heartbeat_ms", BEAT_MS)
        self.claims = claims_of(self.straight, self.attempts, self.delivered.append)
        self.heartbeat = Heartbeat(
            self.slow,
            self.attempts,
            Settings(),
            worker="w1",
            incarnation="i1",
            register=lambda: None,
            on_lease=lambda _: None,
            on_superseded=lambda: None,
            known=lambda: self.claims.known,
        )
        self.claims.open(8)


@pytest.fixture
def worker(server: QueueServer, proxy: Proxy) -> Iterator[Worker]:
    straight, slow = Queue(Link(server.endpoint)), Queue(Link(proxy.endpoint, socket_timeout_s=PATIENCE_S))
    yield Worker(Hand(straight.link, straight.keys.root), straight, slow)
    straight.link.close()
    slow.link.close()


def granted_ms_ago(hand: Hand, job: str) -> int:
    seconds, micros = hand.link.call("TIME")
    return int(seconds) * 1000 + int(micros) // 1000 - int(hand.get(job, "granted_ms"))


def test_a_renewal_made_before_a_grant_came_does_not_give_it_to_another(worker: Worker, proxy: Proxy) -> None:
    """As when a worker is stopped between the making and the sending of its renewal, and claims in between."""
    hand = worker.hand
    job = hand.submit(CPU)
    proxy.delay_s = LATE_S
    beat = threading.Thread(target=worker.heartbeat.beat)
    beat.start()
    wait_until(lambda: bool(proxy._sockets), PATIENCE_S, "the renewal is on its way")

    assert worker.claims.claim() == 1
    token = worker.delivered[0].token
    beat.join(PATIENCE_S)

    assert granted_ms_ago(hand, job) > 2 * BEAT_MS, "long enough that silence about it would count"
    assert (hand.state(job), hand.get(job, "token")) == ("running", token)
    assert hand.claim(hand.machine("w2", {CPU: ()})) == ()


def test_what_a_worker_was_told_of_and_does_not_run_goes_to_another(worker: Worker) -> None:
    hand = worker.hand
    job = hand.submit(CPU)
    assert worker.claims.claim() == 1
    worker.attempts.remove(worker.delivered[0])
    wait_until(lambda: granted_ms_ago(hand, job) > 2 * BEAT_MS, PATIENCE_S, "a heartbeat has passed")

    worker.heartbeat.beat()

    assert hand.state(job) == "queued"
