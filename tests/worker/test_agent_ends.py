"""How a job's end comes about: timeouts, cancels in every state, retries. Its processes are gone before it ends."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import psutil

from gpulayer_broker import functions
from gpulayer_broker.store.bundle import make_bundle
from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.workers import Desk, WorkerProcess

IGNORING = "trap '' TERM; echo $$; while :; do sleep 0.05; done"


def cancel(desk: Desk, job: str) -> str:
    return desk.queue.run(functions.cancel(job))[0]


def speaks(desk: Desk, job: str) -> bytes:
    """The job's first words, once it has said them."""
    return wait_until(lambda: desk.tail(job), PATIENCE_S, f"{job} speaks")


def pid_told_by(desk: Desk, job: str) -> int:
    return int(speaks(desk, job).split()[0])


# --- timeouts ---


def test_a_job_past_its_timeout_is_ended(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("sleep 300", timeout_s=0.3)
    record = desk.final(job)
    assert (record.state, record.end_reason) == ("timed_out", "timeout")
    assert desk.error(job)["message"] == "it ran longer than its timeout of 0.3 s"


def test_a_function_asleep_in_c_is_ended_by_its_timeout(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.function(lambda: time.sleep(300), timeout_s=0.3)
    assert desk.final(job).state == "timed_out"


def test_a_busy_loop_that_ignores_term_is_ended_by_its_timeout(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("trap '' TERM; echo $$; while :; do :; done", timeout_s=3)
    assert desk.final(job).state == "timed_out"
    assert not psutil.pid_exists(int(desk.whole_log(job)))


def test_a_job_that_ends_in_time_is_not_touched(desk: Desk, worker: WorkerProcess) -> None:
    assert desk.final(desk.shell("sleep 0.1", timeout_s=30)).state == "succeeded"


# --- cancels ---


def test_a_queued_job_is_cancelled_at_once(desk: Desk) -> None:
    job = desk.shell("true")
    assert cancel(desk, job) == "cancelled"
    assert desk.record(job).state == "cancelled"


def test_a_running_job_is_cancelled_only_when_all_of_its_tree_is_gone(
    desk: Desk, worker: WorkerProcess
) -> None:
    job = desk.shell("setsid sh -c 'trap \"\" TERM; echo $$; while :; do sleep 0.05; done' & sleep 300")
    stubborn = pid_told_by(desk, job)
    assert cancel(desk, job) == "asked"
    wait_until(
        lambda: desk.record(job).final or not psutil.pid_exists(stubborn),
        PATIENCE_S,
        "the job or its child ends",
    )
    assert not psutil.pid_exists(stubborn)
    assert (desk.final(job).state, desk.record(job).end_reason) == ("cancelled", "cancelled")


def test_a_job_that_ignores_term_is_killed_after_its_grace(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell(IGNORING)
    pid = pid_told_by(desk, job)
    before = time.monotonic()
    cancel(desk, job)
    assert desk.final(job).state == "cancelled"
    assert time.monotonic() - before >= 1
    assert not psutil.pid_exists(pid)


def test_a_job_may_clean_up_when_it_is_cancelled(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell(
        "trap 'echo saved > outputs/state; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    )
    speaks(desk, job)
    cancel(desk, job)
    assert desk.final(job).state == "cancelled"
    assert desk.output(job, "outputs/state") == b"saved\n"


def test_a_job_that_is_being_prepared_is_cancelled_before_it_begins(
    desk: Desk, worker: WorkerProcess, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3000):
        (source / f"f{number}").write_text(str(number))
    digest = make_bundle(source, desk.store).digest
    job = desk.shell("touch began", source=digest)
    desk.reaches(job, "scheduled")
    cancel(desk, job)
    assert desk.final(job).state == "cancelled"
    assert desk.whole_log(job) == b""


def test_a_cancel_after_the_end_comes_too_late(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("true")
    desk.final(job)
    assert desk.queue.run(functions.cancel(job)) == ("too_late", "succeeded")


def test_a_cancelled_function_stops_in_the_middle(desk: Desk, worker: WorkerProcess) -> None:
    def spin() -> None:
        print("spinning", flush=True)
        while True:
            pass

    job = desk.function(spin)
    speaks(desk, job)
    cancel(desk, job)
    assert desk.final(job).state == "cancelled"


# --- retries ---


def test_a_failed_job_is_not_tried_again_unless_asked(desk: Desk, worker: WorkerProcess) -> None:
    record = desk.final(desk.shell("exit 1"))
    assert (record.attempt, record.retries, record.state) == (1, 0, "failed")


def test_a_job_is_tried_again_after_a_pause_as_often_as_asked(
    desk: Desk, worker: WorkerProcess, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    job = desk.shell(
        f"date +%s%N >> {marks}; exit 1", options={"max_retries": 2, "min_backoff": 200, "max_backoff": 200}
    )
    record = desk.final(job)
    assert (record.state, record.attempt, record.retries) == ("failed", 3, 2)
    times = [int(line) for line in marks.read_text().split()]
    assert len(times) == 3
    assert min(later - earlier for earlier, later in pairwise(times)) >= 100_000_000


def test_a_job_that_recovers_has_succeeded_and_knows_its_attempt(
    desk: Desk, worker: WorkerProcess, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    script = f"echo $GPULAYER_ATTEMPT; [ -e {mark} ] || {{ touch {mark}; exit 1; }}"
    job = desk.shell(script, options={"max_retries": 3, "min_backoff": 10, "max_backoff": 10})
    assert desk.final(job).state == "succeeded"
    assert desk.whole_log(job) == b"2\n"


def test_a_job_that_waits_for_its_retry_can_be_cancelled(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("exit 1", options={"max_retries": 5, "min_backoff": 60_000})
    wait_until(lambda: desk.record(job).phase == "retrying", PATIENCE_S, "the job waits for its retry")
    assert cancel(desk, job) == "cancelled"
    assert desk.record(job).state == "cancelled"


# --- preparation ---


def test_source_and_inputs_are_there_before_the_job_and_keep_their_modes(
    desk: Desk, worker: WorkerProcess, tmp_path: Path
) -> None:
    for name, text, mode in (
        ("source/run.sh", "#!/bin/sh\ncat data/in\n", 0o755),
        ("inputs/data/in", "42", 0o644),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)
    source = make_bundle(tmp_path / "source", desk.store).digest
    inputs = make_bundle(tmp_path / "inputs", desk.store).digest
    job = desk.command("./run.sh", source=source, inputs=inputs)
    record = desk.final(job)
    assert record.state == "succeeded", desk.error(job)
    assert desk.whole_log(job) == b"42"
    assert desk.notes(job) == []
    assert states_of(desk, job) == ["scheduled", "running", "succeeded"]


def test_a_source_that_no_store_has_fails_the_job_by_name(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.command("true", source="0" * 64)
    record = desk.final(job)
    assert (record.state, record.end_reason) == ("failed", "cannot_start")
    assert "0" * 12 in desk.error(job)["message"]


def test_many_jobs_that_start_together_are_all_seen_running_soon(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    # Long enough that no heartbeat tells it.
    hire(slots=2, heartbeat_s=4 * PATIENCE_S, lease_s=40 * PATIENCE_S)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "file").write_text("x")
    digest = make_bundle(tmp_path / "source", desk.store).digest
    jobs = [desk.command("sleep", "300", source=digest) for _ in range(2)]
    for job in jobs:
        desk.reaches(job, "running")
        cancel(desk, job)
    for job in jobs:
        desk.final(job)


def states_of(desk: Desk, job: str) -> list[str]:
    """The states that the event stream tells of a job, after its being queued."""
    entries = desk.link.call("XRANGE", f"{desk.queue.keys.root}events", "-", "+")
    told = [dict(zip(values[::2], values[1::2], strict=True)) for _, values in entries]
    return [t[b"state"].decode() for t in told if t[b"job"] == job.encode() and t[b"state"] != b"queued"]
