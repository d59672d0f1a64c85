"""Abort, interrupts, pause and shutdown: what has not started goes to somebody else at once."""

from __future__ import annotations

import threading
import time

import dramatiq
from dramatiq.middleware import TimeLimit
from dramatiq.middleware.time_limit import TimeLimitExceeded, _CtypesTimeoutManager

from gpulayer_broker.attempts import STALE
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.interrupts import Interrupted
from tests.dramatiq.conftest import Cli, Lines, Send, Start
from tests.support import PATIENCE_MS, PATIENCE_S, in_background, wait_until


def test_a_message_that_waits_can_be_aborted(broker: CapabilityBroker, start: Start) -> None:
    ran: list[int] = []

    @dramatiq.actor
    def job() -> None:
        ran.append(1)

    message = job.send()
    assert broker.abort(message)
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert not ran
    assert not broker.abort(message)


def test_a_message_that_runs_is_interrupted_and_not_retried(broker: CapabilityBroker, start: Start) -> None:
    began, ended = threading.Event(), list[str]()

    @dramatiq.actor(max_retries=3, min_backoff=1)
    def endless() -> None:
        began.set()
        try:
            while True:
                time.sleep(0.01)
        except Interrupted:
            ended.append("interrupted")
            raise

    message = endless.send()
    start()
    assert began.wait(PATIENCE_S)
    assert broker.abort(message)
    broker.join("default", timeout=PATIENCE_MS)

    assert ended == ["interrupted"]
    assert broker.queue.record(message.message_id).state == "cancelled"


def test_an_attempt_that_was_lost_is_interrupted(broker: CapabilityBroker, start: Start) -> None:
    began, ended = threading.Event(), threading.Event()

    @dramatiq.actor(max_retries=0)
    def endless() -> None:
        began.set()
        try:
            while not ended.is_set():
                time.sleep(0.01)
        except Interrupted:
            ended.set()
            raise

    endless.send()
    start()
    assert began.wait(PATIENCE_S)
    assert broker.member is not None
    [attempt] = broker.member.attempts.all()
    attempt.stop(STALE)

    assert ended.wait(PATIENCE_S)


def test_a_time_limit_interrupts_the_actor(broker: CapabilityBroker, start: Start) -> None:
    seen: list[type[BaseException]] = []
    limits = next(m for m in broker.middleware if isinstance(m, TimeLimit))
    assert isinstance(limits.manager, _CtypesTimeoutManager)
    limits.manager.interval = 0.05

    @dramatiq.actor(time_limit=200, max_retries=0)
    def endless() -> None:
        try:
            while True:
                time.sleep(0.01)
        except TimeLimitExceeded as error:
            seen.append(type(error))
            raise

    message = endless.send()
    start()
    broker.join("default", timeout=PATIENCE_MS)

    assert seen == [TimeLimitExceeded]
    assert broker.dead_letters("default")[0].id == message.message_id


def test_a_shutdown_interrupts_who_asked_for_it_and_the_message_runs_again(
    cli: Cli, send: Send, lines: Lines
) -> None:
    first = cli("--processes", "1", "--threads", "1", "--worker-shutdown-timeout", "5000")
    send("interruptible", "x")
    wait_until(lambda: lines() == ["began x"], PATIENCE_S, "it runs")
    first.terminate()
    first.wait(PATIENCE_S)
    assert lines() == ["began x", "interrupted x"]

    cli("--processes", "1", "--threads", "1")
    wait_until(lambda: lines()[2:] == ["began x"], PATIENCE_S, "it runs again")


def test_what_a_stopping_worker_holds_but_has_not_begun_is_at_the_head_again(
    broker: CapabilityBroker, start: Start
) -> None:
    gate, began = threading.Event(), threading.Event()
    seen: list[int] = []

    @dramatiq.actor
    def hold() -> None:
        began.set()
        gate.wait(PATIENCE_S)

    @dramatiq.actor
    def keep(n: int) -> None:
        seen.append(n)

    hold.send()
    worker = start(threads=1)
    assert began.wait(PATIENCE_S)
    for n in range(3):
        keep.send(n)
    with in_background(worker.stop):
        wait_until(
            lambda: broker.member is None or not broker.member.claims.is_open, PATIENCE_S, "claims are closed"
        )
        gate.set()
    assert seen == []

    start(threads=1)
    broker.join("default", timeout=PATIENCE_MS)
    assert seen == [0, 1, 2]


def test_a_paused_worker_runs_nothing_and_holds_nothing_until_it_is_resumed(
    broker: CapabilityBroker, start: Start
) -> None:
    seen: list[int] = []

    @dramatiq.actor
    def keep(n: int) -> None:
        seen.append(n)

    worker = start(threads=1)
    wait_until(lambda: broker.member is not None, PATIENCE_S, "the worker has joined")
    worker.pause()
    assert broker.member is not None
    messages = [keep.send(n) for n in range(3)]

    assert len(broker.member.attempts) == 0
    assert {broker.queue.record(m.message_id).state for m in messages} == {"queued"}
    assert seen == []

    worker.resume()
    broker.join("default", timeout=PATIENCE_MS)
    assert seen == [0, 1, 2]
