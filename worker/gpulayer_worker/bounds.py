"""Watches that a job's folder stays within the disk that the job asked for, and that no other job fills the disk.

What is in the folder, the job's HOME and its TMPDIR counts, as the file system has it in blocks; a file with several
names counts once. A look at a folder of very many files takes a while: the more it takes, the rarer it is.

A job that did not ask for disk has what there is, and nothing of it is measured until the disk is full. Then the one
that has the most is told, if that would make room: as the kernel does when memory is over. What grows elsewhere, such
as in /tmp, is nobody's here, and no job is ended for it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("gpulayer")

EVERY_S = 2.0
# Of the time, at most this share goes into looking.
BUSY_SHARE = 0.05
BLOCK_BYTES = 512
# A job that was ended for a full disk gets its grace, and its folder is removed, before another is looked for.
RELIEF_S = 30.0


@dataclass(frozen=True)
class Bound:
    """Folders that may have so much together, and who is told when they have more: how much, and the limit.

    Without a limit (0) they may have what the disk has, and it is told that this was too much.
    """

    folders: Sequence[str | Path]
    limit_bytes: int
    on_over: Callable[[int, int], object]


class Bounds(threading.Thread):
    """Looks at every watched attempt's folders again and again, until stopped.

    `lacking_bytes` says how much must be freed of a full disk; 0 while it is not full.
    """

    def __init__(self, every_s: float = EVERY_S, lacking_bytes: Callable[[], int] = lambda: 0) -> None:
        super().__init__(name="gpulayer-bounds", daemon=True)
        self._every_s = every_s
        self._lacking_bytes = lacking_bytes
        self._relieved_s = -RELIEF_S
        self._watched: dict[str, Bound] = {}
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._stopped = threading.Event()

    def watch(self, token: str, bound: Bound) -> None:
        with self._lock:
            self._watched[token] = bound
            if not self._some.is_set():
                self._some.set()

    def forget(self, token: str) -> None:
        with self._lock:
            self._watched.pop(token, None)

    def stop(self) -> None:
        self._stopped.set()
        with self._lock:
            self._some.set()
        self.join()

    def run(self) -> None:
        pause_s = self._every_s
        while self._some.wait() and not self._stopped.wait(pause_s):
            began_s = time.monotonic()
            try:
                self.look()
            except Exception:  # the other jobs' bounds hold on
                log.exception("bounds")
            pause_s = max(self._every_s, (time.monotonic() - began_s) / BUSY_SHARE)

    def look(self) -> None:
        """Measures once; whoever is over is told, once."""
        with self._lock:
            watched = list(self._watched.items())
            if not watched and not self._stopped.is_set():
                # Not where the last one is forgotten: quick jobs would have this thread wait and go on for each.
                self._some.clear()
        for token, bound in watched:
            if bound.limit_bytes and (size_bytes := held_bytes(bound)) > bound.limit_bytes:
                self.forget(token)
                bound.on_over(size_bytes, bound.limit_bytes)
        self._relieve({token: bound for token, bound in watched if not bound.limit_bytes})

    def _relieve(self, unlimited: Mapping[str, Bound]) -> None:
        """On a full disk, tells the one that has the most, where it has what is lacking."""
        lacking_bytes = self._lacking_bytes() if unlimited else 0
        if not lacking_bytes or time.monotonic() - self._relieved_s < RELIEF_S:
            return
        held = {token: held_bytes(bound) for token, bound in unlimited.items()}
        token = max(held, key=held.__getitem__)
        if held[token] >= lacking_bytes:
            self._relieved_s = time.monotonic()
            self.forget(token)
            unlimited[token].on_over(held[token], 0)


def held_bytes(bound: Bound) -> int:
    """What its folders have by now."""
    return sum(map(used_bytes, bound.folders))


def used_bytes(folder: str | Path) -> int:
    """What all below the folder takes of its file system; what vanishes meanwhile takes nothing."""
    seen: set[tuple[int, int]] = set()
    total = 0
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            try:
                facts = os.lstat(os.path.join(parent, name))
            except OSError:
                continue
            if facts.st_nlink > 1 and name not in folders:
                if (facts.st_dev, facts.st_ino) in seen:
                    continue
                seen.add((facts.st_dev, facts.st_ino))
            total += facts.st_blocks * BLOCK_BYTES
    return total
