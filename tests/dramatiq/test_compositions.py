"""Pipelines, and groups whose callbacks the queue releases: in the commit of the last child, exactly once."""

from __future__ import annotations

import threading
from collections import Counter

import dramatiq
import pytest
from dramatiq.rate_limits.backends import RedisBackend

from gpulayer_broker import functions
from gpulayer_broker.answers import Committed
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import plain_client
from gpulayer_broker.functions import Call, Ending, Offer
from gpulayer_broker.outbox import Entry
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS, PATIENCE_S, wait_until


@pytest.fixture
def ran() -> Counter[str]:
    return Counter()


@pytest.fixture
def double(broker: CapabilityBroker) -> dramatiq.Actor[[int], int]:
    @dramatiq.actor(store_results=True)
    def double(n: int) -> int:
        return n * 2

    return double


@pytest.fixture
def finished(broker: CapabilityBroker, ran: Counter[str]) -> dramatiq.Actor[[str], None]:
    @dramatiq.actor
    def finished(name: str) -> None:
        ran[name] += 1

    return finished


def test_a_pipeline_passes_results_on_and_gives_the_last(
    broker: CapabilityBroker, start: Start, double: dramatiq.Actor[[int], int]
) -> None:
    start()
    pipe = double.message(1) | double.message_with_options(args=()) | double.message_with_options(args=())

    assert pipe.run().get_result(block=True, timeout=PATIENCE_MS) == 8
    assert list(pipe.get_results()) == [2, 4, 8]
    assert pipe.completed


def test_a_pipeline_can_be_run_twice(
    broker: CapabilityBroker, start: Start, double: dramatiq.Actor[[int], int], ran: Counter[str]
) -> None:
    @dramatiq.actor
    def count(n: int) -> None:
        ran[str(n)] += 1

    start()
    pipe = double.message(4) | count.message_with_options(args=())
    for _ in range(2):
        pipe.run()
        broker.join("default", timeout=PATIENCE_MS)

    assert ran == {"8": 2}


def test_the_same_message_enqueued_while_it_waits_runs_twice(
    broker: CapabilityBroker, start: Start, finished: dramatiq.Actor[[str], None], ran: Counter[str]
) -> None:
    message = finished.message("twice")
    broker.enqueue(message)
    broker.enqueue(message)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert ran == {"twice": 2}


def test_an_enqueue_whose_reply_was_lost_is_not_enqueued_twice(broker: CapabilityBroker) -> None:
    @dramatiq.actor
    def once() -> None: ...

    message = once.send()
    again = Entry(message, broker.needs_of(message)).submission()

    assert broker.queue.submit(again, broker.needs_of(message)) == message.message_id
    assert broker.queue.open_jobs("default") == 1


def test_a_group_gives_its_results_in_order(
    broker: CapabilityBroker, start: Start, double: dramatiq.Actor[[int], int]
) -> None:
    start()
    group = dramatiq.group([double.message(n) for n in range(20)]).run()
    group.wait(timeout=PATIENCE_MS)

    assert group.completed
    assert list(group.get_results(block=True, timeout=PATIENCE_MS)) == [2 * n for n in range(20)]


def test_a_group_calls_back_once_when_all_have_succeeded(
    broker: CapabilityBroker,
    start: Start,
    double: dramatiq.Actor[[int], int],
    finished: dramatiq.Actor[[str], None],
    ran: Counter[str],
) -> None:
    start()
    group = dramatiq.group([double.message(n) for n in range(50)])
    group.add_completion_callback(finished.message("one"))
    group.add_completion_callback(finished.message("other"))
    group.run()
    broker.join("default", timeout=PATIENCE_MS)

    assert ran == {"one": 1, "other": 1}


def test_a_group_run_twice_calls_back_twice(
    broker: CapabilityBroker,
    start: Start,
    double: dramatiq.Actor[[int], int],
    finished: dramatiq.Actor[[str], None],
    ran: Counter[str],
) -> None:
    start()
    group = dramatiq.group([double.message(n) for n in range(3)])
    group.add_completion_callback(finished.message("done"))
    for _ in range(2):
        group.run()
        broker.join("default", timeout=PATIENCE_MS)

    assert ran == {"done": 2}


