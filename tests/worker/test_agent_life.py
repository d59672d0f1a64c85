"""A worker's life: its name, its signals, the queue that is not there, its successor, records that nobody can read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gpulayer_broker.connection import Endpoint
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import new_job_id
from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.workers import TIMES, Desk


def started(desk: Desk, job: str) -> int:
    """The pid that a job's `echo $$` told."""
    return int(wait_until(lambda: desk.tail(job), PATIENCE_S, f"{job} speaks"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_finishes_what_runs_and_takes_nothing_new(
    desk: Desk, hire: Hire, tmp_path: Path, number: int
) -> None:
    worker = hire()
    gate = tmp_path / "gate"
    running = desk.shell(f"echo $$; while [ ! -e {gate} ]; do sleep 0.05; done")
    started(desk, running)
    worker.send(number)
    wait_until(
        lambda: "draining" in [w["state"] for w in desk.workers().values()], PATIENCE_S, "the worker drains"
    )
    waiting = desk.shell("true")
    gate.touch()
    assert worker.process.wait(PATIENCE_S) == 0
    assert (desk.record(running).state, desk.record(running).attempt) == ("succeeded", 1)
    assert desk.record(waiting).state == "queued"
    assert [w["state"] for w in desk.workers().values()] == ["offline"]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_hands_back_what_runs_uncounted(
    desk: Desk, hire: Hire, first: int, second: int
) -> None:
    worker = hire()
    job = desk.shell("echo $$; sleep 300")
    pid = started(desk, job)
    worker.send(first)
    wait_until(lambda: "stopping" in worker.said(), PATIENCE_S, "the worker has heard it")
    worker.send(second)
    assert worker.process.wait(PATIENCE_S) == 0
    record = desk.record(job)
    assert (record.state, record.losses) == ("queued", 0)
    assert not psutil.pid_exists(pid)


def test_what_was_handed_back_runs_on_the_next_worker(desk: Desk, hire: Hire) -> None:
    worker = hire()
    job = desk.shell("[ $GPULAYER_ATTEMPT = 2 ] && exit 0; echo $$; sleep 300")
    started(desk, job)
    worker.end()
    hire()
    record = desk.final(job)
    assert (record.state, record.attempt, record.losses) == ("succeeded", 2, 0)


def test_signals_at_any_moment_never_leave_a_worker_that_hangs(desk: Desk, hire: Hire) -> None:
    worker = hire()
    wait_until(lambda: desk.online(), PATIENCE_S, "the worker is there")
    for _ in range(200):
        if worker.alive:
            worker.send(signal.SIGTERM)
    assert worker.process.wait(PATIENCE_S) == 0


def test_a_second_worker_of_the_same_name_is_refused_with_one_line(desk: Desk, hire: Hire) -> None:
    first = hire("twin")
    wait_until(lambda: desk.online(), PATIENCE_S, "the first is there")
    second = hire("twin")
    assert second.process.wait(PATIENCE_S) == 78
    lines = [line for line in second.said().splitlines() if " WARNING " not in line]
    assert lines == ["gpulayer worker: a worker named 'twin' already runs here: give this one another --name"]
    assert first.alive


def test_a_queue_that_is_not_there_is_told_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpulayer_worker", "--redis", f"unix://{tmp_path}/none.sock"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 69
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    assert "none.sock" in lines[0]
    assert "start a Redis or Valkey server" in lines[0]


def test_a_worker_whose_next_incarnation_is_there_ends_its_jobs_and_stops(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    old = hire("double", "--node", "n1")
    job = desk.shell("echo $$; sleep 300")
    pid = started(desk, job)
    # Another state folder with the same machine and name: the lock does not keep it away, the queue does.
    new = hire("double", "--node", "n1", environment={"GPULAYER_STATE_DIR": str(private_folder(tmp_path))})
    assert old.process.wait(PATIENCE_S) == 0
    assert "was started again elsewhere" in old.said()
    assert not psutil.pid_exists(pid) or desk.record(job).attempt > 1
    wait_until(lambda: desk.record(job).attempt == 2, PATIENCE_S, "the job runs again")
    assert [w["state"] for w in desk.workers().values()] == ["online"]
    assert new.alive


def private_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir(mode=0o700)
    return folder


def test_records_that_nobody_can_read_are_set_aside_and_the_worker_goes_on(desk: Desk, hire: Hire) -> None:
    hire()
    bad = []
    good = desk.command_spec("true")
    from gpulayer_broker import spec as specs

    for data in (
        b"",
        os.urandom(200),
        b'{"actor_name": "gpulayer.run"}',
        specs.encode("j_another", 0, good),
        b"[]",
        b"x" * 3_000_000,
    ):
        bad.append(desk.queue.submit(Submission(new_job_id(), desk.needs.signature, data), desk.needs))
    newer = new_job_id()
    data = specs.encode(newer, 0, good).replace(b'"v":1', b'"v":99')
    bad.append(desk.queue.submit(Submission(newer, desk.needs.signature, data), desk.needs))
    fine = desk.command("true")
    assert desk.final(fine).state == "succeeded"
    for job in bad:
        record = desk.final(job)
        assert (record.state, record.end_reason) == ("failed", "undecodable")


def test_a_worker_without_slots_left_leaves_the_job_to_the_next(desk: Desk, hire: Hire) -> None:
    hire(slots=1)
    first = desk.shell("echo $$; sleep 300")
    started(desk, first)
    second = desk.shell("echo $$; sleep 300")
    assert desk.record(second).state == "queued"
    hire(slots=1)
    started(desk, second)
    assert {desk.record(first).worker, desk.record(second).worker} == set(desk.workers())


def test_what_a_worker_was_told_for_the_whole_namespace_is_written(desk: Desk, hire: Hire) -> None:
    def kept() -> dict[bytes, bytes]:
        flat = desk.link.call("HGETALL", f"{desk.queue.keys.root}config")
        return dict(zip(flat[::2], flat[1::2], strict=True))

    # The lease of a worker under test is short.
    told = {b"placement": b"pack", b"lease_ms": str(1000 * TIMES["LEASE_S"]).encode()}
    hire(environment={"GPULAYER_PLACEMENT": "pack"})
    assert kept() == told

    hire()
    assert kept() == told


def test_a_worker_listens_on_no_port(desk: Desk, hire: Hire, valkey: Endpoint) -> None:
    worker = hire()
    job = desk.shell("echo $$; sleep 300")
    started(desk, job)
    process = psutil.Process(worker.pid)
    for each in (process, *process.children(recursive=True)):
        assert [c for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN] == []
