"""What the worker is to hear of its jobs: sent in the order in which it happens, but for starts, which wait for more.

A start is told with the job's end where that comes soon: the worker is woken once then, and has nothing to watch in
between. One that waits longer than its job lets it is told by itself.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from . import wire
from .jobs import Job


class News:
    """Messages on their way to the worker; nothing here blocks."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._outgoing = bytearray()
        # Process id, and the moment until which it may wait, of each job whose start is not told yet.
        self._starts: dict[str, tuple[int, float]] = {}
        # Not later than the first of these moments.
        self._look_at_starts_s: float | None = None

    def tell(self, event: str, **facts: Any) -> None:
        """Anything but a start or an end."""
        self._outgoing += wire.encode(dict(facts, event=event))

    def tell_start(self, job: Job, linger_ms: int) -> None:
        """The job's process runs; it is told with its end, or when this time is over."""
        until_s = time.monotonic() + linger_ms / 1000
        self._starts[job.id] = job.pid, until_s
        if self._look_at_starts_s is None or until_s < self._look_at_starts_s:
            self._look_at_starts_s = until_s

    def tell_end(self, event: str, job: Job) -> None:
        """The job's main process has `exited`, or all of the job is `gone`."""
        start = self._starts.pop(job.id, None)
        if not self._starts:
            self._look_at_starts_s = None
        pid = "" if start is None else f'"pid":{start[0]},'
        strays = json.dumps(job.strays) if job.strays else "[]"
        known = f'"id":{wire.quoted(job.id)},{pid}"exit":{job.exit},"strays":{strays}'
        self._outgoing += wire.framed(f'{{"event":"{event}",{known}}}')

    def due_in_s(self) -> float | None:
        """How long until a start may have to be told."""
        return None if self._look_at_starts_s is None else self._look_at_starts_s - time.monotonic()

    def send(self) -> bool:
        """Sends what is due, as far as it is taken now; whether something is left. OSError where nobody listens."""
        if self._look_at_starts_s is not None and self._look_at_starts_s <= time.monotonic():
            self._add_due_starts()
        while self._outgoing:
            taken = wire.send(self._link, bytes(self._outgoing[: wire.CHUNK_BYTES]))
            if not taken:
                break
            del self._outgoing[:taken]
        return bool(self._outgoing)

    def _add_due_starts(self) -> None:
        now_s = time.monotonic()
        for identifier, (pid, until_s) in list(self._starts.items()):
            if until_s <= now_s:
                del self._starts[identifier]
                self._outgoing += wire.framed(
                    f'{{"event":"started","id":{wire.quoted(identifier)},"pid":{pid}}}'
                )
        self._look_at_starts_s = min((until_s for _, until_s in self._starts.values()), default=None)
