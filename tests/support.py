"""What tests share: waiting with a deadline, so that a hang fails by name instead of hanging the run.

No test asserts how fast something is: `PATIENCE_S` is for what has to happen at all, on however slow a machine. What a
bound has to tell apart, such as a wake-up from a look after a silence, is made ten times further apart than it takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = float(os.environ.get("GPULAYER_TEST_PATIENCE_S", "60"))
PATIENCE_MS = int(PATIENCE_S * 1000)


def wait_until(predicate: Callable[[], T], timeout: float, description: str, every: float = 0.02) -> T:
    """The predicate's first truthy value; AssertionError with the description after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout} s: {description}"
        time.sleep(every)


def end_process(process: subprocess.Popen[Any]) -> None:
    """In order, by force if that takes too long; its pipes are closed. For what a fixture or test has started."""
    try:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


@contextmanager
def in_background(*works: Callable[[], object]) -> Iterator[None]:
    """Each in a thread of its own meanwhile; all have ended when the block has. The first error of one is raised then,
    unless the block has one of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
        yield
        for each in running:
            each.result(PATIENCE_S)
