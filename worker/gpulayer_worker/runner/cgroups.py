"""Control groups as the runner uses them: a job's process enters them, and they say and end what is in them.

A group is named by its folders, one in each hierarchy that is used. Whoever has entered cannot leave by a new session,
a cleared environment or closed pipes: what is in a job's group is the job's, without any guess. Both sides use this
file; the worker makes and removes the folders.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Sequence

PROCESSES = "cgroup.procs"
THREADS_V1 = "tasks"
KILL = "cgroup.kill"
MOST_PROCESSES = "pids.max"
STOP_PASSES = 20

# By names of their own: in a forked child, to look one up in its module touches more pages than the call.
_open, _put, _close, _TO_WRITE = os.open, os.write, os.close, os.O_WRONLY


def enter(folders: Iterable[str]) -> None:
    """Moves this process into the group; OSError where one of its folders does not take it."""
    for folder in folders:
        _write(os.path.join(folder, PROCESSES), b"0")


def enter_alone(folders: Iterable[str]) -> None:
    """The same for a process of one thread.

    Version 1 can move a thread by itself. To move a whole process the kernel stops all forks of the system for a
    moment, and on a system that was quiet it waits more than 10 ms before it does.
    """
    for folder in folders:
        try:
            descriptor = _open(folder + "/" + THREADS_V1, _TO_WRITE)
        except FileNotFoundError:
            descriptor = _open(folder + "/" + PROCESSES, _TO_WRITE)
        _put(descriptor, b"0")
        _close(descriptor)


def members(folders: Iterable[str]) -> set[int]:
    """Every process of the group, and of the groups that a job made below it."""
    found: set[int] = set()
    for folder in folders:
        for below, _, _ in os.walk(folder):
            with contextlib.suppress(OSError), open(os.path.join(below, PROCESSES), "rb") as file:
                # 0 stands for a process that this one cannot name; as an argument of kill it means something else.
                found.update(pid for pid in map(int, file.read().split()) if pid > 0)
    return found


def kill(folders: Sequence[str]) -> set[int]:
    """KILLs the whole group, however fast it forks; the processes that were seen in it."""
    seen = members(folders)
    for folder in folders:
        with contextlib.suppress(OSError):
            _write(os.path.join(folder, KILL), b"1")
            return seen
    for folder in folders:
        with contextlib.suppress(OSError):
            _write(os.path.join(folder, MOST_PROCESSES), b"0")
    return seen | _kill_one_by_one(folders)


def _kill_one_by_one(folders: Sequence[str]) -> set[int]:
    stopped: set[int] = set()
    for _ in range(STOP_PASSES):
        fresh = members(folders) - stopped
        if not fresh:
            break
        _signal(fresh, signal.SIGSTOP)
        stopped |= fresh
    _signal(stopped, signal.SIGKILL)
    return stopped


def tag(folders: Sequence[str]) -> bytes:
    """What stands in /proc/<pid>/cgroup of the group's processes alone; empty without a group."""
    return os.fsencode("/".join(["", *folders[0].rsplit("/", 2)[-2:]])) if folders else b""


def paths_of(pid: int) -> list[bytes]:
    """The groups that a process is in, one for each hierarchy."""
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:
            return [line.split(b":", 2)[2] for line in file.read().splitlines()]
    except (OSError, IndexError):
        return []


def holds(its_tag: bytes, paths: Iterable[bytes]) -> bool:
    """Whether one of the paths is that of the tagged group, or below it."""
    return bool(its_tag) and any(its_tag + b"/" in path + b"/" for path in paths)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _write(path: str, data: bytes) -> None:
    """Without O_CREAT: what is not there is an error, never a new file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)
