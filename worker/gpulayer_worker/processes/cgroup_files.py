"""The kernel's files of one control group: read and written, and kept open where the worker has room for that.

To open one costs several times as much as to read it, and a job's end reads a dozen. What is not there reads as None,
what cannot be written is an OSError, and after `close` nothing is there. Safe between threads.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeVar

from gpulayer_worker.runner import cgroups

T = TypeVar("T")
File = tuple[str, str]

READ_BYTES = 4096
LINKS_OF_ONE = 2
MOST_FILES = 17
MOST_GROUPS = 1000
# Version 1 makes this list when it is first read from an open file, and tells it again for a second.
READ_ANEW = cgroups.PROCESSES
# The part of the files that this process may have open which groups may take.
SHARE = 8


class Room:
    """For how many groups' files there is room. Safe between threads."""

    def __init__(self) -> None:
        may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        groups = MOST_GROUPS if may_open < 0 else min(MOST_GROUPS, may_open // SHARE // MOST_FILES)
        self._left = threading.Semaphore(groups)

    def take(self) -> bool:
        return self._left.acquire(blocking=False)

    def give_back(self) -> None:
        self._left.release()


class GroupFiles:
    """`folders` are the group's own, one for each kind; a file is named by its kind and its name."""

    def __init__(self, folders: Mapping[str, str], room: Room) -> None:
        self._folders = folders
        self._room = room
        self._kept: dict[int, dict[File, int]] = {os.O_RDONLY: {}, os.O_WRONLY: {}}
        self._closed = False
        self._lock = threading.Lock()
        self._keeps_open = room.take()

    def read(self, files: Sequence[File]) -> list[bytes | None]:
        """What stands in each of them."""
        with self._lock:
            return [self._text(file) for file in files]

    def write(self, file: File, value: int | str) -> None:
        """Writes one value."""
        data = str(value).encode()
        with self._lock:
            self._use(file, os.O_WRONLY, lambda descriptor: os.pwrite(descriptor, data, 0))

    def has_groups_below(self) -> bool:
        """Whether somebody has made a group in one of its folders."""
        with self._lock:
            return any(self._use((kind, "."), os.O_RDONLY, _links) > LINKS_OF_ONE for kind in self._folders)

    def close(self) -> None:
        with self._lock:
            if self._keeps_open and not self._closed:
                self._room.give_back()
            self._closed = True
            for kept in self._kept.values():
                while kept:
                    os.close(kept.popitem()[1])

    def __del__(self) -> None:
        self.close()  # a group that nobody gave back keeps no file

    def _text(self, file: File) -> bytes | None:
        try:
            return self._use(file, os.O_RDONLY, _text)
        except OSError:
            return None

    def _use(self, file: File, mode: int, use: Callable[[int], T]) -> T:
        """What is done with the file's descriptor, which is kept where there is room for it."""
        kept = self._kept[mode]
        if file in kept:
            return use(kept[file])
        kind, name = file
        if self._closed or kind not in self._folders:
            raise FileNotFoundError(name)
        # From an open folder it is not half as far as from the root.
        folder = self._kept[os.O_RDONLY].get((kind, "."))
        path = f"{self._folders[kind]}/{name}" if folder is None else name
        descriptor = os.open(path, mode | os.O_CLOEXEC, dir_fd=folder)
        if self._keeps_open and name != READ_ANEW:
            kept[file] = descriptor
            return use(descriptor)
        try:
            return use(descriptor)
        finally:
            os.close(descriptor)


def _text(descriptor: int) -> bytes:
    return os.pread(descriptor, READ_BYTES, 0)


def _links(descriptor: int) -> int:
    return os.fstat(descriptor).st_nlink


@lru_cache(maxsize=64)
def fields(text: bytes | None) -> Mapping[str, int]:
    """The numbers of a file that has one with its name on each line."""
    pairs = (line.split() for line in (text or b"").splitlines())
    return {pair[0].decode(): int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def number(text: bytes | None) -> int | None:
    """The one number of a file."""
    return int(text) if text is not None and text.strip().isdigit() else None
