"""What ends badly is kept, listed, sent again on request, and leaves after its time."""

from __future__ import annotations

import threading

import dramatiq
import pytest

from gpulayer_broker import functions
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint
from tests.dramatiq.conftest import Start, quick_settings
from tests.support import PATIENCE_MS, PATIENCE_S, wait_until


@pytest.fixture
def mended() -> threading.Event:
    """Set once the actor `fails` would succeed."""
    return threading.Event()


@pytest.fixture
def fails(broker: CapabilityBroker, mended: threading.Event) -> dramatiq.Actor[[int], None]:
    @dramatiq.actor(max_retries=1, min_backoff=1, max_backoff=2)
    def fails(n: int) -> None:
        if not mended.is_set():
            raise ValueError(f"number {n}")

    return fails


def test_a_dead_letter_tells_its_message_and_its_error(
    broker: CapabilityBroker, start: Start, fails: dramatiq.Actor[[int], None]
) -> None:
    message = fails.send(7)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    [letter] = broker.dead_letters("default")
    assert letter.message is not None
    assert (letter.message.message_id, letter.message.args) == (message.message_id, (7,))
    assert (letter.reason, letter.error_type, letter.error) == ("user_error", "ValueError", "number 7")
    assert "Traceback" in letter.traceback


def test_dead_letters_are_read_a_page_at_a_time(
    broker: CapabilityBroker, start: Start, fails: dramatiq.Actor[[int], None]
) -> None:
    for n in range(5):
        fails.send_with_options(args=(n,), max_retries=0)
    start(threads=1)
    broker.join("default", timeout=PATIENCE_MS)

    pages = [broker.dead_letters("default", most=2, skip=skip) for skip in (0, 2, 4, 6)]
    assert [len(page) for page in pages] == [2, 2, 1, 0]
    read = [letter.message.args[0] for page in pages for letter in page if letter.message]
    assert sorted(read) == [0, 1, 2, 3, 4]


def test_a_requeued_dead_letter_runs_again_with_all_its_retries(
    broker: CapabilityBroker, start: Start, fails: dramatiq.Actor[[int], None], mended: threading.Event
) -> None:
    message = fails.send(1)
    start()
    broker.join("default", timeout=PATIENCE_MS)
    mended.set()

    assert broker.requeue_dead_letters("default") == 1
    broker.join("default", timeout=PATIENCE_MS)

    record = broker.queue.record(message.message_id)
    assert (record.state, record.retries) == ("succeeded", 0)
    assert broker.dead_letters("default") == []


def test_only_the_named_dead_letters_are_requeued(
    broker: CapabilityBroker, start: Start, fails: dramatiq.Actor[[int], None]
) -> None:
    left, sent = fails.send(1), fails.send(2)
    worker = start()
    broker.join("default", timeout=PATIENCE_MS)
    worker.stop()

    assert broker.requeue_dead_letters("default", [sent.message_id]) == 1

    assert [letter.id for letter in broker.dead_letters("default")] == [left.message_id]
    assert broker.queue.record(sent.message_id).state == "queued"


def test_two_who_requeue_at_once_requeue_it_once(
    broker: CapabilityBroker, start: Start, fails: dramatiq.Actor[[int], None]
) -> None:
    for n in range(20):
        fails.send_with_options(args=(n,), max_retries=0)
    worker = start()
    broker.join("default", timeout=PATIENCE_MS)
    worker.stop()
    counts: list[int] = []
    both = threading.Barrier(2)

    def requeue() -> None:
        both.wait()
        counts.append(broker.requeue_dead_letters("default"))

    threads = [threading.Thread(target=requeue) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert broker.queue.open_jobs("default") == 20
    assert sum(counts) == 20


def test_a_letter_that_cannot_be_read_is_listed_and_stays(broker: CapabilityBroker, start: Start) -> None:
    @dramatiq.actor
    def keep() -> None: ...

    broken = keep.send()
    broker.queue.link.call("HSET", broker.queue.keys.job(broken.message_id), "spec", b"\xff rubbish")
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert broker.requeue_dead_letters("default") == 0
    [letter] = broker.dead_letters("default")
    assert (letter.id, letter.message, letter.reason) == (broken.message_id, None, "undecodable")


def test_a_message_of_an_actor_that_nobody_knows_is_a_dead_letter(
    broker: CapabilityBroker, start: Start
) -> None:
    broker.declare_queue("some")
    message = broker.enqueue(dramatiq.Message("some", "some_actor", (), {}, {}))
    start()
    broker.join("some", timeout=PATIENCE_MS)

    [letter] = broker.dead_letters("some")
    assert (letter.id, letter.error_type) == (message.message_id, "ActorNotFound")


def test_dead_letters_leave_after_their_lifetime(valkey: Endpoint, namespace: str) -> None:
    broker = CapabilityBroker(valkey, settings=quick_settings(namespace), dead_message_ttl=300)

    @dramatiq.actor(broker=broker, max_retries=0)
    def fails() -> None:
        raise ValueError("now")

    fails.send()
    worker = dramatiq.Worker(broker, worker_threads=1, worker_timeout=50)
    worker.start()
    try:
        broker.join("default", timeout=PATIENCE_MS)
        assert len(broker.dead_letters("default")) == 1
        wait_until(lambda: broker.dead_letters("default") == [], PATIENCE_S, "the dead letter has left")
    finally:
        worker.stop()
        broker.close()


def test_dead_letters_live_for_a_week_unless_told_otherwise(
    broker: CapabilityBroker, start: Start, fails: dramatiq.Actor[[int], None]
) -> None:
    message = fails.send(1)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    died_ms = broker.dead_letters("default")[0].died_ms
    goes_ms = broker.queue.link.call("ZSCORE", broker.queue.keys.named("expiring"), message.message_id)
    assert int(goes_ms) - died_ms == 7 * 24 * 3600 * 1000


def test_more_records_than_one_call_removes_are_removed_at_once(
    broker: CapabilityBroker, start: Start
) -> None:
    @dramatiq.actor(store_results=True, result_ttl=1)
    def quick() -> int:
        return 1

    sent = [quick.send() for _ in range(250)]
    worker = start()
    broker.join("default", timeout=PATIENCE_MS)
    worker.stop()
    ticks = [broker.queue.run(functions.tick()) for _ in range(4)]

    assert sum(tick.purged for tick in ticks) <= 250
    assert [tick.next_ms for tick in ticks if tick.purged == 100] == [0] * sum(t.purged == 100 for t in ticks)
    assert broker.queue.records([message.message_id for message in sent]) == [None] * 250
