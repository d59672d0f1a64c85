"""A value that another thread tells, once.

Each job has three of these. A `Future` is much more, and makes a condition with a lock of its own; this one makes a
lock only where somebody waits.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Generic, TypeVar

T = TypeVar("T")

# Held for a moment by whoever tells or begins to wait.
_changing = threading.Lock()


class Told(Generic[T]):
    """Safe between threads; any number of them may wait."""

    __slots__ = ("_error", "_gate", "_told", "_value")

    def __init__(self) -> None:
        self._told = False
        self._error: Exception | None = None
        self._gate: threading.Lock | None = None

    def done(self) -> bool:
        """Whether it has been told."""
        return self._told

    def tell(self, value: T) -> None:
        """The first word counts."""
        with _changing:
            if not self._told:
                self._value = value
                self._open()

    def fail(self, error: Exception) -> None:
        """Whoever asks is told this instead; where nothing was told before."""
        with _changing:
            if not self._told:
                self._error = error
                self._open()

    def waits(self, timeout_s: float) -> bool:
        """Whether it is told within this time."""
        if not self._told:
            with contextlib.suppress(TimeoutError):
                self._wait(timeout_s)
        return self._told

    def result(self, timeout_s: float | None = None) -> T:
        """The value, or its error; TimeoutError."""
        if not self._told:
            self._wait(timeout_s)
        if self._error is not None:
            raise self._error
        return self._value

    def _open(self) -> None:
        self._told = True
        if self._gate is not None:
            self._gate.release()

    def _wait(self, timeout_s: float | None) -> None:
        with _changing:
            if self._told:
                return
            if self._gate is None:
                self._gate = threading.Lock()
                self._gate.acquire()
            gate = self._gate
        if not gate.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            raise TimeoutError
        gate.release()
