"""The queue's server is killed, away for long, emptied or out of memory while jobs run: they go on and are told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gpulayer_broker import functions
from gpulayer_broker.embedded import ensure_server, stop_server
from gpulayer_broker.errors import ConfigError, ServerOutOfMemory
from gpulayer_broker.folders import Folders
from gpulayer_broker.locks import holder_pid, wait_until_free
from tests.reliability.conftest import Hire
from tests.reliability.history import History, account
from tests.reliability.nemesis import is_gone, kill, out_of_memory, outage
from tests.reliability.proxy import Proxy
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk

SHORT = {"lease_s": 3, "heartbeat_s": 0.3, "lease_grace_s": 0.5}


def gated(gate: Path, text: str = "done") -> str:
    return f"echo $$; while [ ! -e {gate} ]; do sleep 0.02; done; echo {text}"


def running(desk: Desk, job: str) -> int:
    return int(wait_until(lambda: desk.tail(job), PATIENCE_S, f"{job} speaks"))


# --- killed, and back ---


def test_jobs_run_on_while_the_server_is_dead_and_are_reported_to_the_next(
    desk: Desk, hire: Hire, server: QueueServer, tmp_path: Path
) -> None:
    worker = hire(slots=3)
    gates = [tmp_path / f"gate{n}" for n in range(3)]
    jobs = [desk.shell(gated(gate, f"result {n}"), outputs=("*.out",)) for n, gate in enumerate(gates)]
    pids = [running(desk, job) for job in jobs]
    with outage(server):
        gates[0].touch()
        wait_until(lambda: is_gone(pids[0]), PATIENCE_S, "one job ends while nobody can be told")
    for gate in gates[1:]:
        gate.touch()
    for n, job in enumerate(jobs):
        record = desk.final(job)
        assert (record.state, record.attempt, record.losses) == ("succeeded", 1, 0)
        assert desk.whole_log(job) == b"%d\nresult %d\n" % (pids[n], n)
    assert worker.alive


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    with History(tmp_path / "history.jsonl") as history:
        yield history


def test_a_server_killed_under_full_load_loses_no_job(
    desk: Desk, hire: Hire, server: QueueServer, history: History
) -> None:
    hire(slots=4)
    dice = random.Random(11)
    jobs: list[str] = []

    def submit() -> None:
        for n in range(150):
            spec = desk.command_spec("sh", "-c", f"echo {n}")
            job_id = f"j_load{n}"
            with history.call("submit", id=job_id):
                jobs.append(desk.submit(spec, id=job_id))

    client = threading.Thread(target=submit, daemon=True)
    client.start()
    for _ in range(4):
        wait_until(lambda: dice.random() < 0.03, PATIENCE_S, "a random moment", every=0.01)
        with outage(server):
            pass
    client.join(PATIENCE_S)
    assert not client.is_alive()
    for n, job in enumerate(jobs):
        assert desk.final(job).state == "succeeded"
        assert desk.whole_log(job) == b"%d\n" % n
    assert account(history.lines(), set(jobs)) == []
    assert len(set(jobs)) == 150


# --- away for longer than a lease ---


def let_pass(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end_s, PATIENCE_S, f"{seconds} s have passed")


def test_an_outage_of_three_leases_ends_a_job_and_it_runs_again(
    desk: Desk, hire: Hire, server: QueueServer
) -> None:
    worker = hire(**SHORT)
    job = desk.shell("echo $$; [ $GPULAYER_ATTEMPT -gt 1 ] || sleep 300")
    pid = running(desk, job)
    with outage(server):
        wait_until(lambda: is_gone(pid), PATIENCE_S, "the job is ended with its lease")
        let_pass(3 * SHORT["lease_s"])
    record = desk.final(job)
    # A grant that reaches a busy worker late goes back, and the next is another attempt.
    assert (record.state, record.losses, record.attempt > 1) == ("succeeded", 1, True)
    assert worker.alive


def test_a_job_that_may_outlive_an_outage_does(
    desk: Desk, hire: Hire, server: QueueServer, tmp_path: Path
) -> None:
    hire(**SHORT)
    gate = tmp_path / "gate"
    job = desk.shell(gated(gate), on_outage="keep")
    pid = running(desk, job)
    with outage(server):
        let_pass(3 * SHORT["lease_s"])
        assert not is_gone(pid)
    gate.touch()
    record = desk.final(job)
    assert (record.state, record.attempt) == ("succeeded", 1)
    assert desk.whole_log(job) == b"%d\ndone\n" % pid


def test_a_worker_whose_commit_waits_through_an_outage_commits_once(
    desk: Desk, proxy: Proxy, hire: Hire, tmp_path: Path
) -> None:
    worker = hire(endpoint=proxy.endpoint)
    gate, marks = tmp_path / "gate", tmp_path / "marks"
    job = desk.shell(gated(gate, "kept") + f"; echo x >> {marks}")
    pid = running(desk, job)
    proxy.shut()
    gate.touch()
    wait_until(lambda: is_gone(pid), PATIENCE_S, "the job has ended")
    wait_until(lambda: worker.said().count("heartbeat of") > 2, PATIENCE_S, "the worker is cut off")
    proxy.reopen()
    record = desk.final(job)
    assert (record.state, record.attempt) == ("succeeded", 1)
    assert marks.read_text() == "x\n"


def test_a_worker_can_be_stopped_in_order_while_the_queue_is_away(
    desk: Desk, proxy: Proxy, hire: Hire
) -> None:
    worker = hire(endpoint=proxy.endpoint, lease_s=4)
    job = desk.shell("echo $$; sleep 300")
    pid = running(desk, job)
    proxy.shut()
    worker.end()
    assert worker.process.returncode == 0
    assert is_gone(pid)
    proxy.reopen()


# --- emptied ---


def test_a_worker_registers_again_after_all_keys_are_gone(desk: Desk, hire: Hire) -> None:
    worker = hire()
    job = desk.shell("echo $$; sleep 300")
    pid = running(desk, job)
    desk.link.call("FLUSHALL")
    wait_until(lambda: is_gone(pid), PATIENCE_S, "a job that nobody knows any more is ended")
    wait_until(lambda: desk.online(), PATIENCE_S, "the worker is known again")
    assert desk.final(desk.command("true")).state == "succeeded"
    assert worker.alive


# --- out of memory ---


def test_without_memory_submits_are_refused_and_what_runs_ends_with_its_result(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    hire(slots=2)
    gate = tmp_path / "gate"
    jobs = [desk.shell(gated(gate)), desk.shell("echo $$; sleep 300")]
    for job in jobs:
        running(desk, job)
    with out_of_memory(desk.link):
        with pytest.raises(ServerOutOfMemory):
            desk.command("true")
        gate.touch()
        assert desk.final(jobs[0]).state == "succeeded"
        assert desk.whole_log(jobs[0]).endswith(b"done\n")
        desk.queue.run(functions.cancel(jobs[1]))
        assert desk.final(jobs[1]).state == "cancelled"
        assert desk.online() == 1
    assert desk.final(desk.command("true")).state == "succeeded"


# --- damaged files, through the private server ---


@pytest.fixture
def folders(tmp_path: Path, isolated_environment: Path) -> Iterator[Folders]:
    folder = tmp_path / "private"
    folders = Folders(folder / "state" / "machine", isolated_environment / "run" / "gpulayer").create()
    yield folders
    stop_server(folders)


def fill(folders: Folders, count: int) -> list[str]:
    with closing(Desk(ensure_server(folders), "default")) as desk:
        return [desk.command("true") for _ in range(count)]


def increment(folders: Folders) -> Path:
    return next((folders.queue / "appendonlydir").glob("*.incr.aof"))


def test_a_queue_file_cut_short_starts_with_all_but_the_last_call(folders: Folders) -> None:
    jobs = fill(folders, 20)
    crash(folders)
    file = increment(folders)
    file.write_bytes(file.read_bytes()[:-7])
    with closing(Desk(ensure_server(folders), "default")) as desk:
        found = [record for record in desk.queue.records(jobs) if record]
    assert [record.id for record in found] == jobs[:-1]
    assert {record.state for record in found} == {"queued"}


def test_a_queue_file_damaged_in_the_middle_is_refused_in_one_line(folders: Folders) -> None:
    fill(folders, 20)
    crash(folders)
    file = increment(folders)
    data = bytearray(file.read_bytes())
    # Behind the functions' source, within which any byte is as good as another.
    at = len(data) - 2000
    data[at : at + 400] = b"\x00" * 400
    file.write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        ensure_server(folders)
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)


def crash(folders: Folders) -> None:
    kill(holder_pid(folders.server_lock) or 0)
    assert wait_until_free(folders.server_lock, PATIENCE_S)
