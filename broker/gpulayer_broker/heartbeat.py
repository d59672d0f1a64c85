"""The heartbeat: renews the leases of what runs, on a connection of its own that never retries.

It also keeps the namespace's clock while this worker is its keeper: it ticks when something falls due, and is woken
early by mail of kind `timer`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpulayer_broker import functions
from gpulayer_broker.answers import Renewed
from gpulayer_broker.attempts import CANCELLED, STALE, Attempts, lease_clock_s
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.queue import Queue
from gpulayer_broker.settings import Settings

log = logging.getLogger("gpulayer")

SOONEST_S = 1.0


class Heartbeat(threading.Thread):
    """Beats until stopped. `on_lease(until_s)` is told how far the leases now reach, on the clock of leases."""

    def __init__(
        self,
        queue: Queue,
        attempts: Attempts,
        settings: Settings,
        *,
        worker: str,
        incarnation: str,
        register: Callable[[], None],
        on_lease: Callable[[float], None],
        on_superseded: Callable[[], None],
        known: Callable[[], str],
        info: Callable[[], bytes] = lambda: b"",
    ) -> None:
        super().__init__(name="gpulayer-heartbeat", daemon=True)
        self.queue, self.attempts, self.settings = queue, attempts, settings
        self.worker, self.incarnation = worker, incarnation
        self.keeper = False
        self._register, self._on_lease, self._on_superseded = register, on_lease, on_superseded
        self._known, self._info, self._told_info = known, info, b""
        self._wake = threading.Event()
        self._stopped = False
        self._last_beat_s = self._next_beat_s = self._next_tick_s = 0.0
        self._earlier = False

    def run(self) -> None:
        while True:
            # First: whoever wakes this thread from here on is heard by what is looked at below, or by the wait.
            self._wake.clear()
            if self._stopped:
                return
            if time.monotonic() >= self._next_beat_s:
                self._last_beat_s = time.monotonic()
                self._next_beat_s = self._last_beat_s + self.settings.heartbeat_s
                self._guarded(self.beat)
            if self.keeper and (self._earlier or time.monotonic() >= self._next_tick_s):
                self._earlier, self._next_tick_s = False, time.monotonic() + self.settings.heartbeat_s
                self._guarded(self._tick)
            self._wake.wait(self._pause_s())

    def beat_soon(self) -> None:
        """Beats before its time, at most once a second, so that a started job or its progress is seen soon."""
        self._next_beat_s = min(self._next_beat_s, self._last_beat_s + SOONEST_S)
        self._wake.set()

    def timer(self) -> None:
        """Something falls due earlier than was known."""
        self._earlier = True
        self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def beat(self) -> None:
        """One renewal; what it answers is carried out. What status shows goes along when it has changed."""
        info = self._info()
        known = self._known()  # before the list: what this claim and earlier ones brought is on it
        listed, sent_s = self.attempts.listed(), lease_clock_s()
        lease_ms = int(self.settings.lease_s * 1000)
        told = info if info != self._told_info else b""
        renewal = functions.renew(self.worker, self.incarnation, lease_ms, listed, told, known)
        renewed = self.queue.run_once(renewal)
        self._told_info = info
        if renewed.status == "superseded":
            self._on_superseded()
            return
        if not renewed.known:
            self._register()
            return
        self._carry_out(renewed, {a.id: a.token for a in listed}, sent_s)

    def _carry_out(self, renewed: Renewed, tokens: dict[str, str], sent_s: float) -> None:
        self.keeper = renewed.keeper
        until_s = sent_s + self.settings.lease_s
        self.attempts.renewed(
            {token for job_id, token in tokens.items() if job_id not in renewed.stale}, until_s
        )
        self._on_lease(until_s)
        for reason, ids in ((STALE, renewed.stale), (CANCELLED, renewed.cancelled)):
            for job_id in ids:
                attempt = self.attempts.get(job_id)
                if attempt and attempt.token == tokens[job_id]:  # not a later attempt of the same job
                    attempt.stop(reason)

    def _tick(self) -> None:
        ticked = self.queue.run_once(functions.tick())
        self._next_tick_s = time.monotonic() + ticked.next_ms / 1000 + 0.001

    def _pause_s(self) -> float:
        next_s = min(self._next_beat_s, self._next_tick_s) if self.keeper else self._next_beat_s
        return max(0.0, next_s - time.monotonic())

    def _guarded(self, action: Callable[[], None]) -> None:
        """A beat that fails is one beat lost: the lease outlasts several, and enforces itself at its end."""
        try:
            action()
        except GpulayerError as error:
            self.keeper = False
            self._next_beat_s = min(self._next_beat_s, time.monotonic() + min(1.0, self.settings.heartbeat_s))
            log.warning("heartbeat of %s: %s", self.worker, error)
        except Exception:  # a worker without a heartbeat looks alive and loses its jobs: the thread goes on
            log.exception("heartbeat of %s", self.worker)
