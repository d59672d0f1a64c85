"""Waiting that Ctrl-C ends at once, and reading that ends when nobody awaits it any more.

Python handles a signal in the main thread alone, the next time that this thread runs. A wait without an end is not
woken by a signal that the system gives to another thread, nor by one that comes right before it begins: so the main
thread waits in pieces.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from queue import Empty, SimpleQueue
from typing import TypeVar

T = TypeVar("T")

PIECE_S = 0.5
# Set for a thread that reads for somebody else, and told when that one has gone.
_gone: ContextVar[threading.Event | None] = ContextVar("gone", default=None)


class Abandoned(BaseException):
    """Nobody wants any more what this thread waits for."""


def attentive(wait: Callable[[float | None], bool], timeout_s: float | None) -> bool:
    """What `wait` says, which waits for so many seconds at most, or without an end."""
    gone = _gone.get()
    if gone is None and threading.current_thread() is not threading.main_thread():
        return wait(timeout_s)
    end_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        if gone is not None and gone.is_set():
            raise Abandoned
        left_s = PIECE_S if end_s is None else max(0.0, end_s - time.monotonic())
        if wait(min(PIECE_S, left_s)):
            return True
        if left_s < PIECE_S:
            return False


def taken(queue: SimpleQueue[T]) -> T:
    """The next of a queue."""
    found: list[T] = []

    def take(timeout_s: float | None) -> bool:
        try:
            found.append(queue.get(timeout=timeout_s))
        except Empty:
            return False
        return True

    attentive(take, None)
    return found[0]


def read_for(gone: threading.Event, steps: Iterable[T]) -> list[T]:
    """All the steps; those so far, once whoever wants them has gone."""
    before = _gone.set(gone)
    found: list[T] = []
    try:
        for step in steps:
            if gone.is_set():
                break
            found.append(step)
    except Abandoned:
        pass
    finally:
        _gone.reset(before)
    return found
