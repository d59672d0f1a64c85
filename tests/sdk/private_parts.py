"""The parts of a private set-up under test, with a stand-in for its worker; the fixtures are in `conftest.py`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil

from gpulayer import private
from gpulayer_broker.connection import Link, connect
from gpulayer_broker.folders import Folders
from gpulayer_broker.locks import is_held
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


def worker_program(folder: Path, *, stubborn: bool) -> list[str]:
    path = folder / "worker.py"
    path.write_text(WORKER.format(stubborn=stubborn))
    return [sys.executable, str(path)]


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
