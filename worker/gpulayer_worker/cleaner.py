"""Removes the folders of jobs that have ended, apart from the jobs themselves, so that no result waits for it."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

from gpulayer_worker.scratch import remove


class Cleaner(threading.Thread):
    """Removes what it is given, in order; `stop` returns when all of it is gone."""

    def __init__(self) -> None:
        super().__init__(name="gpulayer-cleaner", daemon=True)
        self._folders: queue.SimpleQueue[Path | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (folder := self._folders.get()) is not None:
            remove(folder)

    def remove(self, folder: Path) -> None:
        self._folders.put(folder)

    def stop(self) -> None:
        self._folders.put(None)
        self.join()
