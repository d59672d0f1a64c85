"""Workers, fork servers and jobs that are killed or stand still: every job ends once, nothing of the dead lives on."""

from __future__ import annotations

import random
import signal
import time
from itertools import cycle, islice
from pathlib import Path

import psutil

from gpulayer_broker import functions
from gpulayer_broker.settings import Settings
from tests.reliability.conftest import Hire
from tests.reliability.nemesis import all_gone, fork_servers, is_gone, job_processes, kill, standing_still
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, WorkerProcess

KILLS = 50
STUBBORN = "trap '' TERM; while :; do sleep 0.05; done"


def told_pids(folder: Path) -> set[int]:
    return {int(line) for file in folder.iterdir() for line in file.read_text().split()}


def forgive_losses(desk: Desk) -> None:
    """Jobs are killed here more often than a job is forgiven by default."""
    desk.queue.configure(Settings(lost_workers=1000))


def test_workers_killed_at_fifty_random_moments_lose_no_job_and_leave_no_process(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    forgive_losses(desk)
    dice = random.Random(4)
    pids, marks = tmp_path / "pids", tmp_path / "marks"
    pids.mkdir()
    marks.mkdir()
    script = f"""echo $$ >> {pids}/$GPULAYER_JOB_ID
        setsid sh -c 'echo $$ >> {pids}/'$GPULAYER_JOB_ID'; exec sleep 300' &
        echo $GPULAYER_ATTEMPT >> {marks}/$GPULAYER_JOB_ID; sleep 0.0$(($$ % 10)); echo result"""
    # While one starts again, the other works and is killed next.
    workers = [hire(slots=3), hire(slots=3)]
    of_the_dead: dict[str, list[psutil.Process]] = {worker.name: [] for worker in workers}
    jobs = []
    for worker in islice(cycle(workers), KILLS):
        worker.settle()
        assert not any(map(is_alive, of_the_dead[worker.name])), "leftovers are gone before it registers"
        jobs += [desk.shell(script) for _ in range(3)]
        forgive_deaths(desk, worker)
        wait_until(lambda: dice.random() < 0.1, PATIENCE_S, "a random moment", every=0.005)
        of_the_dead[worker.name] = psutil.Process(worker.pid).children(recursive=True)
        worker.kill()
        worker.start()
    for job in jobs:
        record = desk.final(job, 60)
        assert record.state == "succeeded"
        assert record.losses < record.attempt
        assert desk.whole_log(job) == b"result\n"
        attempts = (marks / job).read_text().split()
        assert len(attempts) == len(set(attempts)), "no attempt runs twice"
        assert attempts[-1] == str(record.attempt), "nothing runs behind the end"
    all_gone(list(told_pids(pids)))


def forgive_deaths(desk: Desk, worker: WorkerProcess) -> None:
    """Workers die here more often than one is trusted by default: none is to be put aside."""
    desk.link.call("DEL", f"{desk.queue.keys.root}deaths:{worker_id(desk, worker)}")


def is_alive(process: psutil.Process) -> bool:
    """Whether this very process, and not another of its number, still runs."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def test_a_killed_job_fails_by_its_signal_and_takes_its_children_along(desk: Desk, hire: Hire) -> None:
    hire()
    job = desk.shell(f"setsid sh -c 'echo $$; {STUBBORN}' & echo $$; wait")
    main, child = sorted(
        int(pid) for pid in wait_until(lambda: words(desk, job, 2), PATIENCE_S, "both speak")
    )
    kill(main)
    record = desk.final(job)
    assert (record.state, record.end_reason, desk.error(job)["signal"]) == ("failed", "signal", 9)
    assert is_gone(child)
    assert desk.final(desk.command("true")).state == "succeeded"


def words(desk: Desk, job: str, count: int, attempt: int = 1) -> list[bytes]:
    found = desk.tail(job, attempt).split()
    return found if len(found) >= count else []


def test_a_killed_grandchild_is_the_jobs_own_affair(desk: Desk, hire: Hire) -> None:
    hire()
    job = desk.shell("sleep 300 & echo $!; wait $!; echo child ended with $?")
    kill(int(wait_until(lambda: words(desk, job, 1), PATIENCE_S, "it speaks")[0]))
    assert desk.final(job).state == "succeeded"
    assert desk.whole_log(job).endswith(b"child ended with 137\n")


def test_a_fork_server_killed_while_many_jobs_start_loses_none(desk: Desk, hire: Hire) -> None:
    forgive_losses(desk)
    worker = hire(slots=20)
    first = desk.shell("sleep 0.01")
    desk.final(first)
    for round_ in range(4):
        jobs = [desk.shell(f"sleep 0.0{n % 10}; echo {n}") for n in range(20)]
        if round_ % 2:
            wait_until(lambda: job_processes(worker.pid), PATIENCE_S, "some job runs", every=0.001)
        for pid in fork_servers(worker.pid):
            kill(pid)
        for n, job in enumerate(jobs):
            assert desk.final(job, 30).state == "succeeded"
            assert desk.whole_log(job) == b"%d\n" % n
    assert worker.alive


def test_a_worker_that_stood_still_past_its_lease_changes_nothing_when_it_wakes(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    sleeper = hire(lease_s=3, heartbeat_s=0.3, lease_grace_s=0.5)
    script = f"echo of $GPULAYER_ATTEMPT $$; if [ $GPULAYER_ATTEMPT = 1 ]; then {STUBBORN}; fi; echo from the second"
    job = desk.shell(script, outputs=("*.txt",))
    pid = int(wait_until(lambda: words(desk, job, 3), PATIENCE_S, "it runs")[2])
    with standing_still(sleeper.pid):
        second = hire(lease_s=3, heartbeat_s=0.3, lease_grace_s=0.5)
        wait_until(lambda: is_gone(pid), PATIENCE_S, "its fork server kills the job at the lease's end")
        record = desk.final(job)
        assert (record.state, record.attempt, record.losses) == ("succeeded", 2, 1)
        before = desk.link.call("HGETALL", desk.queue.keys.job(job))
        tail = desk.tail(job, attempt=2)
    wait_until(
        lambda: desk.final(desk.command("true")).worker == worker_id(desk, sleeper),
        PATIENCE_S,
        "it works again",
    )
    assert desk.link.call("HGETALL", desk.queue.keys.job(job)) == before
    assert desk.tail(job, attempt=2) == tail
    assert sleeper.alive
    assert second.alive


def worker_id(desk: Desk, worker: WorkerProcess) -> str:
    return next(w for w, facts in desk.workers().items() if f'"name":"{worker.name}"' in facts["info"])


def test_a_job_whose_main_process_still_runs_is_not_taken_by_another_before_its_lease_is_over(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    script = f"while :; do echo $GPULAYER_ATTEMPT $(date +%s%N) >> {marks}; sleep 0.02; done"
    sleeper = hire(lease_s=3, heartbeat_s=0.3, lease_grace_s=0.5)
    job = desk.shell(script)
    wait_until(lambda: marks.exists() and desk.record(job).state == "running", PATIENCE_S, "it runs")
    with standing_still(sleeper.pid):
        hire(lease_s=3, heartbeat_s=0.3, lease_grace_s=0.5)
        wait_until(lambda: "\n2 " in marks.read_text(), PATIENCE_S, "the second attempt runs")
    stamps = [(int(a), int(at)) for a, at in (line.split() for line in marks.read_text().splitlines())]
    assert max(at for a, at in stamps if a == 1) < min(at for a, at in stamps if a == 2)
    desk.queue.run(functions.cancel(job))
    assert desk.final(job).state == "cancelled"


# --- jobs that bring down what runs them ---


def respawn(worker: WorkerProcess) -> bool:
    """As a supervisor: starts it again where it has ended."""
    if not worker.alive:
        worker.start()
    return True


def test_a_job_that_kills_its_worker_three_times_is_set_aside_with_the_reason(desk: Desk, hire: Hire) -> None:
    worker = hire()
    job = desk.python(
        "import os, psutil; psutil.Process().parent().parent().kill(); import time; time.sleep(300)"
    )
    wait_until(lambda: respawn(worker) and desk.record(job).final, PATIENCE_S, "the job is set aside")
    record = desk.record(job)
    assert (record.state, record.end_reason, record.losses) == ("failed", "worker_lost", 3)
    assert desk.error(job)["message"] == "3 workers were lost while they ran this job"
    assert desk.link.call("ZSCORE", f"{desk.queue.keys.root}dead:gpulayer", job) is not None
    respawn(worker)
    assert desk.final(desk.command("true")).state == "succeeded"


def test_a_job_that_kills_its_fork_server_three_times_is_set_aside_too(desk: Desk, hire: Hire) -> None:
    worker = hire()
    job = desk.shell("kill -9 $PPID; sleep 300")
    record = desk.final(job)
    assert (record.state, record.end_reason, record.losses) == ("failed", "worker_lost", 3)
    assert worker.alive
    assert desk.final(desk.command("true")).state == "succeeded"


def test_three_different_jobs_that_die_with_a_worker_quarantine_it(desk: Desk, hire: Hire) -> None:
    other = hire(slots=1)
    held = desk.shell("echo ready; sleep 300")
    wait_until(lambda: desk.tail(held), PATIENCE_S, "the other worker is busy")
    worker = hire(slots=1)
    for _ in range(3):
        job = desk.shell("echo ready; sleep 300")
        wait_until(lambda: desk.tail(job), PATIENCE_S, "it runs")  # noqa: B023
        worker.kill()
        desk.queue.run(functions.cancel(job))
        worker.start()
        desk.final(job)
    facts = desk.workers()[worker_id(desk, worker)]
    assert int(facts["quarantined_until"]) > time.time() * 1000
    waiting = desk.command("true")
    desk.queue.run(functions.cancel(held))
    assert desk.final(waiting).worker == worker_id(desk, other)


def test_the_only_worker_is_never_quarantined(desk: Desk, hire: Hire) -> None:
    worker = hire(slots=1)
    for _ in range(3):
        job = desk.shell("echo ready; sleep 300")
        wait_until(lambda: desk.tail(job), PATIENCE_S, "it runs")  # noqa: B023
        worker.kill()
        desk.queue.run(functions.cancel(job))
        worker.start()
        desk.final(job)

    assert desk.final(desk.command("true")).state == "succeeded"


def test_a_worker_ended_while_it_starts_leaves_nothing(desk: Desk, hire: Hire) -> None:
    forgive_losses(desk)
    dice = random.Random(7)
    worker = hire()
    job = desk.shell("sleep 0.2; echo done")
    for _ in range(8):
        wait_until(lambda: dice.random() < 0.05, PATIENCE_S, "a random moment", every=0.01)
        worker.send(dice.choice([signal.SIGKILL, signal.SIGTERM]))
        worker.process.wait(PATIENCE_S)
        worker.start()
    assert desk.final(job).state == "succeeded"
