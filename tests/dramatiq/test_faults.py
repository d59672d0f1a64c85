"""The queue goes away and comes back: sends say so, acks and nacks are tried again, workers go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import dramatiq
import pytest
from dramatiq import worker as dramatiq_worker
from dramatiq.errors import BrokerConnectionError

from gpulayer_broker.broker import CapabilityBroker
from tests.dramatiq.conftest import quick_settings
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until

Server = Callable[..., QueueServer]


@pytest.fixture
def server(queue_server: Server) -> QueueServer:
    return queue_server(append_only=True)


@pytest.fixture
def broker(server: QueueServer) -> Iterator[CapabilityBroker]:
    with closing(CapabilityBroker(server.endpoint, settings=quick_settings())) as broker:
        yield broker


def test_a_send_without_a_queue_is_dramatiqs_connection_error(
    server: QueueServer, broker: CapabilityBroker
) -> None:
    @dramatiq.actor(broker=broker)
    def job() -> None: ...

    job.send()
    server.kill()

    with pytest.raises(BrokerConnectionError):
        job.send()


@pytest.mark.parametrize("fails", [False, True])
def test_an_ack_or_nack_without_a_queue_is_tried_until_the_queue_is_back(
    server: QueueServer, broker: CapabilityBroker, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(dramatiq_worker, "POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    began, gate = threading.Event(), threading.Event()
    runs: list[int] = []

    @dramatiq.actor(broker=broker, max_retries=0)
    def hold() -> None:
        runs.append(1)
        began.set()
        gate.wait(PATIENCE_S)
        if fails:
            raise ValueError("a nack")

    message = hold.send()
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        assert began.wait(PATIENCE_S)
        server.kill()
        gate.set()
        server.start()
        wait_until(lambda: broker.queue.record(message.message_id).final, PATIENCE_S, "its end is told")
        assert broker.queue.record(message.message_id).state == ("failed" if fails else "succeeded")
        assert runs == [1]
    finally:
        worker.stop()


def test_a_worker_goes_on_when_the_queue_is_back(server: QueueServer, broker: CapabilityBroker) -> None:
    seen: list[int] = []

    @dramatiq.actor(broker=broker)
    def keep(n: int) -> None:
        seen.append(n)

    worker = dramatiq.Worker(broker, worker_threads=2, worker_timeout=50)
    worker.start()
    try:
        keep.send(1)
        wait_until(lambda: seen == [1], PATIENCE_S, "it runs before")
        server.kill()
        server.start()
        keep.send(2)
        wait_until(lambda: seen == [1, 2], PATIENCE_S, "it runs afterwards")
    finally:
        worker.stop()


def test_a_worker_that_starts_without_its_queue_joins_when_it_is_there(
    server: QueueServer, broker: CapabilityBroker
) -> None:
    done = threading.Event()

    @dramatiq.actor(broker=broker)
    def job() -> None:
        done.set()

    server.kill()
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        assert broker.member is None
        assert broker.is_joining

        server.start()
        wait_until(lambda: not broker.is_joining, PATIENCE_S, "the worker has joined")
        job.send()

        assert done.wait(PATIENCE_S)
    finally:
        worker.stop()


def test_a_worker_can_be_stopped_that_still_waits_for_its_queue(
    server: QueueServer, broker: CapabilityBroker
) -> None:
    server.kill()
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    assert broker.is_joining

    worker.stop()

    wait_until(lambda: not broker.is_joining, PATIENCE_S, "nobody waits any more")
    assert broker.member is None
