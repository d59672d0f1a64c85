"""The private set-up: one for a user, stopped when idle or told to, detached from its clients."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from gpulayer import private
from gpulayer.client import Client
from gpulayer_broker import library
from gpulayer_broker.connection import Link
from gpulayer_broker.embedded import claim_idle
from gpulayer_broker.errors import ConfigError
from gpulayer_broker.folders import Folders
from gpulayer_broker.locks import holder_pid, is_held
from gpulayer_broker.settings import Settings
from tests.sdk.private_parts import is_running, kill, pid_of, start, worker_program
from tests.support import PATIENCE_S, wait_until


def test_the_first_client_starts_all_of_it(folders: Folders, stand_in: list[str]) -> None:
    with start(stand_in) as link:
        assert link.call("PING") == b"PONG"

    pids = {pid_of(part) for part in ("server", "worker", "supervisor")}
    assert len(pids) == 3
    status = private.status()
    assert status["data"] == str(folders.state)
    assert status["socket"] == str(folders.socket)
    assert status["server"]["version"][0].isdigit()
    assert status["supervisor"]["uptime_s"] >= 0


def test_the_worker_is_told_where_the_queue_is_and_who_it_is(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in, namespace="ours").close()
    pid_of("worker")

    def told() -> str:
        return (folders.state / "worker.log").read_text()

    wait_until(lambda: "arguments" in told(), PATIENCE_S, "the worker wrote its arguments")
    assert f"'--redis', 'unix://{folders.socket}'" in told()
    assert f"'--name', '{private.worker_name()}'" in told()
    assert "'--namespace', 'ours'" in told()
    assert "'--private'" in told()


def test_clients_at_once_make_one_set_up(folders: Folders, stand_in: list[str]) -> None:
    script = (
        "import sys\n"
        "from gpulayer import private\n"
        "from gpulayer_broker.settings import Settings\n"
        "private.ensure_private(Settings(), worker_program=sys.argv[1:])\n"
    )
    with ExitStack() as ends:
        clients = [
            ends.enter_context(subprocess.Popen([sys.executable, "-c", script, *stand_in])) for _ in range(4)
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
    assert len([p for p in mine if p.cmdline()[1:2] == stand_in[1:]]) == 1


def environment_of(process: psutil.Process) -> str | None:
    try:
        return None if process.pid == os.getpid() else process.environ().get("GPULAYER_STATE_DIR")
    except psutil.Error:
        return None


def test_a_second_call_starts_nothing(
    folders: Folders, stand_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start(stand_in).close()
    monkeypatch.setattr(private, "_start_supervisor", lambda *_: pytest.fail("a process was started"))

    start(stand_in).close()


def test_down_stops_all_and_says_what(folders: Folders, stand_in: list[str]) -> None:
    with start(stand_in) as link:
        link.call("SET", "a", "1")
    pids = {part: pid_of(part) for part in ("worker", "server", "supervisor")}

    stopped = private.down()

    assert stopped == [f"{part} (pid {pid})" for part, pid in pids.items()]
    assert not any(is_running(pid) for pid in pids.values())
    assert private.down() == []
    with start(stand_in) as link:
        assert link.call("GET", "a") == b"1"


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


def test_it_stops_when_no_client_is_left_and_no_job_open(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in, idle_stop_s=0.3).close()
    supervisor = pid_of("supervisor")
    pid_of("worker")

    private.release_private()

    wait_until(lambda: not is_running(supervisor), PATIENCE_S, "the idle set-up has stopped")
    assert not is_held(folders.server_lock)
    assert private.status()["worker"] is None


def test_the_last_client_that_is_closed_gives_up_the_share_of_its_process(
    folders: Folders, stand_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "default_worker", lambda: stand_in)

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


def test_an_open_job_keeps_it_up(folders: Folders, stand_in: list[str]) -> None:
    with start(stand_in, idle_stop_s=0.2) as link:
        link.call("ZADD", "gpulayer:{default}:jobs:scheduled", 1, "j_1")
        supervisor = pid_of("supervisor")
        private.release_private()

        with pytest.raises(AssertionError, match="never"):
            wait_until(lambda: not is_running(supervisor), 2, "never, with an open job")
        link.call("DEL", "gpulayer:{default}:jobs:scheduled")
        wait_until(lambda: not is_running(supervisor), PATIENCE_S, "the idle set-up has stopped")


def test_a_connected_client_keeps_it_up(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in, idle_stop_s=0.2).close()
    supervisor = pid_of("supervisor")

    with pytest.raises(AssertionError, match="never"):
        wait_until(lambda: not is_running(supervisor), 2, "never, with a client")


def test_an_idle_stop_and_a_new_client_do_not_miss_each_other(folders: Folders, stand_in: list[str]) -> None:
    for _ in range(5):
        with start(stand_in, idle_stop_s=0.05) as link:
            assert link.call("PING") == b"PONG"
        private.release_private()


def test_it_can_be_refused(folders: Folders) -> None:
    with pytest.raises(ConfigError, match="GPULAYER_PRIVATE=off"):
        private.ensure_private(Settings(private=False))
    assert not is_held(folders.supervisor_lock)


def test_damaged_data_reach_the_client_as_one_line(folders: Folders, stand_in: list[str]) -> None:
    (folders.queue / "appendonlydir").mkdir()
    (folders.queue / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")

    with pytest.raises(ConfigError, match="does not start") as raised:
        start(stand_in)

    assert "\n" not in str(raised.value)
    assert holder_pid(folders.supervisor_lock) is None


def test_the_set_up_is_detached_from_the_client(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in).close()

    for part in ("server", "worker", "supervisor"):
        pid = pid_of(part)
        assert os.getsid(pid) != os.getsid(0)
        assert pid not in [child.pid for child in psutil.Process().children()]
        inputs = os.readlink(f"/proc/{pid}/fd/0") if sys.platform == "linux" else "/dev/null"
        assert inputs == "/dev/null"


def test_nothing_of_it_listens_on_tcp(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in).close()

    for part in ("server", "worker", "supervisor"):
        assert psutil.Process(pid_of(part)).net_connections(kind="inet") == []


def test_what_the_queue_keeps_of_the_settings_is_written_and_written_again(
    folders: Folders, stand_in: list[str]
) -> None:
    def kept(link: Link) -> bytes | None:
        answer: bytes | None = link.call("HGET", "gpulayer:{default}:config", "lost_workers")
        return answer

    with start(stand_in, lost_workers=7) as link:
        wait_until(lambda: kept(link) == b"7", PATIENCE_S, "the settings are written")
        link.call("FLUSHALL")
    kill(pid_of("server"))
    with start(stand_in, lost_workers=7) as link:
        wait_until(lambda: kept(link) == b"7", PATIENCE_S, "they are written by the server's keeper again")


def test_the_functions_of_an_older_release_do_not_outlive_an_update(
    folders: Folders, stand_in: list[str]
) -> None:
    older = library.code() + "-- an older release\n"
    with start(stand_in) as link:
        link.call("FUNCTION", "LOAD", "REPLACE", older)
    private.down()
    with start(stand_in) as link:
        (facts,) = link.call("FUNCTION", "LIST", "LIBRARYNAME", library.NAME, "WITHCODE")
    assert library.code().encode() in facts
    assert older.encode() not in facts


def test_a_client_is_told_that_the_set_up_is_of_another_installation_or_of_one_that_was_updated(
    folders: Folders, stand_in: list[str]
) -> None:
    start(stand_in).close()
    assert private.strangeness(folders) == []

    prefix, _, written = private.origin().partition("\n")
    folders.supervisor_origin.write_text(f"{prefix}\n{int(written) - 1}")
    (told,) = private.strangeness(folders)
    assert told.startswith("GPUlayer was updated, and the private set-up still runs what was there before")
    folders.supervisor_origin.write_text(f"/another/venv\n{written}")
    (told,) = private.strangeness(folders)
    assert told.startswith("the private set-up was started from /another/venv, and jobs run in that Python")
    private.down()
    start(stand_in).close()
    assert private.strangeness(folders) == []
