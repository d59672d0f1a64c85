"""The Dramatiq broker: real workers, real middleware, and one commit that ends a message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import SkipMessage

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint
from gpulayer_broker.errors import BadRequirement
from gpulayer_broker.settings import Settings
from tests.support import PATIENCE_MS, PATIENCE_S, in_background, wait_until

Start = Callable[..., dramatiq.Worker]


@pytest.fixture
def broker(valkey: Endpoint, namespace: str) -> Iterator[CapabilityBroker]:
    settings = Settings(namespace=namespace, lease_s=4, heartbeat_s=0.4, lease_grace_s=1)
    broker = CapabilityBroker(valkey, settings=settings)
    yield broker
    broker.close()


@pytest.fixture
def start(broker: CapabilityBroker) -> Iterator[Start]:
    workers: list[dramatiq.Worker] = []

    def start(threads: int = 2) -> dramatiq.Worker:
        worker = dramatiq.Worker(broker, worker_threads=threads, worker_timeout=50)
        worker.start()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.stop(timeout=PATIENCE_MS)


def test_a_message_sent_before_any_worker_runs_when_one_comes(broker: CapabilityBroker, start: Start) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def keep(n: int) -> None:
        seen.append(n)

    for n in range(20):
        keep.send(n)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert sorted(seen) == list(range(20))


def test_a_waiting_worker_is_woken_by_a_message(broker: CapabilityBroker, start: Start) -> None:
    got = threading.Event()

    @dramatiq.actor(broker=broker)
    def ring() -> None:
        got.set()

    start()
    wait_until(
        lambda: broker.queue.link.call("EXISTS", broker.queue.keys.named("idleclasses")),
        PATIENCE_S,
        "worker idle",
    )
    ring.send()

    assert got.wait(PATIENCE_S)


def test_a_worker_holds_no_more_than_its_threads(broker: CapabilityBroker, start: Start) -> None:
    running, most, gate = set[int](), [0], threading.Event()

    @dramatiq.actor(broker=broker)
    def hold(n: int) -> None:
        running.add(n)
        most[0] = max(most[0], len(running))
        gate.wait(PATIENCE_S)
        running.discard(n)

    for n in range(6):
        hold.send(n)
    start(threads=2)
    wait_until(lambda: len(running) == 2, PATIENCE_S, "two run")
    assert broker.member is not None
    assert len(broker.member.attempts) == 2
    gate.set()
    broker.join("default", timeout=PATIENCE_MS)

    assert most == [2]


def test_a_retry_is_committed_with_the_attempt_that_failed(broker: CapabilityBroker, start: Start) -> None:
    tries: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=3, min_backoff=1, max_backoff=5)
    def flaky(limit: int) -> None:
        tries.append(1)
        if len(tries) < limit:
            raise RuntimeError("not yet")

    message = flaky.send(3)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    record = broker.queue.record(message.message_id)
    assert len(tries) == 3
    assert (record.state, record.attempt, record.retries) == ("succeeded", 3, 2)


def test_a_message_whose_retries_are_used_up_is_a_dead_letter(broker: CapabilityBroker, start: Start) -> None:
    @dramatiq.actor(broker=broker, max_retries=1, min_backoff=1, max_backoff=2)
    def never() -> None:
        raise ValueError("always so")

    message = never.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    record = broker.queue.record(message.message_id)
    assert (record.state, record.end_reason, record.attempt) == ("failed", "user_error", 2)
    assert b"always so" in record.error
    assert broker.queue.link.call("ZSCORE", broker.queue.keys.dead("default"), message.message_id) is not None


def test_a_failed_message_without_retries_is_not_a_success(valkey: Endpoint, namespace: str) -> None:
    settings = Settings(namespace=namespace, lease_s=4, heartbeat_s=0.4)
    broker = CapabilityBroker(valkey, settings=settings, middleware=[])

    @dramatiq.actor(broker=broker)
    def fails() -> None:
        raise ValueError("no middleware looks")

    message = fails.send()
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        broker.join("default", timeout=PATIENCE_MS)
        assert broker.queue.record(message.message_id).state == "failed"
    finally:
        worker.stop()
        broker.close()


def test_a_pipeline_passes_its_value_on(broker: CapabilityBroker, start: Start) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def double(n: int) -> int:
        return n * 2

    @dramatiq.actor(broker=broker)
    def keep(n: int) -> None:
        seen.append(n)

    dramatiq.pipeline(
        [double.message(4), *(a.message_with_options(args=()) for a in (double, keep))], broker=broker
    ).run()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [16]


def test_a_delayed_message_waits_in_the_queue(broker: CapabilityBroker, start: Start) -> None:
    seen: list[str] = []

    @dramatiq.actor(broker=broker)
    def keep(what: str) -> None:
        seen.append(what)

    start()
    message = keep.send_with_options(args=("late",), delay=300)
    keep.send("soon")
    assert broker.queue.record(message.message_id).phase == "delayed"
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == ["soon", "late"]


def test_what_an_actor_needs_is_kept_with_the_message(broker: CapabilityBroker) -> None:
    @dramatiq.actor(broker=broker, accelerator="cuda", gpus=2, frameworks={"torch": ">=2.4"})
    def train() -> None: ...

    message = train.send()
    changed = train.send_with_options(gpus=1)

    assert broker.queue.record(message.message_id).signature.startswith("g2.0.0.")
    assert broker.queue.record(changed.message_id).signature.startswith("g1.0.0.")


def test_a_need_that_makes_no_sense_is_refused_at_send(broker: CapabilityBroker) -> None:
    @dramatiq.actor(broker=broker)
    def job() -> None: ...

    with pytest.raises(BadRequirement):
        job.send_with_options(gpus=-1)


def test_an_unknown_actor_option_is_refused(broker: CapabilityBroker) -> None:
    with pytest.raises(ValueError, match="acelerator"):

        @dramatiq.actor(broker=broker, acelerator="cuda")
        def job() -> None: ...


def test_a_skipped_message_is_done(broker: CapabilityBroker, start: Start) -> None:
    class Skips(dramatiq.Middleware):
        def before_process_message(self, broker: dramatiq.Broker, message: dramatiq.MessageProxy) -> None:
            raise SkipMessage

    broker.add_middleware(Skips())

    @dramatiq.actor(broker=broker)
    def never() -> None:
        raise AssertionError("ran")

    message = never.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert broker.queue.record(message.message_id).state == "succeeded"


def test_rubbish_in_a_record_is_set_aside_and_the_queue_goes_on(
    broker: CapabilityBroker, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def keep(n: int) -> None:
        seen.append(n)

    broken = keep.send(1)
    keep.send(2)
    broker.queue.link.call("HSET", broker.queue.keys.job(broken.message_id), "spec", b"\xff\x00rubbish")
    with caplog.at_level(logging.CRITICAL, "gpulayer"):
        start()
        broker.join("default", timeout=PATIENCE_MS)

    record = broker.queue.record(broken.message_id)
    assert seen == [2]
    assert (record.state, record.end_reason) == ("failed", "undecodable")


def test_an_actor_that_is_not_known_here_is_a_dead_letter(broker: CapabilityBroker, start: Start) -> None:
    @dramatiq.actor(broker=broker)
    def gone() -> None: ...

    message = gone.send()
    del broker.actors["gone"]
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert broker.queue.record(message.message_id).state == "failed"


def test_stopping_gives_back_what_has_not_started(broker: CapabilityBroker, start: Start) -> None:
    started, gate = threading.Event(), threading.Event()

    @dramatiq.actor(broker=broker)
    def hold() -> None:
        started.set()
        gate.wait(PATIENCE_S)

    running = hold.send()
    worker = start(threads=1)
    assert started.wait(PATIENCE_S)
    with in_background(worker.stop):
        wait_until(lambda: _state_of_worker(broker) == b"draining", PATIENCE_S, "claims closed")
        late = hold.send()
        gate.set()

    assert broker.queue.record(running.message_id).state == "succeeded"
    assert broker.queue.record(late.message_id).state == "queued"


def _state_of_worker(broker: CapabilityBroker) -> Any:
    member = broker.member
    return member and broker.queue.link.call(
        "HGET", broker.queue.keys.worker(member.identity.worker), "state"
    )


def test_flush_drops_what_waits(broker: CapabilityBroker) -> None:
    @dramatiq.actor(broker=broker)
    def job() -> None: ...

    @dramatiq.actor(broker=broker, queue_name="other")
    def elsewhere() -> None: ...

    job.send()
    elsewhere.send()
    broker.flush("default")

    assert broker.queue.open_jobs("default") == 0
    assert broker.queue.open_jobs("other") == 1


def test_messages_of_several_queues_reach_their_own_consumers(broker: CapabilityBroker, start: Start) -> None:
    seen: list[str] = []

    @dramatiq.actor(broker=broker, queue_name="red")
    def red() -> None:
        seen.append("red")

    @dramatiq.actor(broker=broker, queue_name="blue")
    def blue() -> None:
        seen.append("blue")

    red.send()
    blue.send()
    start()
    broker.join("red", timeout=PATIENCE_MS)
    broker.join("blue", timeout=PATIENCE_MS)

    assert sorted(seen) == ["blue", "red"]
