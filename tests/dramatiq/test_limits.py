"""Dramatiq's rate limiters and barriers work beside the queue, on the same server."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import dramatiq
import pytest
from dramatiq.rate_limits import Barrier, BucketRateLimiter, ConcurrentRateLimiter, WindowRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import plain_client
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS


@pytest.fixture
def backend(broker: CapabilityBroker) -> Iterator[RedisBackend]:
    client = plain_client(broker.endpoint)
    yield RedisBackend(client=client)
    client.close()


def test_a_concurrent_rate_limiter_holds_across_threads(
    broker: CapabilityBroker, start: Start, backend: RedisBackend, namespace: str
) -> None:
    limiter = ConcurrentRateLimiter(backend, f"mutex-{namespace}", limit=1)
    at_once, most, lock = [0], [0], threading.Lock()
    done: list[int] = []

    @dramatiq.actor(max_retries=100_000, min_backoff=5, max_backoff=20)
    def alone(n: int) -> None:
        with limiter.acquire():
            with lock:
                at_once[0] += 1
                most[0] = max(most[0], at_once[0])
            threading.Event().wait(0.02)
            with lock:
                at_once[0] -= 1
            done.append(n)

    for n in range(8):
        alone.send(n)
    start(threads=4)
    broker.join("default", timeout=PATIENCE_MS)

    assert sorted(done) == list(range(8))
    assert most == [1]


def test_a_window_rate_limiter_refuses_what_is_too_much(
    broker: CapabilityBroker, start: Start, backend: RedisBackend, namespace: str
) -> None:
    limiter = WindowRateLimiter(backend, f"window-{namespace}", limit=3, window=60)
    got: list[bool] = []

    @dramatiq.actor
    def ask() -> None:
        with limiter.acquire(raise_on_failure=False) as acquired:
            got.append(acquired)

    for _ in range(5):
        ask.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert sorted(got) == [False, False, True, True, True]


def test_a_bucket_rate_limiter_refuses_what_is_too_much(
    broker: CapabilityBroker, start: Start, backend: RedisBackend, namespace: str
) -> None:
    day_ms = 86_400_000
    limiter = BucketRateLimiter(backend, f"bucket-{namespace}", limit=2, bucket=day_ms)
    got: list[bool] = []

    @dramatiq.actor
    def ask() -> None:
        with limiter.acquire(raise_on_failure=False) as acquired:
            got.append(acquired)

    for _ in range(4):
        ask.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert sorted(got) == [False, False, True, True]


def test_the_last_of_those_that_wait_at_a_barrier_knows_it(
    broker: CapabilityBroker, start: Start, backend: RedisBackend, namespace: str
) -> None:
    barrier = Barrier(backend, f"barrier-{namespace}", ttl=60_000)
    barrier.create(parties=4)
    told: list[bool] = []

    @dramatiq.actor
    def sub_task() -> None:
        told.append(barrier.wait(block=False))

    for _ in range(4):
        sub_task.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert sorted(told) == [False, False, False, True]
