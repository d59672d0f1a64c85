"""The attempts that a worker holds: what was granted, until when its lease runs, and how to stop it.

A lease is counted from before the call that gave or renewed it was sent, on a clock that runs on while the machine
sleeps: the queue's own deadline is never earlier.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gpulayer_broker.answers import Grant
from gpulayer_broker.functions import Running

CANCELLED, STALE, DEVICE_LOST = "cancelled", "stale", "device lost"


def lease_clock_s() -> float:
    """The clock of leases: monotonic, and it runs on while the machine sleeps, as the queue's own does."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


@dataclass
class Attempt:
    """One grant while this worker holds it. `stop` is set once, with the reason, and wakes whoever runs the job.

    `riders` are the other calls of its ride, where it is the first.
    """

    grant: Grant
    lease_until_s: float
    started: bool = True
    progress: str = ""
    stop_reason: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)
    on_stop: Callable[[str], None] | None = None
    on_interrupt: Callable[[], None] | None = None
    on_lease: Callable[[float], None] | None = None
    riders: tuple[Attempt, ...] = ()

    @property
    def id(self) -> str:
        return self.grant.id

    @property
    def token(self) -> str:
        return self.grant.token

    @property
    def slot(self) -> str:
        """What names the slot that it has: calls of one ride share theirs."""
        return self.grant.ride or f"{self.grant.id}/{self.grant.token}"

    def stop(self, reason: str) -> None:
        if self.stopped.is_set():
            return
        self.stop_reason = reason
        self.stopped.set()
        if self.on_stop:
            self.on_stop(reason)

    def interrupt(self) -> None:
        """Somebody wants the job to see Ctrl-C; what does not run yet, or cannot see it, does not."""
        if self.on_interrupt and not self.stopped.is_set():
            self.on_interrupt()


class Attempts:
    """All attempts of one worker, by job id. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, Attempt] = {}

    def __len__(self) -> int:
        return len(self._held)

    def slots(self, leaving: Collection[Attempt] = ()) -> int:
        """How many slots are taken, but for those that these attempts leave."""
        gone = {id(attempt) for attempt in leaving}
        with self._lock:
            return len({a.slot for a in self._held.values() if id(a) not in gone})

    def add(self, attempt: Attempt) -> None:
        with self._lock:
            self._held[attempt.id] = attempt
        if attempt.grant.cancelled:
            attempt.stop(CANCELLED)

    def remove(self, attempt: Attempt) -> None:
        """Forgets this very attempt; a later one of the same job stays."""
        with self._lock:
            if self._held.get(attempt.id) is attempt:
                del self._held[attempt.id]

    def get(self, job_id: str) -> Attempt | None:
        with self._lock:
            return self._held.get(job_id)

    def all(self) -> list[Attempt]:
        with self._lock:
            return list(self._held.values())

    def listed(self) -> list[Running]:
        """As a heartbeat lists them."""
        return [Running(a.id, a.token, a.started, a.progress) for a in self.all()]

    def renewed(self, tokens: set[str], lease_until_s: float) -> None:
        for attempt in self.all():
            if attempt.token in tokens:
                attempt.lease_until_s = lease_until_s

    def expired(self) -> list[Attempt]:
        now_s = lease_clock_s()
        return [a for a in self.all() if a.lease_until_s < now_s]
