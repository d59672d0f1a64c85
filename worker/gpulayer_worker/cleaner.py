"""Does what a job's end leaves to be done, apart from the jobs themselves, so that no result waits for it.

It rests for a moment after each round. Of many quick jobs the ends are done several at a time then, and a job that
hands something over need not wake anybody.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("gpulayer")

REST_S = 0.01


class Cleaner(threading.Thread):
    """Does what it is given, in order; `stop` returns when all of it is done."""

    def __init__(self) -> None:
        super().__init__(name="gpulayer-cleaner", daemon=True)
        self._stopping = threading.Event()
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                # The next job's folder is to go all the same.
                log.exception("cleaning up")
            if self._tasks.empty():
                self._stopping.wait(REST_S)

    def do(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def stop(self) -> None:
        self._tasks.put(None)
        self._stopping.set()
        self.join()
