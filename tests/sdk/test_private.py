"""The private set-up: one for a user, healed when killed, stopped when idle or told to, detached from its clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpulayer import private, session
from gpulayer.client import Client
from gpulayer_broker import library
from gpulayer_broker.alive import is_stopped
from gpulayer_broker.connection import Link, connect
from gpulayer_broker.embedded import claim_idle
from gpulayer_broker.errors import ConfigError
from gpulayer_broker.folders import Folders, locate_folders
from gpulayer_broker.locks import holder_pid, is_held
from gpulayer_broker.settings import Settings
from tests.support import PATIENCE_S, wait_until

SETTINGS = Settings(term_grace_s=1)

# A stand-in for the worker: the same lock, the same signals, nothing to run.
WORKER = """
import os, signal, sys, time
from gpulayer_broker.folders import locate_folders
from gpulayer_broker.locks import wait_lock

name = sys.argv[sys.argv.index("--name") + 1]
lock = wait_lock(locate_folders().worker_lock(name), 60)
assert lock is not None, "another worker lives"
lock.record_pid(os.getpid())
print("arguments", sys.argv[1:], flush=True)
stop = signal.SIG_IGN if {stubborn} else lambda *_: sys.exit(0)
signal.signal(signal.SIGTERM, stop)
while True:
    time.sleep(60)
