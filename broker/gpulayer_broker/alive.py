"""Whether a process of this user's runs, stands still (SIGSTOP, Ctrl-Z) or has ended; one that stands still goes on.

A part of the private set-up that stands still holds its lock and looks alive, so nobody starts another in its place:
whoever depends on it lets it go on. Who wants a pause has `gpulayer worker drain` and `gpulayer down`.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from gpulayer_broker.locks import holder_pid, recorded_pid

POLL_S = 0.005
GONE, ZOMBIE, STOPPED, RUNNING = "", "Z", "T", "R"


def is_stopped(pid: int) -> bool:
    """Whether the process is there and stands still; one that a debugger holds does not count."""
    return _state(pid) == STOPPED


def has_ended(pid: int) -> bool:
    """Whether nothing of the process runs any more; its parent may take its time to notice."""
    return _state(pid) in (GONE, ZOMBIE)


def wait_for_end(pid: int, deadline_s: float) -> bool:
    """Whether the process ended before the deadline."""
    end = time.monotonic() + deadline_s
    while not has_ended(pid) and time.monotonic() < end:
        time.sleep(POLL_S)
    return has_ended(pid)


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


def _state(pid: int) -> str:
    """The letter that Linux has for it; any other that runs is R."""
    if os.uname().sysname == "Linux":
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                # The name, in parentheses, may hold anything.
                return chr(file.read().rpartition(b") ")[2][0])
        except (OSError, IndexError):
            return GONE
    import psutil

    letters = {psutil.STATUS_STOPPED: STOPPED, psutil.STATUS_ZOMBIE: ZOMBIE}
    try:
        return letters.get(psutil.Process(pid).status(), RUNNING)
    except psutil.NoSuchProcess:
        return GONE
