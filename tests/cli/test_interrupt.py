"""`gpulayer interrupt`: a job elsewhere sees Ctrl-C, and what it makes of it is its own affair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulayer_broker.functions import interrupt
from tests.cli.conftest import Cli
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until
from tests.workers import WorkerProcess

SAVES = """
import sys, time
print("begun", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("saved", flush=True)
    sys.exit(7)
"""
FUNCTION = """
import time
def job():
    print("begun", flush=True)
    try:
        time.sleep(600)
    except KeyboardInterrupt:
        return "saved"
"""


def begun(cli: Cli, job_id: str) -> None:
    wait_until(lambda: "begun" in cli("logs", job_id).out, PATIENCE_S, "it has begun")


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_a_command_sees_ctrl_c_and_ends_as_it_likes(cli: Cli, here: Path) -> None:
    (here / "saves.py").write_text(SAVES)
    job_id = cli("submit", "-d", "--", "python", "saves.py").out.strip()
    begun(cli, job_id)

    assert cli("interrupt", job_id).err == f"job {job_id}: SIGINT is on its way\n"
    assert cli("wait", job_id).code == 7
    assert cli("logs", job_id).out == "begun\nsaved\n"


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_a_function_sees_a_keyboard_interrupt_and_may_still_return(cli: Cli, here: Path) -> None:
    (here / "interruptible_job.py").write_text(FUNCTION)
    job_id = cli("run", "interruptible_job:job", "--detach").out.strip()
    begun(cli, job_id)

    assert json.loads(cli("interrupt", job_id, "--json").out) == [{"schema": 1, "id": job_id, "asked": True}]
    assert cli("wait", job_id).code == 0


def test_only_what_runs_is_interrupted_and_only_the_attempt_that_was_meant(cli: Cli, bench: Bench) -> None:
    job_id = cli("submit", "-d", "--", "true").out.strip()
    assert cli("interrupt", job_id).err == f"job {job_id}: it does not run\n"

    grant = bench.take(job_id)
    cli("interrupt", job_id)
    mails = bench.hand.link.call("XRANGE", bench.hand.key(f"inbox:{bench.machine.id}"), "-", "+")
    assert mails[-1][1] == [b"kind", b"interrupt", b"job", job_id.encode(), b"token", grant.token.encode()]
    before = bench.queue.record(job_id)
    assert before.state == "running"
    assert not before.cancel_asked
    bench.end(job_id)
    assert cli("interrupt", job_id).code == 0
    assert bench.queue.run(interrupt(job_id)) == ("not_running", "succeeded")


def test_what_has_no_process_of_its_own_is_not_interrupted(cli: Cli, here: Path, bench: Bench) -> None:
    (here / "warm_job.py").write_text("def job(): ...")
    warm = cli("run", "warm_job:job", "--isolation", "warm", "--detach").out.strip()

    outcome = cli("interrupt", warm)
    assert outcome.code == 2
    assert f"gpulayer cancel {warm} ends it" in outcome.err


@pytest.mark.timeout(90)
def test_all_jobs_of_a_group_are_interrupted(cli: Cli, here: Path, worker: WorkerProcess) -> None:
    (here / "saves.py").write_text(SAVES)
    group = cli("submit", "-d", "--array", "1-2", "--", "python", "saves.py").out.strip()
    for number in (1, 2):
        begun(cli, f"{group}-{number}")

    assert len(cli("interrupt", group).err.splitlines()) == 2
    assert cli("wait", group).code == 1
    assert cli("logs", f"{group}-2").out == "begun\nsaved\n"
