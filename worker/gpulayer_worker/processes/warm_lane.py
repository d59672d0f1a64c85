"""Keeps idle warm processes, at most as many as the worker has slots, for a minute; what is given up ends in the
background, except where a device has to be free first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .cgroup import Groups
from .pool import HAS_FORK_SERVER, Pool
from .warm import WarmKey, WarmProcess

IDLE_S = 60.0


class WarmLane:
    """Hands out warm processes; safe to use from any thread. `later` does something apart, in its own time."""

    def __init__(
        self,
        pool: Pool,
        groups: Groups,
        slots: int,
        later: Callable[[Callable[[], object]], None],
        idle_s: float = IDLE_S,
    ) -> None:
        self._pool, self._groups, self._slots, self._later, self._idle_s = pool, groups, slots, later, idle_s
        self._lock = threading.Lock()
        self._idle: list[WarmProcess] = []
        self._busy: set[WarmProcess] = set()
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether this system has what a warm process takes."""
        return HAS_FORK_SERVER

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def acquire(self, key: WarmKey) -> WarmProcess:
        """The idle process that fits and was used last, or a new one; ForkServerGone when none can be started."""
        surplus: list[WarmProcess] = []
        with self._lock:
            found = self._take(key, surplus)
            if found is not None:
                self._busy.add(found)
            elif self._idle and len(self) >= self._slots:
                surplus.append(self._idle.pop(0))
        for process in surplus:
            self._give_up(process)
        if found is None:
            found = WarmProcess(self._pool, self._groups, key)
            self._later(self._groups.refill)
            with self._lock:
                self._busy.add(found)
        return found

    def release(self, process: WarmProcess) -> None:
        """Takes a process back. One with a device is gone when this returns, and the device's memory with it."""
        keep = process.usable and not process.key.devices
        with self._lock:
            self._busy.discard(process)
            keep = keep and not self._closed
            if keep:
                process.idle_since_s = time.monotonic()
                self._idle.append(process)
        if not keep:
            if process.key.devices:
                process.let_go()
            self._give_up(process)

    def tidy(self) -> None:
        """Ends what has been idle for too long; to be called now and then."""
        oldest_s = time.monotonic() - self._idle_s
        with self._lock:
            old = [p for p in self._idle if p.idle_since_s < oldest_s or not p.usable]
            self._idle = [p for p in self._idle if p not in old]
        for process in old:
            self._give_up(process)

    def close(self) -> None:
        """Ends all idle processes now, and busy ones when they are released."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.let_go()
            process.dispose()

    def _take(self, key: WarmKey, surplus: list[WarmProcess]) -> WarmProcess | None:
        for process in [p for p in reversed(self._idle) if p.key == key]:
            self._idle.remove(process)
            if process.usable:
                return process
            surplus.append(process)
        return None

    def _give_up(self, process: WarmProcess) -> None:
        def end() -> None:
            process.let_go()
            process.dispose()

        self._later(end)
