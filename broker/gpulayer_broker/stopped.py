"""Processes that a signal has stopped (SIGSTOP, Ctrl-Z): seen, and told to go on.

A part of the private set-up that stands still holds its lock and looks alive, so nobody starts another in its place:
whoever depends on it lets it go on. Who wants a pause has `gpulayer worker drain` and `gpulayer down`.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from gpulayer_broker.locks import holder_pid, recorded_pid


def is_stopped(pid: int) -> bool:
    """Whether the process is there and stands still; one that a debugger holds does not count."""
    if os.uname().sysname == "Linux":
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name, in parentheses, may hold anything.
                return file.read().rpartition(b") ")[2][:1] == b"T"
        except OSError:
            return False
    import psutil

    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def go_on(pid: int) -> bool:
    """Whether the process stood still; it goes on."""
    if not is_stopped(pid):
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return True


def holder_goes_on(lock: Path) -> int | None:
    """The process id of the lock's holder, if it stood still; it goes on."""
    pid = recorded_pid(lock)
    if pid is None or not is_stopped(pid) or pid != holder_pid(lock):
        return None
    return pid if go_on(pid) else None
