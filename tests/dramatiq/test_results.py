"""Results written by the commit, read as Dramatiq reads them; other result backends beside."""

from __future__ import annotations

import os
import time
from functools import partial

import dramatiq
import pytest
from dramatiq.results import ResultFailure, ResultMissing, Results, ResultTimeout
from dramatiq.results.backends import RedisBackend

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint, plain_client
from gpulayer_broker.errors import UsageError
from gpulayer_broker.results import QueueResults
from tests.dramatiq.conftest import Start, quick_settings
from tests.support import PATIENCE_MS, PATIENCE_S, in_background, wait_until


@pytest.fixture
def add(broker: CapabilityBroker) -> dramatiq.Actor[[int, int], int]:
    @dramatiq.actor(store_results=True)
    def add(x: int, y: int) -> int:
        return x + y

    return add


def test_a_result_is_waited_for(start: Start, add: dramatiq.Actor[[int, int], int]) -> None:
    start()

    assert add.send(1, 2).get_result(block=True, timeout=PATIENCE_MS) == 3


def test_a_wait_reads_the_record_once_before_and_never_polls(
    broker: CapabilityBroker,
    start: Start,
    add: dramatiq.Actor[[int, int], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[str] = []
    read = QueueResults._read

    def counted(backend: QueueResults, message_id: str) -> tuple[str, bytes, bytes, bytes]:
        reads.append(message_id)
        return read(backend, message_id)

    monkeypatch.setattr(QueueResults, "_read", counted)
    start()
    message = add.send_with_options(args=(1, 2), delay=500)

    assert message.get_result(block=True, timeout=PATIENCE_MS) == 3
    assert reads == [message.message_id]  # the notice of its end brings the result


def test_a_result_that_is_not_there_yet_is_missing(add: dramatiq.Actor[[int, int], int]) -> None:
    with pytest.raises(ResultMissing):
        add.send(1, 2).get_result()


def test_a_wait_for_a_result_ends_after_its_timeout(add: dramatiq.Actor[[int, int], int]) -> None:
    message, start_s = add.send(1, 2), time.monotonic()

    with pytest.raises(ResultTimeout):
        message.get_result(block=True, timeout=300)
    assert time.monotonic() - start_s >= 0.25


def test_an_exception_is_raised_where_the_result_is_read(broker: CapabilityBroker, start: Start) -> None:
    @dramatiq.actor(store_results=True, max_retries=0)
    def fails() -> None:
        raise ValueError("no such thing")

    start()
    with pytest.raises(ResultFailure, match="actor raised ValueError: no such thing") as caught:
        fails.send().get_result(block=True, timeout=PATIENCE_MS)
    assert (caught.value.orig_exc_type, caught.value.orig_exc_msg) == ("ValueError", "no such thing")


def test_a_result_waits_for_the_retries_to_run_out(broker: CapabilityBroker, start: Start) -> None:
    tries: list[int] = []

    @dramatiq.actor(store_results=True, max_retries=3, min_backoff=1, max_backoff=2)
    def flaky() -> int:
        tries.append(1)
        if len(tries) < 3:
            raise RuntimeError("not yet")
        return len(tries)

    start()
    assert flaky.send().get_result(block=True, timeout=PATIENCE_MS) == 3


def test_none_is_a_result_too(broker: CapabilityBroker, start: Start) -> None:
    @dramatiq.actor(store_results=True)
    def nothing() -> None: ...

    start()
    assert nothing.send().get_result(block=True, timeout=PATIENCE_MS) is None


def test_waiting_for_an_actor_that_keeps_no_results_ends_at_once(
    broker: CapabilityBroker, start: Start
) -> None:
    @dramatiq.actor
    def silent() -> None: ...

    start()
    message, start_s = silent.send(), time.monotonic()
    with pytest.raises(ResultTimeout):
        message.get_result(block=True, timeout=2 * PATIENCE_MS)
    assert time.monotonic() - start_s < PATIENCE_S


def test_a_result_is_gone_after_its_lifetime(broker: CapabilityBroker, start: Start) -> None:
    @dramatiq.actor(store_results=True, result_ttl=300)
    def brief() -> int:
        return 1

    start()
    message = brief.send()
    assert message.get_result(block=True, timeout=PATIENCE_MS) == 1
    wait_until(
        lambda: broker.queue.records([message.message_id]) == [None], PATIENCE_S, "the record has left"
    )
    with pytest.raises(ResultMissing):
        message.get_result()


def test_many_threads_wait_for_results_at_once(start: Start, add: dramatiq.Actor[[int, int], int]) -> None:
    found: list[int] = []

    def ask(n: int) -> None:
        found.append(
            add.send_with_options(args=(n, 0), delay=100).get_result(block=True, timeout=PATIENCE_MS)
        )

    start()
    with in_background(*(partial(ask, n) for n in range(10))):
        pass

    assert sorted(found) == list(range(10))


def test_a_result_is_not_kept_outside_of_a_messages_processing(
    broker: CapabilityBroker, add: dramatiq.Actor[[int, int], int]
) -> None:
    with pytest.raises(UsageError, match="being processed"):
        broker.get_results_backend().store_result(add.message(1, 2), 3, 1000)


def test_dramatiqs_redis_result_backend_works_beside_the_queue(valkey: Endpoint, namespace: str) -> None:
    """Its results are written before the commit and are not fenced by it."""
    broker = CapabilityBroker(valkey, settings=quick_settings(namespace))
    client = plain_client(valkey, socket_timeout_s=30)
    backend = RedisBackend(client=client)
    broker.add_middleware(Results(backend=backend))

    @dramatiq.actor(broker=broker, store_results=True)
    def answer() -> int:
        return 42

    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        assert answer.send().get_result(backend=backend, block=True, timeout=PATIENCE_MS) == 42
    finally:
        worker.stop()
        broker.close()
        client.close()


def test_results_are_read_after_a_fork(start: Start, add: dramatiq.Actor[[int, int], int]) -> None:
    worker = start()
    message = add.send(20, 22)
    assert message.get_result(block=True, timeout=PATIENCE_MS) == 42
    worker.stop()

    child = os.fork()
    if child == 0:
        os._exit(message.get_result(block=True, timeout=PATIENCE_MS))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert message.get_result() == 42


def test_a_backend_may_have_an_encoder_of_its_own(valkey: Endpoint, namespace: str) -> None:
    broker = CapabilityBroker(valkey, settings=quick_settings(namespace))
    backend = QueueResults(broker, encoder=dramatiq.PickleEncoder())
    broker.add_middleware(Results(backend=backend))

    @dramatiq.actor(broker=broker, store_results=True)
    def numbers() -> set[int]:
        return {1, 2}

    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        assert numbers.send().get_result(backend=backend, block=True, timeout=PATIENCE_MS) == {1, 2}
    finally:
        worker.stop()
        broker.close()
