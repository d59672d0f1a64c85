"""Watches that a job's folder stays within the disk that the job asked for.

What is in the folder, the job's HOME and its TMPDIR counts, as the file system has it in blocks; a file with several
names counts once. A look at a folder of very many files takes a while: the more it takes, the rarer it is. Of a job
that did not ask for disk nothing is measured.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("gpulayer")

EVERY_S = 2.0
# Of the time, at most this share goes into looking.
BUSY_SHARE = 0.05
BLOCK_BYTES = 512


@dataclass(frozen=True)
class Bound:
    """Folders that may have so much together, and who is told when they have more: how much, and the limit."""

    folders: Sequence[Path]
    limit_bytes: int
    on_over: Callable[[int, int], object]


class Bounds(threading.Thread):
    """Looks at every watched attempt's folders again and again, until stopped."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        super().__init__(name="gpulayer-bounds", daemon=True)
        self._every_s = every_s
        self._watched: dict[str, Bound] = {}
        self._lock = threading.Lock()
        self._some = threading.Event()
        self._stopped = threading.Event()

    def watch(self, token: str, bound: Bound) -> None:
        with self._lock:
            self._watched[token] = bound
            self._some.set()

    def forget(self, token: str) -> None:
        with self._lock:
            self._watched.pop(token, None)
            if not self._watched:
                self._some.clear()

    def stop(self) -> None:
        self._stopped.set()
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
        for token, bound in watched:
            size_bytes = sum(map(used_bytes, bound.folders))
            if size_bytes > bound.limit_bytes:
                self.forget(token)
                bound.on_over(size_bytes, bound.limit_bytes)


def used_bytes(folder: Path) -> int:
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
