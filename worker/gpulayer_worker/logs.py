"""Logs: what jobs write, kept whole for the store and shipped live in batches.

One thread reads the pipes of all jobs, so that none is ever held up by the queue: bytes go to the job's log first.
A function's pipes are given to it when the function is known to run on; one that is over by then is read where its end
is dealt with, which wakes nobody.
Another ships what is new, at most 64 KiB an entry: the first words of a job at once, and what follows gathered for a
moment, for each log by itself. Where a job writes faster than the queue takes, the live tail skips ahead, and the whole
log still has everything up to its limit. What a lost connection swallowed is shipped again.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path

from gpulayer_broker import functions
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.queue import Queue
from gpulayer_worker.joblog import JobLog

log = logging.getLogger("gpulayer")

READ_BYTES = 1 << 18
# More than a pipe holds.
MOST_READS = 16
SHIP_EVERY_S = 0.05
# The rest of a line comes within this time where a program writes it in pieces, as Python does without its buffers.
LINE_S = 0.002
RETRY_S = 0.5
BATCH = 16
STREAMS = ("out", "err")
# Those of whose kind the kernel watches a pipe from its registration on, though a thread waits already.
SEE_AT_ONCE = tuple(
    getattr(selectors, name) for name in ("EpollSelector", "KqueueSelector") if hasattr(selectors, name)
)


class Logs:
    """The reader and the shipper of one worker."""

    def __init__(self, queue: Queue, limit_bytes: int) -> None:
        self._queue = queue
        self._limit_bytes = limit_bytes
        self._selector = selectors.DefaultSelector()
        # When what is new of a log is to be shipped.
        self._due_s: dict[JobLog, float] = {}
        self._logs: set[JobLog] = set()
        self._lock = threading.Lock()
        self._shipping = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._forever, args=(step,), name=name, daemon=True)
            for step, name in ((self._read, "gpulayer-log-reader"), (self._ship, "gpulayer-log-shipper"))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        os.write(self._wake_writer, b"x")
        self._news.set()
        for thread in self._threads:
            thread.join(5)
        self._selector.close()
        os.close(self._wake_reader)
        os.close(self._wake_writer)
        self._queue.link.close()

    def open(
        self, job_id: str, token: str, spill: str | Path, at_once: bool = True
    ) -> tuple[JobLog, list[int]]:
        """A log, and the write ends of its two pipes (stdout, stderr); the caller closes them after the start.

        Where it is not read `at_once`, it is from `watch` on; a job that is over before needs no other thread for it.
        """
        job_log = JobLog(job_id, token, spill, self._limit_bytes, len(STREAMS))
        pipes: list[tuple[int, int]] = []
        try:
            for _ in STREAMS:
                pipes.append(os.pipe())
        except OSError:
            for end in (end for pipe in pipes for end in pipe):
                os.close(end)
            raise
        for stream, (reader, _) in zip(STREAMS, pipes, strict=True):
            os.set_blocking(reader, False)
            job_log.unwatched.append((reader, stream))
        with self._lock:
            self._logs.add(job_log)
        if at_once:
            self.watch(job_log)
        return job_log, [writer for _, writer in pipes]

    def adopt(self, job_id: str, token: str, spill: str | Path) -> JobLog:
        """A log without pipes: what is written to it comes by `feed`."""
        job_log = JobLog(job_id, token, spill, self._limit_bytes, 0)
        job_log.closed.tell(None)
        with self._lock:
            self._logs.add(job_log)
        return job_log

    def feed(self, job_log: JobLog, stream: str, data: bytes) -> None:
        """What the job wrote, to be kept and shipped."""
        job_log.write(stream, data)
        self._mark(job_log)

    def watch(self, job_log: JobLog) -> None:
        """From now on what the job writes is read while it runs."""
        for reader, stream in self._unwatched(job_log):
            self._watch(reader, job_log, stream)

    def _unwatched(self, job_log: JobLog) -> list[tuple[int, str]]:
        with self._lock:
            pipes, job_log.unwatched = job_log.unwatched, []
        return pipes

    def finish(self, job_log: JobLog, patience_s: float) -> None:
        """Waits until both pipes have ended, and ships what is left."""
        for reader, stream in self._unwatched(job_log):
            if not _drained(reader, job_log, stream):
                self._watch(reader, job_log, stream)
        job_log.closed.waits(patience_s)
        with self._lock:
            self._due_s.pop(job_log, None)
        # At least once: it also waits for what the other thread has just taken and not sent yet.
        while self._ship_one(job_log) and job_log.unsent:
            continue

    def forget(self, job_log: JobLog) -> None:
        with self._lock:
            self._logs.discard(job_log)
            self._due_s.pop(job_log, None)
        for reader, _ in self._unwatched(job_log):
            os.close(reader)
        job_log.forget()

    def _forever(self, step: Callable[[], None]) -> None:
        """Neither thread may end before the worker does: jobs would stand still on a pipe that nobody reads."""
        while not self._stopped.is_set():
            try:
                step()
            except Exception:
                log.exception("logs")
                self._stopped.wait(RETRY_S)

    # --- the reader ---

    def _watch(self, reader: int, job_log: JobLog, stream: str) -> None:
        with self._lock:
            self._selector.register(reader, selectors.EVENT_READ, (job_log, stream))
        if not isinstance(self._selector, SEE_AT_ONCE):
            os.write(self._wake_writer, b"x")

    def _read(self) -> None:
        for key, _ in self._selector.select():
            if key.data is None:
                os.read(self._wake_reader, 4096)
            else:
                self._read_pipe(key.fd, *key.data)

    def _read_pipe(self, descriptor: int, job_log: JobLog, stream: str) -> None:
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            job_log.write(stream, data)
            self._mark(job_log)
            return
        with self._lock:
            self._selector.unregister(descriptor)
        os.close(descriptor)
        job_log.pipe_ended()

    # --- the shipper ---

    def _mark(self, job_log: JobLog) -> None:
        line_s = time.monotonic() + (LINE_S if job_log.is_mid_line else 0.0)
        due_s = max(line_s, job_log.rests_until_s)
        with self._lock:
            if job_log not in self._logs or self._due_s.get(job_log, math.inf) <= due_s:
                return
            self._due_s[job_log] = due_s
        self._news.set()

    def _ship(self) -> None:
        with self._lock:
            next_s = min(self._due_s.values(), default=None)
        if next_s is None or next_s > time.monotonic():
            self._news.wait(None if next_s is None else max(0.0, next_s - time.monotonic()))
            self._news.clear()
        for job_log in self._taken():
            arrived = self._ship_one(job_log)
            job_log.rests_until_s = time.monotonic() + (SHIP_EVERY_S if arrived else RETRY_S)
            if job_log.unsent:
                self._mark(job_log)

    def _taken(self) -> list[JobLog]:
        """The logs that are due."""
        now_s = time.monotonic()
        with self._lock:
            logs = [job_log for job_log, due_s in self._due_s.items() if due_s <= now_s]
            for job_log in logs:
                del self._due_s[job_log]
        return logs

    def _ship_one(self, job_log: JobLog) -> bool:
        """Ships up to 1 MiB of one log; False where it did not arrive (the whole log still has it)."""
        with self._shipping:
            parts = job_log.unshipped(BATCH)
            if not parts:
                return True
            calls = [
                functions.log(job_log.job_id, job_log.token, job_log.rank, stream, offset, data)
                for stream, offset, data in parts
            ]
            try:
                answers = self._queue.run_many(calls)
            except GpulayerError as error:
                answers = [error]
            job_log.refused = job_log.refused or "stale" in answers
            lost = [answer for answer in answers if isinstance(answer, GpulayerError)]
            if lost:
                log.warning("log of job %s not shipped: %s", job_log.job_id, lost[0])
                job_log.ship_again(parts[0][1])
            return not lost


def _drained(reader: int, job_log: JobLog, stream: str) -> bool:
    """Reads what a job that is over has written; False while somebody else still holds the pipe."""
    for _ in range(MOST_READS):
        try:
            data = os.read(reader, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            os.close(reader)
            job_log.pipe_ended()
            return True
        job_log.write(stream, data)
    return False
