"""A worker process whose queue is away when it starts joins as soon as the queue is there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from dramatiq.errors import ConnectionFailed

log = logging.getLogger("gpulayer")

PAUSE_FIRST_S = 0.1
PAUSE_MOST_S = 5.0


class Joiner(threading.Thread):
    """Tries until it has joined, was stopped, or met what time does not mend."""

    def __init__(self, join: Callable[[], None]) -> None:
        super().__init__(name="gpulayer-joiner", daemon=True)
        self._join_namespace = join
        self._stopped = threading.Event()

    def run(self) -> None:
        pause_s, told = PAUSE_FIRST_S, ""
        while not self._stopped.wait(pause_s):
            try:
                self._join_namespace()
            except ConnectionFailed as error:
                if str(error) != told:
                    told = str(error)
                    log.warning("the worker waits for its queue: %s", told)
                pause_s = min(PAUSE_MOST_S, 2 * pause_s)
            except Exception:
                log.exception("the worker cannot join its queue")
                return
            else:
                return

    def stop(self) -> None:
        """Returns when it tries no more."""
        self._stopped.set()
        if self.ident is not None and self is not threading.current_thread():
            self.join()
