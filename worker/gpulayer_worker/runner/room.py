"""Room for the runner: what the fork server and its children use all the time lies close together in memory.

After a fork, a page is copied when one side writes to it; in Python to use an object is to write to it. Python and C
hand out memory from wherever a piece of that size is free, which after many imports is another page for almost every
piece. So all that the runner imports is imported first; then the holes that this left are filled. What comes after, the
runner itself and what its jobs need, lies side by side.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from typing import Any

from . import preload

# What the runner's modules import.
LIBRARY = (
    *("_signal", "atexit", "contextlib", "ctypes", "errno", "faulthandler", "fcntl", "functools", "gc", "io"),
    *("json", "linecache", "math", "pickle", "resource", "select", "signal", "socket", "struct", "sysconfig"),
    *("threading", "time", "traceback", "types", "typing", "warnings", "weakref"),
)
# Python's own allocator has a kind of pool for each of these sizes.
SMALL_SIZES = range(48, 512 + 1, 16)
POOL_HEAD_BYTES = 48
PAGE_BYTES = 4096
# The sizes that C keeps lists of, and a few larger ones. Before each of its pieces it has a head.
LARGE_SIZES = (8184, 4088, 3064, 2040, 1528, *range(1032, 16, -16))
HEAD_BYTES = 8
ENOUGH_BESIDE = 2
# Bounds for allocators that do otherwise.
MOST_SMALL = 512
MOST_LARGE = 32

_fillers: list[bytes] = []


def make(folders: list[str]) -> None:
    """Imports what others have written, and makes room for what this package has: to be called before it is loaded."""
    for name in LIBRARY:
        importlib.import_module(name)
    preload.bring_cloudpickle(folders)
    if sys.implementation.name == "cpython":
        _fill_pools()
    make_again()


def make_again() -> None:
    """The same where more was imported, but for what is large alone: it is what leaves the most pages behind."""
    if "CS_GNU_LIBC_VERSION" in os.confstr_names:
        _fill_heap(ctypes.CDLL(None))


def _fill_pools() -> None:
    """Of each size, takes pieces until one is the first of its pool."""
    empty_bytes = sys.getsizeof(b"")
    for size in SMALL_SIZES:
        for _ in range(MOST_SMALL):
            _fillers.append(bytes(size - empty_bytes))
            if id(_fillers[-1]) % PAGE_BYTES == POOL_HEAD_BYTES:
                break


def _fill_heap(libc: Any) -> None:
    """Of each size, takes pieces from C until they come side by side."""
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_size_t
    for size in LARGE_SIZES:
        at = beside = 0
        for _ in range(MOST_LARGE):
            last, at = at, libc.malloc(size)
            beside = beside + 1 if at == last + size + HEAD_BYTES else 0
            if beside == ENOUGH_BESIDE:
                break
