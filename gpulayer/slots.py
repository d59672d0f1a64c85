"""What a client's waiter knows of one job: its end, who is called then, and who reads an array's pages meanwhile.

A slot is shared by all handles of its job. What is called back can never harm the waiting of others: it runs in the
waiter's thread, and whatever it raises is logged and goes no further.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from gpulayer_broker.errors import GpulayerError

log = logging.getLogger("gpulayer")

MISSING = "missing"


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
    """What is known of one job's end, shared by its handles. `error` is why waiting for it was given up."""

    __slots__ = ("__weakref__", "callbacks", "error", "job_id", "notice", "readers", "watched")

    def __init__(self, job_id: str, watched: bool) -> None:
        self.job_id = job_id
        self.watched = watched
        self.notice: Notice | None = None
        self.error: GpulayerError | None = None
        self.callbacks: list[Callable[[Slot], None]] = []
        self.readers: tuple[weakref.ref[Reader], ...] = ()

    def follow(self, reader: Reader) -> None:
        """Holds a reader weakly; called under the waiter's lock."""
        self.readers = (*(each for each in self.readers if each() is not None), weakref.ref(reader))

    def tell_page(self, start: int, data: bytes) -> None:
        """Gives each reader a page."""
        for reader in self._living():
            reader.page(start, data)

    def tell_missed(self) -> None:
        """Tells each reader that pages may have been missed."""
        for reader in self._living():
            reader.missed()

    def _living(self) -> list[Reader]:
        return [reader for each in self.readers if (reader := each()) is not None]


def call_back(slot: Slot, callbacks: Iterable[Callable[[Slot], None]]) -> None:
    """Makes all the calls, whatever one of them raises."""
    for callback in callbacks:
        try:
            callback(slot)
        except Exception:
            log.exception("a callback of job %s failed", slot.job_id)
