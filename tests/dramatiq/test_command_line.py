"""Dramatiq's own command line, several processes of it, and processes that are killed at the worst moment."""

from __future__ import annotations

import os
import signal

import dramatiq
import pytest

from gpulayer_broker.broker import CapabilityBroker
from tests.dramatiq.conftest import Cli, Lines, Send
from tests.support import PATIENCE_MS, PATIENCE_S, wait_until


def workers_of(broker: CapabilityBroker) -> int:
    return int(broker.queue.link.call("ZCARD", broker.queue.keys.named("workers")))


def test_several_processes_share_the_work_and_run_each_message_once(
    broker: CapabilityBroker, cli: Cli, send: Send, lines: Lines
) -> None:
    cli("--processes", "2", "--threads", "4")
    wait_until(lambda: workers_of(broker) == 2, PATIENCE_S, "both processes have joined")
    for n in range(40):
        send("process_of", str(n))
    broker.join("default", timeout=60_000)

    told = [line.split() for line in lines()]
    assert sorted(int(name) for _, _, name in told) == list(range(40))
    assert len({pid for _, pid, _ in told}) == 2


def test_each_process_has_connections_of_its_own(
    broker: CapabilityBroker, cli: Cli, send: Send, lines: Lines
) -> None:
    """The app has used the queue before the fork; answers of one process must never reach another."""
    cli("--processes", "3", "--threads", "2")
    wait_until(lambda: workers_of(broker) == 3, PATIENCE_S, "all processes have joined")
    for n in range(30):
        send("first", str(n), pipe_target=_target())
    broker.join("default", timeout=60_000)

    assert sorted(lines()) == sorted(f"{step} {n}" for step in ("first", "second") for n in range(30))


DYING = ("--processes", "1", "--threads", "1")


def _target() -> dict[str, object]:
    return dramatiq.Message("default", "second", (), {}, {}).asdict()


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_kill_between_the_follow_up_and_the_ack_leaves_exactly_one_successor(
    broker: CapabilityBroker, cli: Cli, send: Send, lines: Lines, moment: str
) -> None:
    """Before the commit the message runs again and its successor once; after it, its successor runs and it does not."""
    send("first", "x", pipe_target=_target())
    killed = cli(*DYING, APP_DIES=moment)
    wait_until(
        lambda: killed.poll() is not None, PATIENCE_S, "the process was killed, and its master has ended"
    )
    cli("--processes", "1", "--threads", "1")
    broker.join("default", timeout=60_000)

    assert lines() == ["first x"] * (2 if moment == "before" else 1) + ["second x"]


def test_a_kill_between_a_retry_and_the_ack_leaves_one_message(
    broker: CapabilityBroker, cli: Cli, send: Send, lines: Lines
) -> None:
    message = send("flaky", "x")
    killed = cli(*DYING, APP_DIES="before")
    wait_until(
        lambda: killed.poll() is not None, PATIENCE_S, "the process was killed, and its master has ended"
    )
    assert broker.queue.open_jobs("default") == 1
    cli("--processes", "1", "--threads", "1")
    broker.join("default", timeout=60_000)

    assert lines() == ["flaky x"] * 2
    record = broker.queue.record(message.message_id)
    assert (record.state, record.losses) == ("succeeded", 1)


def test_the_messages_of_a_killed_process_run_elsewhere(
    broker: CapabilityBroker, cli: Cli, send: Send, lines: Lines
) -> None:
    first = cli("--processes", "1", "--threads", "1")
    message = send("interruptible", "x")
    wait_until(lambda: lines() == ["began x"], PATIENCE_S, "it runs")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(PATIENCE_S)
    cli("--processes", "1", "--threads", "1")

    wait_until(lambda: lines() == ["began x", "began x"], PATIENCE_S, "it runs on the other worker")
    assert broker.queue.record(message.message_id).losses == 1


def test_a_worker_for_some_queues_takes_nothing_of_others(
    broker: CapabilityBroker, cli: Cli, send: Send, lines: Lines
) -> None:
    cli("--processes", "1", "--threads", "1", "-Q", "elsewhere")
    wait_until(lambda: workers_of(broker) == 1, PATIENCE_S, "the worker has joined")
    message = send("second", "x")
    broker.declare_queue("elsewhere")
    broker.enqueue(dramatiq.Message("elsewhere", "elsewhere", ("y",), {}, {}))
    broker.join("elsewhere", timeout=PATIENCE_MS)

    assert lines() == ["elsewhere y"]
    assert broker.queue.record(message.message_id).state == "queued"
    broker.flush("default")
