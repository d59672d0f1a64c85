"""`gpulayer worker`: in the foreground, in the background, stopped and drained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import psutil
import pytest

from gpulayer_broker.folders import locate_folders
from gpulayer_broker.locks import holder_pid, is_held
from tests.cli.conftest import Cli
from tests.support import PATIENCE_S, wait_until

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def name(namespace: str, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A worker's name of this test, whose worker is ended with it."""
    for setting, value in {"LEASE_S": "30", "HEARTBEAT_S": "0.4", "TERM_GRACE_S": "1"}.items():
        monkeypatch.setenv(f"GPULAYER_{setting}", value)
    name = f"{namespace}-w"
    yield name
    lock = locate_folders().create().worker_lock(name)

    def ended() -> bool:
        pid = holder_pid(lock)
        if pid is not None and is_held(lock):
            os.kill(pid, signal.SIGTERM)
        return not is_held(lock)

    wait_until(ended, PATIENCE_S, "the worker has ended")


def test_a_worker_in_the_background_takes_jobs_until_it_is_stopped(cli: Cli, name: str) -> None:
    started = json.loads(cli("worker", "start", name, "--slots", "3", "--label", "zone=eu", "--json").out)

    assert started["name"] == name
    assert "--redis" not in psutil.Process(started["pid"]).cmdline(), "it may hold a password, which ps shows"
    assert cli("submit", "--label", "zone=eu", "--", "echo", "hello").out == "hello\n"
    assert cli("workers").out.split("\t")[:3] == [name, "online", "3/3"]
    again = cli("worker", "start", name)
    assert again.code == 78
    assert "already runs here" in again.err

    stopped = cli("worker", "stop", name)

    assert stopped.code == 0
    assert f"worker {name} has stopped" in stopped.err
    assert not is_held(locate_folders().worker_lock(name))
    assert cli("worker", "stop", name).code == 2


def test_a_worker_that_cannot_start_says_why(cli: Cli, name: str) -> None:
    outcome = cli("worker", "start", name, "--python", "/no/such/python")

    assert outcome.code == 78
    assert outcome.err.startswith("gpulayer: the worker did not start: ")
    assert "/no/such/python" in outcome.err


def test_a_drained_worker_takes_nothing_new_until_that_is_undone(cli: Cli, name: str) -> None:
    cli("worker", "start", name)

    assert f"worker {name} is draining" in cli("worker", "drain", name).err
    assert "draining" in cli("workers").out
    job_id = cli("submit", "-d", "--", "true").out.strip()
    assert json.loads(cli("worker", "drain", name, "--undo", "--json").out)["state"] == "online"
    assert cli("wait", job_id, "--timeout", "20s").code == 0
    unknown = cli("worker", "drain", f"{name}x")
    assert unknown.code == 2
    assert f"did you mean '{name}'" in unknown.err
    assert cli("worker", "stop", "--now", name).code == 0


def test_a_worker_in_the_foreground_needs_nothing_but_an_address(
    spawn: Spawn, cli: Cli, name: str, address: str
) -> None:
    process = spawn("worker", "--redis", address, "--name", name)
    assert cli("submit", "--", "echo", "hello").out == "hello\n"

    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0


def test_a_worker_without_a_queue_is_told_what_to_give(
    cli: Cli, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["worker"], ["worker", "start"]):
        outcome = cli(*command)
        assert outcome.code == 2
        assert "give --redis URL" in outcome.err
