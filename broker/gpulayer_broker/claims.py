"""Claiming: takes what this worker can start now, and hands it on.

All claims of a worker go through one link and one lock, so that what is offered is exact and a lost reply is asked
for again by its nonce before another claim is made. A worker whose next incarnation is there claims nothing more.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable

from gpulayer_broker import functions
from gpulayer_broker.attempts import Attempt, Attempts, lease_clock_s
from gpulayer_broker.functions import Claimed, Committed, DeviceLot, Ending, Offer
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import Requirements

log = logging.getLogger("gpulayer")


class Claims:
    """What a worker offers, and the one road by which jobs come to it and leave it."""

    def __init__(
        self,
        queue: Queue,
        attempts: Attempts,
        *,
        worker: str,
        incarnation: str,
        lease_s: float,
        deliver: Callable[[Attempt], None],
        register: Callable[[], None],
        on_superseded: Callable[[], None],
    ) -> None:
        self.queue = queue
        self.attempts = attempts
        self.worker = worker
        self.incarnation = incarnation
        self.lease_s = lease_s
        self.capacity = 0
        self.lots: Callable[[], tuple[DeviceLot, ...]] = tuple
        self.disk_mib: Callable[[], int] = lambda: 1 << 40
        self._deliver = deliver
        self._register = register
        self._on_superseded = on_superseded
        self._lock = threading.RLock()
        self._open = False

    def open(self, capacity: int) -> None:
        """From now on up to `capacity` jobs are held at once."""
        with self._lock:
            self.capacity, self._open = capacity, True

    def close(self) -> None:
        """Nothing is claimed any more; a claim that is under way has ended when this returns."""
        with self._lock:
            self._open = False

    @property
    def free(self) -> int:
        return max(0, self.capacity - len(self.attempts)) if self._open else 0

    def claim(self) -> int:
        """Claims for what is free; how many jobs came."""
        with self._lock:
            most = self.free
            if most == 0:
                return 0
            sent_s = lease_clock_s()
            claimed = self.queue.run(functions.claim(self._offer(most)))
            if self._is_stranger(claimed):
                claimed = self.queue.run(functions.claim(self._offer(most)))
            self._take(claimed, sent_s)
            return len(claimed.grants)

    def commit(self, attempt: Attempt, ending: Ending, needs: Iterable[Requirements] = ()) -> Committed:
        """Ends the attempt and claims for the place that it leaves, in one call."""
        with self._lock:
            sent_s = lease_clock_s()
            offer = self._offer(self.free + 1) if self._open else None
            committed = self.queue.commit(ending, offer, needs)
            self.attempts.remove(attempt)
            if committed.verdict == "stale":
                log.warning(
                    "job %s: report of attempt %s refused, the job has moved on", attempt.id, attempt.token
                )
            if offer and self._is_stranger(committed.claimed):
                self.claim()
            else:
                self._take(committed.claimed, sent_s)
            return committed

    def release(self, attempt: Attempt, how: str) -> str:
        """Gives the attempt's job back: returned, lost or unfit."""
        with self._lock:
            answer = self.queue.run(functions.release(attempt.id, attempt.token, how))
            self.attempts.remove(attempt)
            return answer

    def _offer(self, most: int) -> Offer:
        return Offer(
            worker=self.worker,
            incarnation=self.incarnation,
            max=most,
            nonce=secrets.token_hex(16),
            lease_ms=int(self.lease_s * 1000),
            disk_mib=self.disk_mib(),
            lots=self.lots(),
        )

    def _is_stranger(self, claimed: Claimed) -> bool:
        """Registers anew where the queue has forgotten this worker."""
        if claimed.status == "superseded":
            self._open = False
            self._on_superseded()
        if claimed.status == "unknown":
            self._register()
            return True
        return False

    def _take(self, claimed: Claimed, sent_s: float) -> None:
        for grant in claimed.grants:
            attempt = Attempt(grant, sent_s + self.lease_s, started=grant.state == "running")
            self.attempts.add(attempt)
            self._deliver(attempt)
