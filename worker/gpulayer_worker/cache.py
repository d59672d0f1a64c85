"""Keeps the folder that outlives jobs (their model and dataset caches) within its bound.

What was not used for longest goes first, file by file; what was used in the last hour stays, for a job may be about to
read it again. A file that a job has open stays readable to it although it is removed. Other names of a file (hard
links) and links are left alone and counted once, or not at all.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.units import format_size

log = logging.getLogger("gpulayer")

IN_USE_S = 3600.0
BLOCK_BYTES = 512


@dataclass(frozen=True, order=True)
class _Entry:
    used_s: float
    path: str
    size_bytes: int


def trim_cache(folder: Path, limit_bytes: int, in_use_s: float = IN_USE_S) -> int:
    """Removes what was used least lately until the rest fits; the bytes removed."""
    entries = sorted(_entries(folder))
    excess_bytes = sum(entry.size_bytes for entry in entries) - limit_bytes
    newest_s = time.time() - in_use_s
    removed_bytes = 0
    for entry in entries:
        if removed_bytes >= excess_bytes or entry.used_s > newest_s:
            break
        removed_bytes += entry.size_bytes if _removed(entry.path) else 0
    if removed_bytes:
        _remove_empty_folders(folder)
        log.info(
            "removed %s from the cache, as it was over %s",
            format_size(removed_bytes),
            format_size(limit_bytes),
        )
    if removed_bytes < excess_bytes:
        log.warning("the cache %s stays over %s: the rest was just used", folder, format_size(limit_bytes))
    return removed_bytes


def _entries(folder: Path) -> Iterator[_Entry]:
    for parent in _folders(folder):
        for path in _paths(parent):
            try:
                facts = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1:
                # Reading need not be noted by the file system; writing is.
                used_s = max(facts.st_atime, facts.st_mtime)
                yield _Entry(used_s, path, facts.st_blocks * BLOCK_BYTES)


def _folders(folder: Path) -> Iterator[str]:
    """The folder and all below, parents first; by no recursion, whose limit a job could pass."""
    waiting = [str(folder)]
    while waiting:
        parent = waiting.pop()
        yield parent
        waiting += [path for path in _paths(parent) if os.path.isdir(path) and not os.path.islink(path)]


def _paths(folder: str) -> list[str]:
    try:
        return [os.path.join(folder, name) for name in os.listdir(folder)]
    except OSError:
        return []


def _removed(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def _remove_empty_folders(folder: Path) -> None:
    """Those that were not touched just now: a job may have made one to fill it."""
    newest_s = time.time() - IN_USE_S
    for parent in reversed(list(_folders(folder))):
        try:
            if parent != str(folder) and os.lstat(parent).st_mtime < newest_s:
                os.rmdir(parent)
        except OSError:
            continue
