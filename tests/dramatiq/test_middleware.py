"""Each stock middleware, used as Dramatiq's documentation uses it: only the broker's line is another."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import AsyncIO, CurrentMessage

from gpulayer_broker.broker import CapabilityBroker
from tests.dramatiq.conftest import Start
from tests.support import PATIENCE_MS


def test_age_limit_drops_what_is_too_old(broker: CapabilityBroker, start: Start) -> None:
    seen: list[int] = []

    @dramatiq.actor(max_age=3_600_000)
    def young(n: int) -> None:
        seen.append(n)

    young.send(1)
    old = young.message(2).copy(message_timestamp=0)
    broker.enqueue(old)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [1]
    assert [letter.id for letter in broker.dead_letters("default")] == [old.message_id]


def test_callbacks_are_sent_on_success_and_on_failure(broker: CapabilityBroker, start: Start) -> None:
    told: list[Any] = []

    @dramatiq.actor
    def taskFailed(message_data: dict[str, Any], exception_data: dict[str, Any]) -> None:
        told.append((message_data["message_id"], exception_data["type"]))

    @dramatiq.actor
    def taskSucceeded(message_data: dict[str, Any], result: int) -> None:
        told.append((message_data["message_id"], result))

    @dramatiq.actor(max_retries=0)
    def divide(n: int) -> float:
        return 6 / n

    options: dict[str, Any] = {"on_failure": "taskFailed", "on_success": "taskSucceeded"}
    good = divide.send_with_options(args=(2,), **options)
    bad = divide.send_with_options(args=(0,), **options)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert Counter(map(tuple, told)) == Counter(
        [(good.message_id, 3.0), (bad.message_id, "ZeroDivisionError")]
    )


def test_current_message_is_the_message_that_runs(broker: CapabilityBroker, start: Start) -> None:
    seen: list[str] = []
    broker.add_middleware(CurrentMessage())

    @dramatiq.actor
    def who() -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        seen.append(message.message_id)

    sent = who.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [sent.message_id]


def test_pipe_ignore_drops_the_result_on_its_way(broker: CapabilityBroker, start: Start) -> None:
    seen: list[str] = []

    @dramatiq.actor
    def one() -> int:
        return 1

    @dramatiq.actor
    def nothing() -> None:
        seen.append("nothing")

    (one.message() | nothing.message_with_options(pipe_ignore=True)).run()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == ["nothing"]


def test_retries_stop_where_the_actor_says_so(broker: CapabilityBroker, start: Start) -> None:
    tries: Counter[str] = Counter()

    def should_retry(retries_so_far: int, exception: BaseException) -> bool:
        return retries_so_far < 2 and isinstance(exception, RuntimeError)

    @dramatiq.actor
    def exhausted(message_data: dict[str, Any], retry_info: dict[str, Any]) -> None:
        tries["exhausted"] += 1

    @dramatiq.actor(retry_when=should_retry, min_backoff=1, max_backoff=2, on_retry_exhausted="exhausted")
    def fails() -> None:
        tries["fails"] += 1
        raise RuntimeError("always")

    @dramatiq.actor(throws=(KeyError,), min_backoff=1)
    def expected() -> None:
        tries["expected"] += 1
        raise KeyError("no retry for this")

    fails.send()
    expected.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert tries == {"fails": 3, "exhausted": 1, "expected": 1}


def test_async_actors_run_on_the_event_loop(broker: CapabilityBroker, start: Start) -> None:
    loops: set[int] = set()
    seen: list[int] = []
    broker.add_middleware(AsyncIO())

    @dramatiq.actor
    async def sleeps(n: int) -> None:
        await asyncio.sleep(0.01)
        loops.add(threading.get_ident())
        seen.append(n)

    for n in range(8):
        sleeps.send(n)
    worker = start()
    broker.join("default", timeout=PATIENCE_MS)
    worker.stop()

    assert sorted(seen) == list(range(8))
    assert len(loops) == 1


def test_prometheus_counts_messages_retries_and_dead_letters(
    broker: CapabilityBroker, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("prometheus_client")
    from dramatiq.middleware import prometheus

    monkeypatch.setattr(prometheus, "DB_PATH", str(tmp_path))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv("prometheus_multiproc_dir", str(tmp_path))
    counts = prometheus.Prometheus()
    broker.add_middleware(counts)

    @dramatiq.actor(max_retries=1, min_backoff=1, max_backoff=2)
    def fails() -> None:
        raise ValueError("always")

    fails.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    def value(metric: Any) -> float:
        return float(metric.labels("default", "fails")._value.get())

    assert value(counts.total_messages) == 2
    assert value(counts.total_retried_messages) == 1
    assert value(counts.total_rejected_messages) == 1
    assert value(counts.inprogress_messages) == 0


def test_what_a_middleware_puts_into_a_message_reaches_whoever_runs_it_or_follows_it(
    broker: CapabilityBroker, start: Start
) -> None:
    """As tracing does: the trace of a request goes with its message, the message's retry and the next in line."""
    trace: contextvars.ContextVar[str] = contextvars.ContextVar("trace", default="")
    seen: list[tuple[str, str]] = []

    class Tracing(dramatiq.Middleware):
        def before_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
            message.options.setdefault("traceparent", trace.get())

        def before_process_message(self, broker: dramatiq.Broker, message: Any) -> None:
            trace.set(message.options["traceparent"])
            seen.append((message.actor_name, trace.get()))

    broker.add_middleware(Tracing())

    @dramatiq.actor(max_retries=1, min_backoff=1, max_backoff=2)
    def first() -> int:
        if len(seen) == 1:
            raise RuntimeError("once")
        return 1

    @dramatiq.actor
    def second(n: int = 0) -> None: ...

    trace.set("00-4bf92f35-01")
    (first.message() | second.message()).run()
    trace.set("")
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [(name, "00-4bf92f35-01") for name in ("first", "first", "second")]


def test_an_exception_of_some_middleware_does_not_lose_the_message(
    broker: CapabilityBroker, start: Start
) -> None:
    class Broken(dramatiq.Middleware):
        def after_process_message(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a fault of the middleware's own")

    broker.add_middleware(Broken())

    @dramatiq.actor
    def job() -> None: ...

    message = job.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert broker.queue.record(message.message_id).state == "succeeded"
