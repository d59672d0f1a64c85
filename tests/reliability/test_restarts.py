"""The server of a shared queue is restarted under load: in order, by a kill, or without its last moments.

What it acknowledged is there afterwards, but for what a rewound file no longer holds: of that the queue holds no half,
and what it does hold ends once. Real workers run the jobs meanwhile.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.reliability.conftest import Hire
from tests.reliability.history import History, account
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk

JOBS = 120
RESTARTS = 3


@pytest.fixture(params=["always", "no"])
def server(queue_server: Callable[..., QueueServer], request: pytest.FixtureRequest) -> QueueServer:
    """It syncs each write, or leaves it to the system: a kill of the server alone loses none of either."""
    return queue_server("--appendfsync", request.param, append_only=True)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History(tmp_path / "history.jsonl") as history:
        yield history


def in_order(server: QueueServer) -> None:
    server.stop()
    server.start()


def by_a_kill(server: QueueServer) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("restart", [in_order, by_a_kill])
def test_a_restart_under_load_loses_nothing_and_repeats_nothing(
    desk: Desk, hire: Hire, server: QueueServer, history: History, restart: Callable[[QueueServer], None]
) -> None:
    hire(slots=3)
    jobs = submitting(desk, history)
    for _ in range(RESTARTS):
        random_moment()
        restart(server)
    accepted = jobs()

    for n, job in enumerate(accepted):
        record = desk.final(job)
        assert (record.state, record.losses) == ("succeeded", 0)
        assert desk.whole_log(job) == b"%d\n" % n
    assert account(history.lines(), set(accepted)) == []


def test_a_server_that_comes_back_without_its_last_moments_ends_what_it_still_knows(
    desk: Desk, hire: Hire, server: QueueServer
) -> None:
    """Jobs that it has forgotten are stopped and can be sent again; those whose end it has forgotten run again."""
    worker = hire(slots=3)
    kept: list[str] = []
    lost: list[str] = []
    for wave in range(RESTARTS):
        kept += [sent(desk, f"j_kept{wave}n{n}") for n in range(10)]
        length = file_of(server).stat().st_size
        lost += [sent(desk, f"j_lost{wave}n{n}") for n in range(10)]
        desk.final(kept[-1])
        server.kill()
        with open(file_of(server), "ab") as file:
            file.truncate(length)
        server.start()
        assert desk.queue.records(lost[-10:]) == [None] * 10

    for job in kept:
        assert desk.final(job).state == "succeeded"
        assert desk.whole_log(job) == f"{job}\n".encode()
    assert desk.queue.records(lost) == [None] * len(lost)
    for job in lost:
        assert sent(desk, job) == job
    assert [desk.final(job).state for job in lost] == ["succeeded"] * len(lost)
    assert worker.alive


def sent(desk: Desk, job_id: str) -> str:
    return desk.submit(desk.command_spec("sh", "-c", f"sleep 0.05; echo {job_id}"), id=job_id)


def submitting(desk: Desk, history: History) -> Callable[[], list[str]]:
    """Submits all jobs in the background; the answer is called to have their ids, in order, when all are in."""
    ids: list[str] = []

    def submit() -> None:
        for n in range(JOBS):
            job_id = f"j_restart{n}"
            with history.call("submit", id=job_id):
                ids.append(
                    desk.submit(desk.command_spec("sh", "-c", f"sleep 0.0{n % 10}; echo {n}"), id=job_id)
                )

    client = threading.Thread(target=submit, daemon=True)
    client.start()

    def finished() -> list[str]:
        client.join(2 * PATIENCE_S)
        assert len(ids) == JOBS
        return ids

    return finished


def random_moment() -> None:
    dice = random.Random()
    wait_until(lambda: dice.random() < 0.05, PATIENCE_S, "a random moment", every=0.01)


def file_of(server: QueueServer) -> Path:
    """What the server appends to."""
    return next((server.folder / "appendonlydir").glob("*.incr.aof"))
