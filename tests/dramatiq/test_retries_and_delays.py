"""Back-off, retries and delayed messages: kept in the queue, on time, one record a message."""

from __future__ import annotations

import time

import dramatiq
import pytest
from dramatiq.errors import Retry

from gpulayer_broker.broker import CapabilityBroker
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS, PATIENCE_S, wait_until

LONG_MS = 600_000
# What is promised is 0.15 s, on a machine that has nothing else to do.
LATE_S = 1.5


def test_a_failed_message_is_tried_again_after_its_back_off(broker: CapabilityBroker, start: Start) -> None:
    tries: list[float] = []

    @dramatiq.actor(min_backoff=200, max_backoff=LONG_MS, max_retries=2)
    def flaky() -> None:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise RuntimeError("not yet")

    flaky.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    first, second, third = tries
    assert second - first >= 0.1  # Dramatiq draws a part of the back-off at random
    assert third - second >= 0.2


def test_an_actor_may_say_when_it_is_to_be_tried_again(broker: CapabilityBroker, start: Start) -> None:
    tries: list[float] = []

    @dramatiq.actor(max_retries=1, min_backoff=LONG_MS, max_backoff=LONG_MS)
    def told() -> None:
        tries.append(time.monotonic())
        if len(tries) == 1:
            raise Retry(delay=300)

    told.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert tries[1] - tries[0] >= 0.3


def test_a_retry_keeps_the_options_that_its_tries_have_left(broker: CapabilityBroker, start: Start) -> None:
    seen: list[tuple[int, bool]] = []

    class Looks(dramatiq.Middleware):
        def before_process_message(self, broker: dramatiq.Broker, message: dramatiq.MessageProxy) -> None:
            seen.append((message.options.get("retries", 0), "traceback" in message.options))

    broker.add_middleware(Looks())

    @dramatiq.actor(min_backoff=1, max_backoff=2, max_retries=2)
    def fails() -> None:
        raise RuntimeError("always")

    fails.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [(0, False), (1, True), (2, True)]


def test_a_delayed_message_runs_when_it_is_due_whatever_was_sent_before(
    broker: CapabilityBroker, start: Start
) -> None:
    late: list[float] = []

    @dramatiq.actor
    def due(at: float) -> None:
        late.append(time.time() - at)

    start()
    # The keeper sleeps until the first due time that it knows: each of these is earlier than those before it.
    for delay_ms in (LONG_MS, 900, 600, 300, 100):
        due.send_with_options(args=(time.time() + delay_ms / 1000,), delay=delay_ms)
    wait_until(lambda: len(late) == 4, PATIENCE_S, "all but the first have run")

    assert min(late) >= -0.002
    assert sorted(late)[1] <= LATE_S, late
    assert broker.queue.open_jobs("default") == 1


def test_delayed_messages_are_independent_of_each_other(broker: CapabilityBroker, start: Start) -> None:
    seen: list[int] = []

    @dramatiq.actor
    def keep(n: int) -> None:
        seen.append(n)

    start(threads=1)
    keep.send_with_options(args=(1,), delay=600)
    keep.send_with_options(args=(2,), delay=200)
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [2, 1]


def test_a_delayed_message_waits_on_the_server_when_the_worker_stops(
    broker: CapabilityBroker, start: Start
) -> None:
    @dramatiq.actor
    def later() -> None: ...

    message = later.send_with_options(delay=60_000)
    worker = start()
    wait_until(lambda: broker.member is not None, PATIENCE_S, "the worker has joined")
    worker.stop()

    record = broker.queue.record(message.message_id)
    assert (record.state, record.phase) == ("queued", "delayed")


@pytest.mark.parametrize("age_ms", [50])
def test_a_message_past_its_age_limit_is_a_dead_letter_and_does_not_run(
    broker: CapabilityBroker, start: Start, age_ms: int
) -> None:
    ran: list[int] = []

    @dramatiq.actor(max_age=age_ms)
    def old() -> None:
        ran.append(1)

    message = old.send_with_options(delay=2 * age_ms)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert not ran
    assert [letter.id for letter in broker.dead_letters("default")] == [message.message_id]