def test_a_pipeline_in_a_group_counts_by_its_last_message(
    broker: CapabilityBroker,
    start: Start,
    double: dramatiq.Actor[[int], int],
    finished: dramatiq.Actor[[str], None],
    ran: Counter[str],
) -> None:
    start()
    group = dramatiq.group([double.message(1) | double.message_with_options(args=()), double.message(3)])
    group.add_completion_callback(finished.message("done"))
    group.run()
    broker.join("default", timeout=PATIENCE_MS)

    assert ran == {"done": 1}
    assert list(group.get_results()) == [4, 6]


def test_a_group_does_not_call_back_while_a_child_has_failed_and_does_after_its_requeue(
    broker: CapabilityBroker, start: Start, finished: dramatiq.Actor[[str], None], ran: Counter[str]
) -> None:
    mended = threading.Event()

    @dramatiq.actor(max_retries=0)
    def child(n: int) -> None:
        if n == 1 and not mended.is_set():
            raise ValueError("not yet")

    start()
    group = dramatiq.group([child.message(n) for n in range(3)])
    group.add_completion_callback(finished.message("done"))
    group.run()
    broker.join("default", timeout=PATIENCE_MS)
    assert ran == {}

    mended.set()
    broker.requeue_dead_letters("default")
    broker.join("default", timeout=PATIENCE_MS)
    assert ran == {"done": 1}


def test_a_child_counts_once_however_often_its_commit_is_sent(broker: CapabilityBroker, start: Start) -> None:
    """The commit of one child, repeated as after a lost reply, must not stand for the other child too."""
    sent: list[Ending] = []
    commit, gate = functions.commit, threading.Event()

    @dramatiq.actor
    def child(n: int) -> None:
        if n == 1:
            gate.wait(PATIENCE_S)

    @dramatiq.actor(queue_name="callbacks")
    def finished() -> None: ...

    start(threads=2, queues={"default"})
    group = dramatiq.group([child.message(0), child.message(1)])
    group.add_completion_callback(finished.message())

    def told(ending: Ending, offer: Offer | None = None) -> Call[Committed]:
        sent.append(ending)
        return commit(ending, offer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "commit", told)
        group.run()
        wait_until(lambda: broker.queue.open_jobs("default") == 1, PATIENCE_S, "one child has ended")

    assert sent[0].fields["barrier"]
    assert broker.queue.run(commit(sent[0])).verdict == "already"
    assert broker.queue.open_jobs("callbacks") == 0

    gate.set()
    broker.join("default", timeout=PATIENCE_MS)
    assert broker.queue.open_jobs("callbacks") == 1


def test_dramatiqs_own_group_callbacks_are_replaced_by_the_queues(
    broker: CapabilityBroker,
    start: Start,
    double: dramatiq.Actor[[int], int],
    finished: dramatiq.Actor[[str], None],
    ran: Counter[str],
) -> None:
    client = plain_client(broker.endpoint)
    broker.add_middleware(dramatiq.middleware.GroupCallbacks(RedisBackend(client=client), barrier_ttl=60_000))
    start()
    group = dramatiq.group([double.message(n) for n in range(3)])
    group.add_completion_callback(finished.message("done"))
    group.run()
    broker.join("default", timeout=PATIENCE_MS)
    client.close()

    assert ran == {"done": 1}


def test_a_barrier_that_is_never_completed_goes_with_its_lifetime(
    broker: CapabilityBroker, double: dramatiq.Actor[[int], int], finished: dramatiq.Actor[[str], None]
) -> None:
    group = dramatiq.group([double.message(1)])
    group.add_completion_callback(finished.message("done"))
    group.run()

    [key] = broker.queue.link.call("KEYS", broker.queue.keys.named("barrier:*"))
    assert 0 < broker.queue.link.call("PTTL", key) <= 24 * 3600 * 1000
    broker.flush("default")
