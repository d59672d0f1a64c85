"""The private set-up whose parts are killed or stand still: each is there again, none twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gpulayer import private, session
from gpulayer.client import Client
from gpulayer_broker.alive import is_stopped
from gpulayer_broker.folders import Folders
from tests.sdk.private_parts import is_running, kill, kill_supervisor, pid_of, start
from tests.support import PATIENCE_S, wait_until


def test_a_killed_server_comes_back_with_its_data(folders: Folders, stand_in: list[str]) -> None:
    with start(stand_in) as link:
        link.call("SET", "a", "1")
        before = pid_of("server")
        kill(before)

        assert link.call_idempotent("GET", "a", deadline_s=PATIENCE_S) == b"1"
    assert pid_of("server") != before


def test_a_server_that_starts_anew_is_not_taken_for_one_without_a_socket(
    folders: Folders, stand_in: list[str]
) -> None:
    with start(stand_in, idle_stop_s=0.2) as link:  # the supervisor looks often
        pid_of("worker")
        wait_until(lambda: private.status()["server"]["uptime_s"] > 6, PATIENCE_S, "the server has settled")
        kill(pid_of("server"))

        assert link.call_idempotent("PING", deadline_s=PATIENCE_S) == b"PONG"
    assert folders.supervisor_log.read_text().count("the queue server ended") == 1
    assert "shutdown" not in (folders.queue / "server.log").read_text()


def test_a_killed_worker_comes_back(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in).close()
    before = pid_of("worker")

    kill(before)

    wait_until(lambda: pid_of("worker") != before, PATIENCE_S, "another worker lives")


@pytest.mark.parametrize("part", ["server", "worker"])
def test_a_part_that_is_stopped_is_told_to_go_on(folders: Folders, stand_in: list[str], part: str) -> None:
    start(stand_in).close()
    pid = pid_of(part)

    os.kill(pid, signal.SIGSTOP)

    told = f"{pid} was stopped: it is told to go on"
    wait_until(lambda: told in folders.supervisor_log.read_text(), PATIENCE_S, f"the {part} is told")
    wait_until(lambda: not is_stopped(pid), PATIENCE_S, f"the {part} goes on")
    assert pid_of(part) == pid


def test_a_supervisor_that_is_stopped_goes_on_with_the_next_command(
    folders: Folders, stand_in: list[str]
) -> None:
    start(stand_in).close()
    supervisor = pid_of("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    wait_until(lambda: private.status()["supervisor"]["stopped"], PATIENCE_S, "the supervisor stands still")

    start(stand_in).close()

    wait_until(lambda: not is_stopped(supervisor), PATIENCE_S, "the supervisor goes on")
    assert pid_of("supervisor") == supervisor


def test_a_server_that_does_not_answer_is_told_of_and_not_waited_for(
    folders: Folders, stand_in: list[str]
) -> None:
    start(stand_in).close()
    server, supervisor = pid_of("server"), pid_of("supervisor")
    os.kill(supervisor, signal.SIGSTOP)
    os.kill(server, signal.SIGSTOP)

    facts = wait_until(
        lambda: (found := private.status()["server"])["stopped"] and found,
        PATIENCE_S,
        "the server stands still",
    )

    assert (facts["pid"], facts["answers"], facts["version"]) == (server, False, None)


def test_a_new_supervisor_adopts_server_and_worker(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in).close()
    before = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    kill_supervisor(folders)

    start(stand_in).close()

    assert pid_of("supervisor") != before["supervisor"]
    assert pid_of("server") == before["server"]
    assert pid_of("worker") == before["worker"]


def test_an_adopted_server_and_worker_are_restarted_too(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in).close()
    before = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    kill_supervisor(folders)
    with start(stand_in) as link:
        kill(before["server"])
        kill(before["worker"])

        assert link.call_idempotent("PING", deadline_s=PATIENCE_S) == b"PONG"
    wait_until(lambda: pid_of("worker") != before["worker"], PATIENCE_S, "another worker lives")


def test_down_stops_what_a_killed_supervisor_left(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in).close()
    pids = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    kill_supervisor(folders)

    private.down()

    assert not any(is_running(pid) for pid in pids.values())


def test_a_second_supervisor_leaves_all_to_the_first(folders: Folders, stand_in: list[str]) -> None:
    start(stand_in).close()
    before = {part: pid_of(part) for part in ("server", "worker", "supervisor")}
    command = [sys.executable, "-P", "-m", "gpulayer.private", "--", *stand_in]

    assert subprocess.run(command, timeout=PATIENCE_S, check=False).returncode == 0

    assert {part: pid_of(part) for part in before} == before


def test_a_client_that_hears_nothing_starts_what_was_killed(
    folders: Folders, stand_in: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "default_worker", lambda: stand_in)
    monkeypatch.setattr(session, "TEND_EVERY_S", 0.0)
    with Client("local") as client:
        client.jobs()
        former = pid_of("worker")
        kill_supervisor(folders)
        kill(former)

        client._session.tend()

        assert pid_of("supervisor")
        wait_until(lambda: pid_of("worker") != former, PATIENCE_S, "another worker lives")
