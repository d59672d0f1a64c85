"""What tests share: waiting with a deadline, so that a hang fails by name instead of hanging the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], timeout: float, description: str, every: float = 0.02) -> T:
    """The predicate's first truthy value; AssertionError with the description after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {description}"
        time.sleep(every)
