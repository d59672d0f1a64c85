"""Locks on local files, held by a process for as long as it lives: they need no clean-up after a crash.

A lock that a child process inherits is held until every holder of it has ended. Lock files are never removed: a
removed one could be held under a name that the next process creates anew.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

from gpulayer_broker.errors import BadStateFolder

POLL_S = 0.01
PID_BYTES = 12


class FileLock:
    """A held lock; closing it gives it up, unless a child process inherited it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def record_pid(self, pid: int) -> None:
        """Write who holds it into the file, for `holder_pid`."""
        os.pwrite(self.descriptor, f"{pid:<{PID_BYTES - 1}}\n".encode(), 0)

    def forget_former_holder(self) -> None:
        """Until this holder records itself, nobody is named: a dead process's id may be another's by now.

        The file keeps its length, so that the next id needs no room on a full disk.
        """
        if os.fstat(self.descriptor).st_size:
            os.pwrite(self.descriptor, b" " * PID_BYTES, 0)

    def close(self) -> None:
        """Close this process's descriptor. It is never unlocked by name: that would unlock a child's copy too."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def try_lock(path: Path, *, shared: bool = False) -> FileLock | None:
    """The lock, if nobody holds it in the way; at once."""
    lock = FileLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    try:
        fcntl.flock(lock.descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    except OSError as error:
        lock.close()
        if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            raise BadStateFolder(
                f"{path.parent} is on a file system without locks: set GPULAYER_STATE_DIR to a local folder"
            ) from None
        raise
    if not shared:
        lock.forget_former_holder()
    return lock


def wait_lock(path: Path, deadline_s: float, *, shared: bool = False) -> FileLock | None:
    """The lock, as soon as it can be had; None after the deadline."""
    end = time.monotonic() + deadline_s
    while True:
        lock = try_lock(path, shared=shared)
        if lock is not None:
            return lock
        if time.monotonic() >= end:
            return None
        time.sleep(POLL_S)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock exclusively."""
    if not path.exists():
        return False
    lock = try_lock(path, shared=True)
    if lock is None:
        return True
    lock.close()
    return False


def holder_pid(path: Path) -> int | None:
    """The process id that the lock's holder recorded; None when nobody holds it."""
    return recorded_pid(path) if is_held(path) else None


def recorded_pid(path: Path) -> int | None:
    """The process id that the lock's last holder recorded, which may have ended by now."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None


def wait_until_free(path: Path, deadline_s: float) -> bool:
    """Whether the exclusive lock came free before the deadline."""
    lock = wait_lock(path, deadline_s, shared=True) if path.exists() else None
    if lock is not None:
        lock.close()
    return lock is not None or not path.exists()


def block_until_free(path: Path) -> FileLock:
    """The exclusive lock, however long that takes: the way to see the end of a process that holds it."""
    lock = FileLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
    lock.forget_former_holder()
    return lock
