"""What a client's waiter knows of one job: its end, who is called then, and who reads an array's pages meanwhile;
and what it was told of jobs that have no slot yet.

A slot is shared by all handles of its job. What is called back can never harm the waiting of others: it runs in the
waiter's thread, and whatever it raises is logged and goes no further.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from gpulayer_broker.errors import GpulayerError

log = logging.getLogger("gpulayer")

MISSING = "missing"
# So long may a submit take to come back.
SUBMIT_S = 10.0


class Notice(NamedTuple):
    """A job's end: its state, and the result where it is small; kind 'fetch' means that it must be read."""

    state: str
    kind: str = "fetch"
    result: bytes = b""


class Reader(Protocol):
    """Who follows an array. Both are called by the waiter's thread, and may not wait for anything."""

    def page(self, start: int, data: bytes) -> None:
        """The outcomes of a range whose first item is `start`; empty where they are too many to be told."""

    def missed(self) -> None:
        """Pages may have been told to nobody: they must be read from the queue."""


class Slot:
    """What is known of one job's end, shared by its handles. `error` is why waiting for it was given up; `missed`:
    pages were told before anybody read them."""

    __slots__ = ("__weakref__", "callbacks", "error", "job_id", "missed", "notice", "readers", "watched")

    def __init__(self, job_id: str, watched: bool) -> None:
        self.job_id = job_id
        self.watched = watched
        self.notice: Notice | None = None
        self.error: GpulayerError | None = None
        self.missed = False
        self.callbacks: list[Callable[[Slot], None]] = []
        self.readers: tuple[weakref.ref[Reader], ...] = ()

    def follow(self, reader: Reader) -> None:
        """Holds a reader weakly; called under the waiter's lock."""
        self.readers = (*(each for each in self.readers if each() is not None), weakref.ref(reader))

    def living(self) -> list[Reader]:
        """Its readers that are still there; called under the waiter's lock."""
        return [reader for each in self.readers if (reader := each()) is not None]


class Early:
    """What was told of jobs without a slot: a job may end before its submit has come back. Kept of so many; called
    under the waiter's lock."""

    def __init__(self, most: int = 1000) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[float, Notice | None]] = OrderedDict()
        self._unsure_until_s = 0.0

    def keep(self, job_id: str, notice: Notice | None) -> None:
        """A job's end, or that a page of it was told."""
        now_s, known = time.monotonic(), self._kept.pop(job_id, None)
        self._kept[job_id] = now_s, notice or (known[1] if known else None)
        while (oldest_s := next(iter(self._kept.values()))[0]) < now_s - SUBMIT_S or len(
            self._kept
        ) > self._most:
            self._kept.popitem(last=False)
            if oldest_s >= now_s - SUBMIT_S:
                self.doubt()

    def doubt(self) -> None:
        """Something may have been told to nobody: the slots of jobs that are being submitted now know nothing."""
        self._unsure_until_s = time.monotonic() + SUBMIT_S

    def slot(self, job_id: str, submitted: bool) -> Slot:
        """A new slot, with what was told."""
        slot = Slot(job_id, submitted and time.monotonic() >= self._unsure_until_s)
        if (told := self._kept.pop(job_id, None)) is not None:
            slot.notice, slot.missed = told[1], True
        return slot


def call_back(slot: Slot, callbacks: Iterable[Callable[[Slot], None]]) -> None:
    """Makes all the calls, whatever one of them raises."""
    for callback in callbacks:
        try:
            callback(slot)
        except Exception:
            log.exception("a callback of job %s failed", slot.job_id)