"""


@pytest.fixture
def worker(tmp_path: Path) -> list[str]:
    return worker_program(tmp_path, stubborn=False)


def worker_program(folder: Path, *, stubborn: bool) -> list[str]:
    path = folder / "worker.py"
    path.write_text(WORKER.format(stubborn=stubborn))
    return [sys.executable, str(path)]


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, isolated_environment: Path, tmp_path: Path) -> Iterator[Folders]:
    """A state folder of this test alone; what runs on it is stopped afterwards."""
    monkeypatch.setenv("GPULAYER_TERM_GRACE_S", "1")
    state = isolated_environment / "state" / tmp_path.name
    monkeypatch.setenv("GPULAYER_STATE_DIR", str(state))
    yield locate_folders().create()
    private.release_private()
    private.down()


def start(worker: list[str], **values: Any) -> Link:
    return connect(private.ensure_private(SETTINGS.changed(**values), worker_program=worker))


def pid_of(part: str) -> int:
    """The process of a part once it lives: server, worker or supervisor."""
    facts = wait_until(lambda: private.status()[part], PATIENCE_S, f"the {part} lives")
    return int(facts["pid"])


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), PATIENCE_S, f"process {pid} is gone")


def kill_supervisor(folders: Folders) -> None:
    """Its lock comes free with its last thread, a moment after the process counts as ended."""
    kill(pid_of("supervisor"))
    wait_until(lambda: not is_held(folders.supervisor_lock), PATIENCE_S, "the supervisor's lock is free")


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def test_the_first_client_starts_all_of_it(folders: Folders, worker: list[str]) -> None:
    with start(worker) as link:
        assert link.call("PING") == b"PONG"

    pids = {pid_of(part) for part in ("server", "worker", "supervisor")}
    assert len(pids) == 3
    status = private.status()
    assert status["data"] == str(folders.state)
    assert status["socket"] == str(folders.socket)
    assert status["server"]["version"][0].isdigit()
    assert status["supervisor"]["uptime_s"] >= 0


def test_the_worker_is_told_where_the_queue_is_and_who_it_is(folders: Folders, worker: list[str]) -> None:
    start(worker, namespace="ours").close()
    pid_of("worker")

    def told() -> str:
        return (folders.state / "worker.log").read_text()

    wait_until(lambda: "arguments" in told(), PATIENCE_S, "the worker wrote its arguments")
    assert f"'--redis', 'unix://{folders.socket}'" in told()
    assert f"'--name', '{private.worker_name()}'" in told()
    assert "'--namespace', 'ours'" in told()
    assert "'--private'" in told()


def test_clients_at_once_make_one_set_up(folders: Folders, worker: list[str]) -> None:
    script = (
        "import sys\n"
        "from gpulayer import private\n"
        "from gpulayer_broker.settings import Settings\n"
        "private.ensure_private(Settings(), worker_program=sys.argv[1:])\n"
    )
    with ExitStack() as ends:
        clients = [
            ends.enter_context(subprocess.Popen([sys.executable, "-c", script, *worker])) for _ in range(4)
        ]
        for client in clients:
            ends.callback(client.kill)
        assert [client.wait(PATIENCE_S) for client in clients] == [0, 0, 0, 0]

    pid_of("worker")
    mine = [
        process for process in psutil.process_iter() if environment_of(process) == str(folders.state.parent)
    ]
    assert len([p for p in mine if "gpulayer.private" in p.cmdline()]) == 1
    assert len([p for p in mine if str(folders.queue / "server.conf") in p.cmdline()]) == 1
    assert len([p for p in mine if p.cmdline()[1:2] == worker[1:]]) == 1


def environment_of(process: psutil.Process) -> str | None:
    try:
        return None if process.pid == os.getpid() else process.environ().get("GPULAYER_STATE_DIR")
    except psutil.Error:
        return None


def test_a_second_call_starts_nothing(
    folders: Folders, worker: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(worker).close()
    monkeypatch.setattr(private, "_start_supervisor", lambda *_: pytest.fail("a process was started"))

    start(worker).close()


def test_a_killed_server_comes_back_with_its_data(folders: Folders, worker: list[str]) -> None:
    with start(worker) as link:
        link.call("SET", "a", "1")
        before = pid_of("server")
        kill(before)

        assert link.call_idempotent("GET", "a", deadline_s=PATIENCE_S) == b"1"
    assert pid_of("server") != before


def test_a_server_that_starts_anew_is_not_taken_for_one_without_a_socket(
    folders: Folders, worker: list[str]
) -> None:
    with start(worker, idle_stop_s=0.2) as link:  # the supervisor looks often
        pid_of("worker")
        wait_until(lambda: private.status()["server"]["uptime_s"] > 6, PATIENCE_S, "the server has settled")
        kill(pid_of("server"))

        assert link.call_idempotent("PING", deadline_s=PATIENCE_S) == b"PONG"
    assert folders.supervisor_log.read_text().count("the queue server ended") == 1
    assert "shutdown" not in (folders.queue / "server.log").read_text()


def test_a_killed_worker_comes_back(folders: Folders, worker: list[str]) -> None:
    start(worker).close()
    before = pid_of("worker")

    kill(before)

    wait_until(lambda: pid_of("worker") != before, PATIENCE_S, "another worker lives")


@pytest.mark.parametrize("part", ["server", "worker"])
def test_a_part_that_is_stopped_is_told_to_go_on(folders: Folders, worker: list[str], part: str) -> None:
    start(worker).close()
    pid = pid_of(part)

    os.kill(pid, signal.SIGSTOP)

    told = f"{pid} was stopped: it is told to go on"
    wait_until(lambda: told in folders.supervisor_log.read_text(), PATIENCE_S, f"the {part} is told")
    wait_until(lambda: not is_stopped(pid), PATIENCE_S, f"the {part} goes on")
    assert pid_of(part) == pid


def test_a_supervisor_that_is_stopped_goes_on_with_the_next_command(
    folders: Folders, worker: list[str]
) -> None:
    start(worker).close()
    supervisor = pid_of("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    wait_until(lambda: private.status()["supervisor"]["stopped"], PATIENCE_S, "the supervisor stands still")

    start(worker).close()

    wait_until(lambda: not is_stopped(supervisor), PATIENCE_S, "the supervisor goes on")
    assert pid_of("supervisor") == supervisor


def test_a_server_that_does_not_answer_is_told_of_and_not_waited_for(
    folders: Folders, worker: list[str]
) -> None:
    start(worker).close()
    server, supervisor = pid_of("server"), pid_of("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(server, signal.SIGSTOP)

    facts = wait_until(
        lambda: (found := private.status()["server"])["stopped"] and found,
        PATIENCE_S,
        "the server stands still",
    )

    assert (facts["pid"], facts["answers"], facts["version"]) == (server, False, None)


def test_a_new_supervisor_adopts_server_and_worker(folders: Folders, worker: list[str]) -> None:
    start(worker).close()
    before = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    kill_supervisor(folders)

    start(worker).close()

    assert pid_of("supervisor") != before["supervisor"]
    assert pid_of("server") == before["server"]
    assert pid_of("worker") == before["worker"]


def test_an_adopted_server_and_worker_are_restarted_too(folders: Folders, worker: list[str]) -> None:
    start(worker).close()
    before = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    kill_supervisor(folders)
    with start(worker) as link:
        kill(before["server"])
        kill(before["worker"])

        assert link.call_idempotent("PING", deadline_s=PATIENCE_S) == b"PONG"
    wait_until(lambda: pid_of("worker") != before["worker"], PATIENCE_S, "another worker lives")


def test_down_stops_all_and_says_what(folders: Folders, worker: list[str]) -> None:
    with start(worker) as link:
        link.call("SET", "a", "1")
    pids = {part: pid_of(part) for part in ("worker", "server", "supervisor")}

    stopped = private.down()

    assert stopped == [f"{part} (pid {pid})" for part, pid in pids.items()]
    assert not any(is_running(pid) for pid in pids.values())
    assert private.down() == []
    with start(worker) as link:
        assert link.call("GET", "a") == b"1"


def test_down_stops_what_a_killed_supervisor_left(folders: Folders, worker: list[str]) -> None:
    start(worker).close()
    pids = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    kill_supervisor(folders)

    private.down()

    assert not any(is_running(pid) for pid in pids.values())


def test_a_second_supervisor_leaves_all_to_the_first(folders: Folders, worker: list[str]) -> None:
    start(worker).close()
    before = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    command = [sys.executable, "-P", "-m", "gpulayer.private", "--", *worker]

    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0

    assert {part: pid_of(part) for part in before} == before


def test_a_third_term_kills_a_worker_that_does_not_end(folders: Folders, tmp_path: Path) -> None:
    start(worker_program(tmp_path, stubborn=True), term_grace_s=600).close()
    stubborn, supervisor = pid_of("worker"), pid_of("supervisor")
    wait_until(
        lambda: "arguments" in (folders.state / "worker.log").read_text(), PATIENCE_S, "the worker is up"
    )

    os.kill(supervisor, signal.SIGTERM)
    os.kill(supervisor, signal.SIGTERM)

    def ended() -> bool:
        # Signals of one kind merge while one is pending: a user in a hurry also sends another.
        if is_running(supervisor):
            os.kill(supervisor, signal.SIGTERM)
        return not is_running(supervisor) and not is_running(stubborn)

    wait_until(ended, PATIENCE_S, "supervisor and worker have ended", every=0.1)
    assert not is_held(folders.server_lock)


def test_it_stops_when_no_client_is_left_and_no_job_open(folders: Folders, worker: list[str]) -> None:
    start(worker, idle_stop_s=0.3).close()
    supervisor = pid_of("supervisor")
    pid_of("worker")

    private.release_private()

    wait_until(lambda: not is_running(supervisor), PATIENCE_S, "the idle set-up has stopped")
    assert not is_held(folders.server_lock)
    assert private.status()["worker"] is None


def test_the_last_client_that_is_closed_gives_up_the_share_of_its_process(
    folders: Folders, worker: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "default_worker", lambda: worker)

    def is_in_use() -> bool:
        claim = claim_idle(folders)
        if claim is not None:
            claim.close()
        return claim is None

    with Client("local") as first, Client("local") as second:
        assert first.jobs() == second.jobs() == []
        first.close()
        assert is_in_use()
    assert not is_in_use()

    with Client("local") as again:
        again.jobs()
        assert is_in_use()


def test_a_client_that_hears_nothing_starts_what_was_killed(
    folders: Folders, worker: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "default_worker", lambda: worker)
    monkeypatch.setattr(session, "TEND_EVERY_S", 0.0)
    with Client("local") as client:
        client.jobs()
        former = pid_of("worker")
        kill_supervisor(folders)
        kill(former)

        client._session.tend()

        assert pid_of("supervisor")
        wait_until(lambda: pid_of("worker") != former, PATIENCE_S, "another worker lives")


def test_an_open_job_keeps_it_up(folders: Folders, worker: list[str]) -> None:
    with start(worker, idle_stop_s=0.2) as link:
        link.call("ZADD", "gpulayer:{default}:jobs:scheduled", 1, "j_1")
        supervisor = pid_of("supervisor")
        private.release_private()

        with pytest.raises(AssertionError, match="never"):
            wait_until(lambda: not is_running(supervisor), 2, "never, with an open job")
        link.call("DEL", "gpulayer:{default}:jobs:scheduled")
        wait_until(lambda: not is_running(supervisor), PATIENCE_S, "the idle set-up has stopped")


def test_a_connected_client_keeps_it_up(folders: Folders, worker: list[str]) -> None:
    start(worker, idle_stop_s=0.2).close()
    supervisor = pid_of("supervisor")

    with pytest.raises(AssertionError, match="never"):
        wait_until(lambda: not is_running(supervisor), 2, "never, with a client")


def test_an_idle_stop_and_a_new_client_do_not_miss_each_other(folders: Folders, worker: list[str]) -> None:
    for _ in range(5):
        with start(worker, idle_stop_s=0.05) as link:
            assert link.call("PING") == b"PONG"
        private.release_private()


def test_it_can_be_refused(folders: Folders) -> None:
    with pytest.raises(ConfigError, match="GPULAYER_PRIVATE=off"):
        private.ensure_private(Settings(private=False))
    assert not is_held(folders.supervisor_lock)


def test_damaged_data_reach_the_client_as_one_line(folders: Folders, worker: list[str]) -> None:
    (folders.queue / "appendonlydir").mkdir()
    (folders.queue / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")

    with pytest.raises(ConfigError, match="does not start") as raised:
        start(worker)

    assert "\n" not in str(raised.value)
    assert holder_pid(folders.supervisor_lock) is None


def test_the_set_up_is_detached_from_the_client(folders: Folders, worker: list[str]) -> None:
    start(worker).close()

    for part in ("server", "worker", "supervisor"):
        pid = pid_of(part)
        assert os.getsid(pid) != os.getsid(0)
        assert pid not in [child.pid for child in psutil.Process().children()]
        inputs = os.readlink(f"/proc/{pid}/fd/0") if sys.platform == "linux" else "/dev/null"
        assert inputs == "/dev/null"


def test_nothing_of_it_listens_on_tcp(folders: Folders, worker: list[str]) -> None:
    start(worker).close()

    for part in ("server", "worker", "supervisor"):
        assert psutil.Process(pid_of(part)).net_connections(kind="inet") == []


def test_what_the_queue_keeps_of_the_settings_is_written_and_written_again(
    folders: Folders, worker: list[str]
) -> None:
    def kept(link: Link) -> bytes | None:
        answer: bytes | None = link.call("HGET", "gpulayer:{default}:config", "lost_workers")
        return answer

    with start(worker, lost_workers=7) as link:
        wait_until(lambda: kept(link) == b"7", PATIENCE_S, "the settings are written")
        link.call("FLUSHALL")
    kill(pid_of("server"))
    with start(worker, lost_workers=7) as link:
        wait_until(lambda: kept(link) == b"7", PATIENCE_S, "they are written by the server's keeper again")


def test_the_functions_of_an_older_release_do_not_outlive_an_update(
    folders: Folders, worker: list[str]
) -> None:
    older = library.code() + "-- an older release\n"
    with start(worker) as link:
        link.call("FUNCTION", "LOAD", "REPLACE", older)
    private.down()
    with start(worker) as link:
        (facts,) = link.call("FUNCTION", "LIST", "LIBRARYNAME", library.NAME, "WITHCODE")
    assert library.code().encode() in facts
    assert older.encode() not in facts


def test_a_client_is_told_that_the_set_up_is_of_another_installation_or_of_one_that_was_updated(
    folders: Folders, worker: list[str]
) -> None:
    start(worker).close()
    assert private.strangeness(folders) == []

    prefix, _, written = private.origin().partition("\n")
    folders.supervisor_origin.write_text(f"{prefix}\n{int(written) - 1}")
    (told,) = private.strangeness(folders)
    assert told.startswith("GPUlayer was updated, and the private set-up still runs what was there before")
    folders.supervisor_origin.write_text(f"/another/venv\n{written}")
    (told,) = private.strangeness(folders)
    assert told.startswith("the private set-up was started from /another/venv, and jobs run in that Python")
    private.down()
    start(worker).close()
    assert private.strangeness(folders) == []
