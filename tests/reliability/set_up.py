"""A private set-up of a test's own: its folder, its parts, and who of them can be struck."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gpulayer import client as clients
from gpulayer import private
from gpulayer.client import Client
from tests.reliability.nemesis import fork_servers, is_gone, job_processes, kill
from tests.support import PATIENCE_S, wait_until

ALL_S = 4 * PATIENCE_S
SERVICES = ("supervisor", "server", "worker")
TIMES = {"LEASE_S": 10, "HEARTBEAT_S": 1, "TERM_GRACE_S": 1}


@contextmanager
def private_set_up(state: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What is submitted meanwhile runs on a set-up in this folder; it is stopped afterwards."""
    for name, value in {"STATE_DIR": state, **TIMES}.items():
        monkeypatch.setenv(f"GPULAYER_{name}", str(value))
    defaults: dict[str | None, Client] = {}
    monkeypatch.setattr(clients, "_defaults", defaults)
    try:
        yield state
    finally:
        for client in defaults.values():
            client.close()
        private.release_private()
        private.down()


def service(name: str) -> int:
    """The process of a part that lives."""
    return int(wait_until(lambda: private.status()[name], PATIENCE_S, f"the {name} lives")["pid"])


def one_of(find: Callable[[int], list[int]]) -> int:
    """A process below the worker."""
    return wait_until(lambda: find(service("worker")), PATIENCE_S, "the worker has one", every=0.001)[0]


VICTIMS: dict[str, Callable[[], int]] = {
    "supervisor": lambda: service("supervisor"),
    "server": lambda: service("server"),
    "worker": lambda: service("worker"),
    "fork server": lambda: one_of(fork_servers),
    "job": lambda: one_of(job_processes),
}


def killed_of(victim: str) -> int:
    """The process that was killed; 0 where the one that was found had just ended."""
    pid = VICTIMS[victim]()
    return pid if kill(pid) else 0


def processes_of_set_up(state: Path) -> list[int]:
    """Every process that was started for the set-up of this state folder, but this one."""
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ().get("GPULAYER_STATE_DIR") == str(state)
        except psutil.Error:
            continue
        if own and process.pid != os.getpid() and not is_gone(process.pid):
            found.append(process.pid)
    return found


def roles() -> dict[str, bool]:
    """Which parts run; a fork server is there from its worker's first job on."""
    return {**{name: service(name) > 0 for name in SERVICES}, "fork server": one_of(fork_servers) > 0}
