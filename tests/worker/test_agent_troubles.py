"""What happens around a worker's jobs: full disks, leases over too early, beats that meet ends, late grants."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulayer.explaining import explain
from gpulayer_broker import functions
from gpulayer_broker.workers import read_workers
from gpulayer_worker.processes.fork_server import ForkServer
from gpulayer_worker.processes.job import JobProcess
from gpulayer_worker.runner.proctree import lease_clock_s
from tests.reliability.proxy import Proxy
from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.workers import Desk

# --- full disks ---


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of that size, mounted on the folder."""
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m,mode=700", "gpulayer-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root and mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "state", 6) as folder:
        yield folder


def test_a_job_that_fills_the_disk_fails_and_the_worker_goes_on(desk: Desk, hire: Hire, state: Path) -> None:
    worker = hire(environment={"GPULAYER_STATE_DIR": str(state)})
    full = desk.shell("head -c 50000000 /dev/zero > big")
    assert desk.final(full).state == "failed"
    wait_until(lambda: free_bytes(state) > 4_000_000, PATIENCE_S, "the job's folder is removed")
    assert desk.final(desk.command("true")).state == "succeeded"
    assert worker.alive


def test_a_job_that_removes_all_above_its_folder_keeps_nobody_from_working(desk: Desk, hire: Hire) -> None:
    worker = hire()
    desk.final(desk.shell('rm -rf "$(dirname "$GPULAYER_SCRATCH")"'))
    assert desk.final(desk.command("true")).state == "succeeded"
    assert worker.alive


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_job_that_fills_the_disk_and_goes_on_is_ended_for_it_and_no_other_is(
    desk: Desk, hire: Hire, state: Path, isolation: str
) -> None:
    def fill_up() -> None:
        import time
        from pathlib import Path

        print("fills it", flush=True)
        try:
            with open("big", "wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    continue
        except OSError:
            time.sleep(1000)  # the file stays until the job is ended for it
        Path("big").unlink()

    worker = hire(environment={"GPULAYER_STATE_DIR": str(state)})
    other = desk.shell("echo runs; head -c 100000 /dev/zero > own; sleep 1000")
    wait_until(lambda: desk.tail(other), PATIENCE_S, "another job runs")
    record = desk.final(desk.function(fill_up, isolation=isolation))
    assert (record.state, record.end_reason) == ("failed", "disk")
    error = desk.error(record.id)
    assert error["message"].startswith("the worker's disk was full, and it had the most of it, ")
    assert error["message"].endswith(": ask for disk=")
    assert error["tail"] == "fills it"
    assert desk.final(desk.command("true")).state == "succeeded"
    assert desk.record(other).state == "running"
    desk.queue.run(functions.cancel(other))
    desk.final(other)
    assert worker.alive


def test_a_worker_whose_disk_is_full_takes_nothing_and_says_so_until_there_is_space(
    desk: Desk, hire: Hire, state: Path
) -> None:
    hire(environment={"GPULAYER_STATE_DIR": str(state)})
    assert desk.final(desk.command("true")).state == "succeeded"
    ballast = state / "ballast"
    fill(ballast)
    jobs = [desk.function(lambda: 1) for _ in range(3)]

    def why() -> list[str]:
        [found] = explain(desk.needs, read_workers(desk.queue)).workers
        return list(found.reasons)

    wait_until(lambda: why() == ["disk full"], PATIENCE_S, "the worker says why")
    assert {desk.record(job).state for job in jobs} == {"queued"}

    ballast.unlink()
    assert {desk.final(job).state for job in jobs} == {"succeeded"}
    assert {desk.record(job).losses for job in jobs} == {0}
    wait_until(lambda: why() == ["fits"], PATIENCE_S, "it says so no more")


def test_a_job_that_ends_on_a_full_disk_brings_its_worker_no_next_one(
    desk: Desk, hire: Hire, state: Path
) -> None:
    hire(environment={"GPULAYER_STATE_DIR": str(state)}, slots=1)
    gate = state / "gate"
    first = desk.shell(f"until [ -e {gate} ]; do sleep 0.01; done")
    desk.reaches(first, "running")
    others = [desk.function(lambda: 1) for _ in range(3)]
    ballast = state / "ballast"
    fill(ballast)
    gate.touch()
    assert desk.final(first).state == "succeeded"
    ballast.unlink()

    records = [desk.final(job) for job in others]
    assert {(record.state, record.attempt) for record in records} == {("succeeded", 1)}


def test_a_result_that_the_full_disk_does_not_take_is_an_error_of_the_result(
    desk: Desk, hire: Hire, state: Path
) -> None:
    hire(environment={"GPULAYER_STATE_DIR": str(state)})
    job = desk.function(lambda: os.urandom(3_500_000))  # fits once, into the job's folder, and not twice
    record = desk.final(job)
    assert (record.state, record.end_reason) == ("failed", "result_error")
    assert "cannot be kept" in desk.error(job)["message"]
    assert desk.final(desk.function(lambda: 2)).state == "succeeded"


def test_a_log_that_the_full_disk_does_not_take_is_cut_and_told(desk: Desk, hire: Hire, state: Path) -> None:
    hire(environment={"GPULAYER_STATE_DIR": str(state)})
    job = desk.shell("yes flood | head -c 20000000")
    assert desk.final(job).state == "succeeded"
    assert any("bytes of the log were not kept" in note for note in desk.notes(job))
    after = desk.shell("echo heard")
    desk.final(after)
    assert desk.tail(after) == b"heard\n"


def free_bytes(folder: Path) -> int:
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize


def fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


# --- leases, beats, grants ---


def test_a_job_whose_lease_is_over_before_it_begins_is_no_failure_of_its_own(tmp_path: Path) -> None:
    server = ForkServer(sys.executable, {})
    with open(os.devnull, "wb") as null:
        job = JobProcess(
            "late",
            ("true",),
            tmp_path,
            {},
            null.fileno(),
            null.fileno(),
            lease_until_s=lease_clock_s() - 1,
        )
        try:
            ending = server.start(job).wait(PATIENCE_S)
        finally:
            server.close()
    assert ending.refused is not None
    assert ending.expired


def test_beats_that_meet_the_ends_of_jobs_disturb_none(desk: Desk, hire: Hire) -> None:
    worker = hire(slots=4, heartbeat_s=0.25, lease_s=4)
    jobs = [desk.shell("true") for _ in range(300)]
    records = [desk.final(job, 60) for job in jobs]
    assert {(record.state, record.attempt, record.losses) for record in records} == {("succeeded", 1, 0)}
    assert "refused" not in worker.said()


def test_a_grant_that_arrives_while_a_worker_drains_is_run_or_handed_on(desk: Desk, hire: Hire) -> None:
    dice = random.Random(3)
    with Proxy(desk.endpoint) as proxy:
        for _ in range(5):
            worker = hire(endpoint=proxy.endpoint, slots=1)
            wait_until(lambda: desk.online(), PATIENCE_S, "the worker is there")
            proxy.delay_s = 0.03
            jobs = [desk.shell("true") for _ in range(3)]
            wait_until(lambda: dice.random() < 0.3, PATIENCE_S, "a random moment", every=0.02)
            worker.send(signal.SIGTERM)
            assert worker.process.wait(PATIENCE_S) == 0
            proxy.delay_s = 0
            assert {desk.record(job).state for job in jobs} <= {"queued", "succeeded"}
            assert {desk.record(job).losses for job in jobs} == {0}
        hire()
        for job in jobs:
            assert desk.final(job).state == "succeeded"
