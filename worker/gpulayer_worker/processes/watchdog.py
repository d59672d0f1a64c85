"""Tells when a fork server does not serve any more: a job may stop its parent, and nothing else would ever end.

One that is stopped is continued at each look. One that is stopped again or does not answer, through many looks, is to
be given up. Looks are counted, not time alone, so that a machine that slept or stood still makes nobody suspicious.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable

from gpulayer_worker.runner import proctree

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
LOOKS = 12
STOPPED = "T"


class Watchdog:
    """Looks after one fork server; used by one thread."""

    def __init__(self, pid: int, ask: Callable[[], None], look_every_s: float = LOOK_EVERY_S) -> None:
        self._pid = pid
        self._ask = ask
        self._look_every_s = look_every_s
        self._looked_s = time.monotonic()
        self._silent_looks = 0
        self._stops = 0

    def heard(self) -> None:
        """It has said something."""
        self._silent_looks = 0

    def look(self, patient: bool = False) -> bool:
        """Whether it is to be given up, never by the patient; may be called as often as one likes."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self._look_every_s:
            return False
        self._looked_s = now_s
        self._stops = self._stops + 1 if continue_stopped(self._pid) else 0
        if patient:
            return False
        if not self._silent_looks:
            self._ask()
        self._silent_looks += 1
        return max(self._silent_looks, self._stops) > LOOKS


def continue_stopped(pid: int) -> bool:
    """Whether the process, a child of ours, was stopped; it goes on."""
    status = proctree.status(pid)
    if status is None or status.state != STOPPED:
        return False
    log.warning("process %d was stopped: it is told to go on", pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return True
