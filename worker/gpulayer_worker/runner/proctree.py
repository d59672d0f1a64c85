"""Process trees by /proc, and the three kernel switches that they need: subreaper, death signal, clocks.

Both sides use this file. Facts about a process that has just ended are None or empty, never an error. Linux
only, except that everything can be imported anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL = int(signal.SIGKILL)
_LEASE_CLOCK = getattr(time, "CLOCK_BOOTTIME", None)
COMMAND_BYTES = 200
READ_BYTES = 4096
KILL_PASSES = 100
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Kernels without CONFIG_PROC_CHILDREN lack it; there the whole table is read instead.
HAS_CHILDREN_FILE = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


class Status(NamedTuple):
    """What /proc/<pid>/stat says of one process; `started` is in clock ticks since boot and tells reused ids apart."""

    state: str
    parent: int
    session: int
    started: int


def lease_clock_s() -> float:
    """The clock of leases: monotonic, and it runs on while the machine sleeps, as the queue's own does."""
    return time.monotonic() if _LEASE_CLOCK is None else time.clock_gettime(_LEASE_CLOCK)


def now_ticks() -> int:
    """This moment in the unit of `Status.started`."""
    return int(lease_clock_s() * TICKS_PER_S)


@functools.lru_cache(maxsize=1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):
        libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    return libc


def prctl(option: int, value: int) -> None:
    """One prctl call; OSError where the kernel refuses."""
    if _libc().prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# Without what ctypes does for types and errors, which is several times as much as the call.
_plain_prctl: Callable[[int, int], int] | None = None


def ready_to_fork() -> None:
    """Looks up what each child needs."""
    global _plain_prctl
    _plain_prctl = ctypes.CDLL(None).prctl


def die_with_parent() -> None:
    """This process is killed when its parent ends."""
    if _plain_prctl is None or _plain_prctl(PR_SET_PDEATHSIG, KILL) != 0:
        raise OSError(errno.EINVAL, "the kernel refuses to end a job with its fork server")


def flush_c_streams() -> None:
    """Writes out what C libraries of this process have buffered."""
    _libc().fflush(None)


def become_subreaper() -> None:
    """Orphans among this process' descendants become its children. Does nothing where there is no such thing."""
    if sys.platform == "linux":
        prctl(PR_SET_CHILD_SUBREAPER, 1)


def contents(path: str) -> bytes:
    """A short file of the kernel. A file object would cost more than the reading, several times a job."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while part := os.read(descriptor, READ_BYTES):
            data += part
        return data
    finally:
        os.close(descriptor)


def status(pid: int) -> Status | None:
    """State, parent, session and start of a process."""
    try:
        fields = contents(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
        return Status(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def children(pid: int) -> set[int]:
    """The direct children of a process, zombies included."""
    if not HAS_CHILDREN_FILE:
        return {child for child, parent in parents().items() if parent == pid}
    found: set[int] = set()
    gone = (FileNotFoundError, ProcessLookupError)
    with contextlib.suppress(*gone):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*gone):
                found.update(map(int, contents(f"/proc/{pid}/task/{task}/children").split()))
    return found


def parents() -> dict[int, int]:
    """Every process that this user sees, with its parent."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            facts = status(int(name))
            if facts is not None:
                table[int(name)] = facts.parent
    return table


def descendants(roots: Iterable[int]) -> set[int]:
    """The given processes and everything below them."""
    found: set[int] = set()
    open_ends = list(roots)
    while open_ends:
        pid = open_ends.pop()
        if pid not in found:
            found.add(pid)
            open_ends.extend(children(pid))
    return found


def environment_value(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with (by exec, not by fork)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    prefix = name.encode() + b"="
    for entry in entries:
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :])
    return None


def open_files(pid: int) -> set[tuple[int, int]]:
    """Device and inode of everything that a process holds open: tells whose pipe it still has."""
    found = set()
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                facts = os.stat(folder + "/" + name)
                found.add((facts.st_dev, facts.st_ino))
    return found


def command_line(pid: int) -> str:
    """A short, printable form of what a process runs."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            raw = file.read(COMMAND_BYTES)
    except OSError:
        return ""
    return "".join(sign if sign.isprintable() else " " for sign in raw.decode("utf-8", "replace")).strip()


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signals each process; those that are gone, or no longer ours, are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_tree(roots: Iterable[int]) -> set[int]:
    """KILLs everything from the roots down; the processes found. All are stopped first, so none forks away."""
    roots = set(roots)
    stopped: set[int] = set()
    for _ in range(KILL_PASSES):
        fresh = descendants(roots | stopped) - stopped
        if not fresh:
            break
        send_signal(fresh, signal.SIGSTOP)
        stopped |= fresh
    send_signal(stopped, signal.SIGKILL)
    return stopped
