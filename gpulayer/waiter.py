"""Waits for the end of jobs: one thread and one connection for all jobs of a client, without polling.

The queue writes a notice into this client's own stream when a job that it submitted, or watches, ends. What the thread
cannot be sure of (a gap in the stream, a new connection, a long silence) it settles by asking again for all that is
waited for; in silence it also lets the queue's clock tick, so that a lost worker's job comes to its end though no
worker is left. It outlives the queue's restart. The thread lives only while something is waited for.

Of an array the queue also tells each page of outcomes: who follows its slot is given the pages as they come, and is
told when some may have been missed.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, TypeGuard

from gpulayer.attentive import attentive
from gpulayer.session import Session
from gpulayer.slots import MISSING, Early, Notice, Reader, Slot, call_back
from gpulayer_broker import functions
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import ConfigError, GpulayerError, QueueUnreachable
from gpulayer_broker.job import FINAL, QUEUED
from gpulayer_broker.queue import Queue

log = logging.getLogger("gpulayer")

SILENCE_S = 5.0
LINGER_S = 1.0
DOUBT_S = 60.0
OUTAGE_S = 600.0
OUTAGE_PAUSE_S = 0.2
BATCH = 1000
ITEMS = b"items"


class Waiter:
    """All waiting of one client. Safe between threads and across a fork."""

    def __init__(self, session: Session, *, silence_s: float = SILENCE_S) -> None:
        self._session = session
        self._silence_s = silence_s
        self._slots: weakref.WeakValueDictionary[str, Slot] = weakref.WeakValueDictionary()
        self._closed = False
        self._stuck_told = False
        self._begin()

    def _begin(self) -> None:
        """A new stream and no thread: at the start, and in a forked child."""
        self._pid = os.getpid()
        self._client = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._wanted: dict[str, Slot] = {}
        self._early = Early()
        self._thread: threading.Thread | None = None
        self._link: Link | None = None
        self._last: int | None = 0
        self._read_since_trim = 0
        self._doubtful = False
        self._listens_on = False
        self._down_since: float | None = None
        self._read_at = time.monotonic()

    def _after_fork(self) -> None:
        self._begin()
        for slot in list(self._slots.values()):
            slot.callbacks.clear()
            slot.watched = False
            _tell_missed(slot.living())

    @property
    def client(self) -> str:
        """The name under which the queue tells this process of its jobs."""
        if self._pid != os.getpid():
            self._after_fork()
        return self._client

    def slot(self, job_id: str, *, submitted: bool = False) -> Slot:
        """The slot of a job, which was `submitted` under this client's name or must be watched."""
        if self._pid != os.getpid():
            self._after_fork()
        with self._lock:
            slot = self._slots.get(job_id)
            if slot is None:
                slot = self._slots[job_id] = self._early.slot(job_id, submitted)
            return slot

    def listen(self, slot: Slot, callback: Callable[[Slot], None]) -> None:
        """Calls back once when the job's end is known, or waiting is given up; at once if it is known already.

        Whatever it raises, nothing is left behind: the callback is not kept, and the job is watched when it is next
        waited for.
        """
        client = self.client
        try:
            with self._lock:
                known = slot.notice is not None
                if not known:
                    slot.error = None
                    slot.callbacks.append(callback)
                    self._wanted[slot.job_id] = slot
            if known:
                callback(slot)
                return
            if not slot.watched:
                # A job that two begin to wait for at once is watched twice, which is the same.
                self._session.attempt(lambda queue: self._watch(queue, client, [slot.job_id]))
                slot.watched = True
            self._ensure_thread()
        except BaseException:
            self.ignore(slot, callback)
            raise

    def watch(self, slots: Iterable[Slot]) -> None:
        """Asks for the ends of many jobs in a few calls, which would otherwise take one each when it is waited for."""
        client = self.client
        new = [slot for slot in slots if not slot.watched and slot.notice is None]
        self._session.attempt(lambda queue: self._watch(queue, client, [slot.job_id for slot in new]))
        for slot in new:
            slot.watched = True

    def follow(self, slot: Slot, reader: Reader) -> None:
        """Gives the reader the array's pages while anything is waited for; it is held weakly."""
        with self._lock:
            slot.follow(reader)
            missed, slot.missed = slot.missed, False
        if missed:
            reader.missed()

    def ignore(self, slot: Slot, callback: Callable[[Slot], None]) -> None:
        """Takes a callback back."""
        with self._lock:
            if callback in slot.callbacks:
                slot.callbacks.remove(callback)
            if not slot.callbacks:
                self._wanted.pop(slot.job_id, None)

    def wait(self, slot: Slot, timeout_s: float | None) -> bool:
        """Whether the job's end is known in time; raises why waiting was given up."""
        if slot.notice is not None:
            return True
        # Held until the end is told: as an event, at a third of its time.
        waits = threading.Lock()
        waits.acquire()

        def take(for_s: float | None) -> bool:
            return waits.acquire(timeout=-1 if for_s is None else max(0.0, for_s))

        def wake(_: Slot) -> None:
            waits.release()

        try:
            self.listen(slot, wake)
            attentive(take, timeout_s)
        finally:
            if slot.notice is None:
                self.ignore(slot, wake)
        if slot.notice is None and slot.error is not None:
            raise slot.error
        return slot.notice is not None

    def close(self) -> None:
        """Ends the thread; whoever still waits gets QueueUnreachable."""
        self._closed = True
        if self._pid != os.getpid():
            return
        with self._lock:
            link, thread = self._link, self._thread
            self._wake.notify_all()
        if link is not None:
            link.close()
        if _began(thread) and thread is not threading.current_thread():
            thread.join(self._silence_s)
        self._give_up(QueueUnreachable("this client was closed while it waited"))

    # The thread -----------------------------------------------------------------------------------------------------

    def _ensure_thread(self) -> None:
        with self._lock:
            if self._closed:
                raise QueueUnreachable("this client is closed")
            if not _began(self._thread) and self._wanted:
                if time.monotonic() - self._read_at > DOUBT_S:
                    self._doubtful, self._last = True, None
                self._thread = threading.Thread(target=self._run, name="gpulayer-waiter", daemon=True)
                self._thread.start()
            self._wake.notify_all()

    def _run(self) -> None:
        with self._lock:
            if self._thread is not threading.current_thread():
                return
        try:
            while self._has_work():
                try:
                    self._turn()
                    self._down_since = None
                except GpulayerError as error:
                    self._outage(error)
        except BaseException as error:
            self._give_up(QueueUnreachable(f"waiting failed: {type(error).__name__}: {error}"))
            raise
        finally:
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread = None

    def _has_work(self) -> bool:
        """False when nothing has been waited for during a while: the next wait starts a new thread.

        After an end that was waited for the next may be too, such as that of a call after the other: it is listened
        for at once.
        """
        with self._lock:
            if not (self._wanted or self._listens_on or self._closed):
                self._wake.wait(LINGER_S)
            if self._closed or not (self._wanted or self._listens_on):
                self._thread = None
                return False
            return True

    def _turn(self) -> None:
        queue = self._session.queue
        link = self._connected()
        if self._doubtful:
            self._ask_again(queue)
        self._take(queue, link)
        if link.connects > 1:
            # A new connection: the server may be another one's child, with a shorter stream.
            self._renew_link()

    def _connected(self) -> Link:
        if self._link is None:
            self._link = self._session.link()
        return self._link

    def _renew_link(self) -> None:
        link, self._link = self._link, None
        self._doubtful, self._last = True, None
        if link is not None:
            link.close()

    def _take(self, queue: Queue, link: Link) -> None:
        """Waits for notices and delivers them; after a silence everything is asked for anew."""
        key, idle = queue.keys.done(self._client), not self._wanted
        wait_s = min(LINGER_S, self._silence_s) if idle else self._silence_s
        self._listens_on = False
        last = b"0-%d" % (self._last or 0)
        command = ("XREAD", "COUNT", BATCH, "BLOCK", int(wait_s * 1000), "STREAMS", key, last)
        reply = link.block(*command, timeout_s=wait_s)
        self._read_at = time.monotonic()
        if not reply and idle:
            return
        if not reply:
            self._tick(queue)
            # The stream has a lifetime: after so long a silence it may have begun anew.
            self._trim(link, key)
            self._doubtful, self._last = True, None
            return
        entries = reply[0][1]
        self._check_gap(entries)
        for _, fields in entries:
            self._deliver(fields)
        self._read_since_trim += len(entries)
        if self._read_since_trim >= BATCH:
            self._trim(link, key)

    def _trim(self, link: Link, key: str) -> None:
        """Takes what was read out of the queue's memory."""
        if self._read_since_trim and self._last is not None:
            link.call("XTRIM", key, "MINID", f"0-{self._last + 1}")
        self._read_since_trim = 0

    def _check_gap(self, entries: Sequence[Any]) -> None:
        first, last = (int(entry_id.partition(b"-")[2]) for entry_id, _ in (entries[0], entries[-1]))
        if self._last is not None and first != self._last + 1:
            self._doubtful = True
        self._last = last

    def _deliver(self, fields: Sequence[bytes]) -> None:
        told = dict(zip(fields[::2], fields[1::2], strict=True))
        if told[b"state"] == ITEMS:
            self._page(told[b"job"].decode(), int(told[b"kind"].partition(b" ")[0]), told[b"result"])
            return
        notice = Notice(told[b"state"].decode(), told[b"kind"].decode(), told[b"result"])
        self._end(told[b"job"].decode(), notice)

    def _page(self, job_id: str, start: int, data: bytes) -> None:
        with self._lock:
            slot = self._slots.get(job_id)
            if slot is None:
                self._early.keep(job_id, None)
                return
            readers = slot.living()
            slot.missed = slot.missed or not readers
        for reader in readers:
            reader.page(start, data)

    def _end(self, job_id: str, notice: Notice) -> None:
        with self._lock:
            self._listens_on = self._wanted.pop(job_id, None) is not None
            slot = self._slots.get(job_id)
            if slot is None:
                self._early.keep(job_id, notice)
                return
            if slot.notice is not None:
                return
            slot.notice = notice
            callbacks, slot.callbacks = slot.callbacks, []
        call_back(slot, callbacks)

    def _tick(self, queue: Queue) -> None:
        if self._session.target.store is not None:
            self._tell_stuck(queue)
            return
        self._session.tend()

    def _tell_stuck(self, queue: Queue) -> None:
        """Says once, in this job's log, that what it waits for has not begun while it holds its own slot."""
        with self._lock:
            wanted = list(self._wanted)[:BATCH]
        records = [record for record in queue.records(wanted) if record is not None]
        if self._stuck_told or not records or any(record.state != QUEUED for record in records):
            return
        self._stuck_told = True
        print(
            f"gpulayer: this job waits for {len(records)} jobs of its own, none of which has begun. It holds its "
            "slot meanwhile: give the worker more --slots, or submit without waiting",
            file=sys.stderr,
            flush=True,
        )

    def _ask_again(self, queue: Queue) -> None:
        """Watches all that is waited for; what is only held will be watched when it is waited for."""
        with self._lock:
            wanted = list(self._wanted)
            self._early.doubt()
            for slot in list(self._slots.values()):
                slot.watched = slot.job_id in self._wanted
        self._watch(queue, self._client, wanted)
        self._doubtful = False
        # Under the lock, because another thread may be submitting; told without it, because what is told may take it.
        with self._lock:
            readers = [reader for slot in list(self._slots.values()) for reader in slot.living()]
        _tell_missed(readers)

    def _watch(self, queue: Queue, client: str, job_ids: Iterable[str]) -> None:
        ids = iter(job_ids)
        while chunk := list(islice(ids, BATCH)):
            for job_id, state in queue.run(functions.watch(client, chunk)).items():
                if state in FINAL or state == MISSING:
                    self._end(job_id, Notice(state))

    # Outages --------------------------------------------------------------------------------------------------------

    def _outage(self, error: GpulayerError) -> None:
        """Waits a little and heals what can be healed; after `OUTAGE_S` whoever waits is told."""
        if self._closed:
            return
        now = time.monotonic()
        if self._down_since is None:
            self._down_since = now
            log.info("waiting: %s", error)
        if not isinstance(error, QueueUnreachable) or now - self._down_since > OUTAGE_S:
            self._give_up(error)
            return
        self._renew_link()
        with self._lock:
            self._wake.wait(OUTAGE_PAUSE_S)
        try:
            self._session.healed()
        except QueueUnreachable as still:
            log.debug("waiting: %s", still)
        except ConfigError as broken:
            self._give_up(broken)

    def _give_up(self, error: GpulayerError) -> None:
        with self._lock:
            slots, self._wanted = list(self._wanted.values()), {}
            pending = [(slot, slot.callbacks) for slot in slots]
            for slot in slots:
                slot.error, slot.callbacks, slot.watched = error, [], False
        for slot, callbacks in pending:
            call_back(slot, callbacks)


def _tell_missed(readers: Iterable[Reader]) -> None:
    for reader in readers:
        reader.missed()


def _began(thread: threading.Thread | None) -> TypeGuard[threading.Thread]:
    """Whether it runs: Ctrl-C in the middle of its start may leave one that never does."""
    return thread is not None and thread.ident is not None
