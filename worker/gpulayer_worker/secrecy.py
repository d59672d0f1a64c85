"""Keeps a queue's address, which may hold a password, out of what other processes are shown of this one.

`ps` shows every user the arguments that a process was started with, and /proc shows its own user, jobs included, its
first environment. Both are bytes in this process' memory, which are blanked here. What reads that memory itself (a
debugger of the same user, root) is not kept out. Linux; elsewhere nothing is blanked.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

# Fields of /proc/PID/stat after the state: where arguments and environment begin and end.
FIRST, LAST = 45, 49
BLANK = ord("*")


def blank(text: str) -> int:
    """How many times the text was found, and blanked behind the first `://` in it."""
    secret = text.encode(errors="surrogateescape")
    keep = secret.find(b"://") + 3 if b"://" in secret else 0
    found = 0
    for begin, end in _regions():
        data = ctypes.string_at(begin, end - begin)
        at = data.find(secret)
        while secret and at >= 0:
            ctypes.memset(begin + at + keep, BLANK, len(secret) - keep)
            found += 1
            at = data.find(secret, at + len(secret))
    return found


def _regions() -> list[tuple[int, int]]:
    if sys.platform != "linux":
        return []
    with suppress(OSError, ValueError, IndexError), open("/proc/self/stat", "rb") as file:
        numbers = [int(field) for field in file.read().rpartition(b") ")[2].split()[FIRST:LAST]]
        regions = [(numbers[0], numbers[1]), (numbers[2], numbers[3])]
        return [(begin, end) for begin, end in regions if 0 < begin < end]
    return []
