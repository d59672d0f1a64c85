"""Logs: what a job writes, kept whole for the store and shipped live in batches.

One thread reads the pipes of all jobs, so that none is ever held up by the queue: bytes go to the job's spool first.
Another ships what is new, at most 64 KiB an entry; where a job writes faster than the queue takes, the live tail skips
ahead, and the whole log still has everything up to its limit.
"""

from __future__ import annotations

import io
import logging
import os
import selectors
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpulayer_broker import functions
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.queue import Queue
from gpulayer_broker.store.blobstore import BlobStore

log = logging.getLogger("gpulayer")

CHUNK_BYTES = 65536
TAIL_BYTES = 1 << 20
MEMORY_BYTES = 1 << 20
SHIP_EVERY_S = 0.05
STREAMS = ("out", "err")


@dataclass(eq=False)
class JobLog:
    """The log of one rank of one attempt: all bytes in the order they came, and which stream each run is of."""

    job_id: str
    token: str
    spill: Path
    limit_bytes: int
    rank: int = 0
    size: int = 0
    shipped: int = 0
    dropped: int = 0
    runs: list[list[Any]] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    _open_pipes: int = len(STREAMS)
    _file: Any = field(default_factory=io.BytesIO)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def write(self, stream: str, data: bytes) -> None:
        with self._lock:
            room = self.limit_bytes - self.size
            if room <= 0:
                self._note_dropped(len(data))
                return
            self._append(stream, data[:room])
            self._note_dropped(len(data) - len(data[:room]))

    def _note_dropped(self, count: int) -> None:
        if count and not self.dropped:
            self._append("err", b"\n[gpulayer: the log is over its limit, what follows is not kept]\n")
        self.dropped += count

    def _append(self, stream: str, data: bytes) -> None:
        if self.size + len(data) > MEMORY_BYTES and isinstance(self._file, io.BytesIO):
            spilled = open(self.spill, "w+b")  # noqa: SIM115 - closed by close()
            spilled.write(self._file.getvalue())
            self._file = spilled
        self._file.seek(0, os.SEEK_END)
        self._file.write(data)
        if self.runs and self.runs[-1][2] == stream:
            self.runs[-1][1] += len(data)
        else:
            self.runs.append([self.size, len(data), stream])
        self.size += len(data)

    def pipe_ended(self) -> None:
        self._open_pipes -= 1
        if self._open_pipes == 0:
            self.closed.set()

    def unshipped(self, most: int) -> list[tuple[str, int, bytes]]:
        """(stream, offset, bytes) of what was not taken for shipping yet; what no tail would hold is skipped."""
        with self._lock:
            self.shipped = max(self.shipped, self.size - TAIL_BYTES)
            out: list[tuple[str, int, bytes]] = []
            while self.shipped < self.size and len(out) < most:
                start, length, stream = self._run_at(self.shipped)
                count = min(start + length - self.shipped, CHUNK_BYTES)
                self._file.seek(self.shipped)
                out.append((stream, self.shipped, self._file.read(count)))
                self.shipped += count
            return out

    def _run_at(self, offset: int) -> tuple[int, int, str]:
        for start, length, stream in reversed(self.runs):
            if start <= offset:
                return start, length, stream
        raise AssertionError("no run holds this offset")

    def store(self, store: BlobStore) -> dict[str, Any]:
        """Puts the whole log and its index into the store; the record's entry."""
        import orjson

        with self._lock:
            self._file.flush()
            in_memory = isinstance(self._file, io.BytesIO)
            sha = store.put_bytes(self._file.getvalue()) if in_memory else store.put_file(self.spill)[0]
            index = b"".join(orjson.dumps(run) + b"\n" for run in self.runs)
            return {"sha256": sha, "size": self.size, "index_sha256": store.put_bytes(index)}

    def close(self) -> None:
        with self._lock:
            self._file.close()


class Logs:
    """The reader and the shipper of one worker."""

    def __init__(self, queue: Queue, limit_bytes: int) -> None:
        self._queue = queue
        self._limit_bytes = limit_bytes
        self._selector = selectors.DefaultSelector()
        self._dirty: set[JobLog] = set()
        self._logs: set[JobLog] = set()
        self._lock = threading.Lock()
        self._shipping = threading.Lock()
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_reader, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._news = threading.Event()
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._read, "gpulayer-log-reader"), (self._ship, "gpulayer-log-shipper"))
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

    def open(self, job_id: str, token: str, spill: Path) -> tuple[JobLog, list[int]]:
        """A log, and the write ends of its two pipes (stdout, stderr); the caller closes them after the start."""
        job_log = JobLog(job_id, token, spill, self._limit_bytes)
        writers = []
        with self._lock:
            self._logs.add(job_log)
        for stream in STREAMS:
            reader, writer = os.pipe()
            os.set_blocking(reader, False)
            writers.append(writer)
            self._watch(reader, job_log, stream)
        return job_log, writers

    def finish(self, job_log: JobLog, patience_s: float) -> None:
        """Waits until both pipes have ended, and ships what is left."""
        job_log.closed.wait(patience_s)
        with self._lock:
            self._dirty.discard(job_log)
        while job_log.shipped < job_log.size and self._ship_one(job_log):
            continue

    def forget(self, job_log: JobLog) -> None:
        with self._lock:
            self._logs.discard(job_log)
            self._dirty.discard(job_log)
        job_log.close()

    # --- the reader ---

    def _watch(self, reader: int, job_log: JobLog, stream: str) -> None:
        with self._lock:
            self._selector.register(reader, selectors.EVENT_READ, (job_log, stream))
        os.write(self._wake_writer, b"x")

    def _read(self) -> None:
        while not self._stopped.is_set():
            for key, _ in self._selector.select():
                if key.data is None:
                    os.read(self._wake_reader, 4096)
                else:
                    self._read_pipe(key.fd, *key.data)

    def _read_pipe(self, descriptor: int, job_log: JobLog, stream: str) -> None:
        try:
            data = os.read(descriptor, 1 << 18)
        except BlockingIOError:
            return
        if data:
            job_log.write(stream, data)
            with self._lock:
                if job_log in self._logs:
                    self._dirty.add(job_log)
            self._news.set()
            return
        with self._lock:
            self._selector.unregister(descriptor)
        os.close(descriptor)
        job_log.pipe_ended()

    # --- the shipper ---

    def _ship(self) -> None:
        while not self._stopped.is_set():
            self._news.wait()
            self._news.clear()
            with self._lock:
                logs = list(self._dirty & self._logs)
                self._dirty.clear()
            for job_log in logs:
                if self._ship_one(job_log) and job_log.shipped < job_log.size:
                    with self._lock:
                        self._dirty.add(job_log)
                    self._news.set()
            self._stopped.wait(SHIP_EVERY_S)

    def _ship_one(self, job_log: JobLog) -> bool:
        """Ships up to 1 MiB of one log; False where the queue did not take it (the whole log still has it)."""
        with self._shipping:
            parts = job_log.unshipped(16)
            calls = [
                functions.log(job_log.job_id, job_log.token, job_log.rank, stream, offset, data)
                for stream, offset, data in parts
            ]
            try:
                answers = self._queue.run_many(calls)
            except GpulayerError as error:
                log.warning("log of job %s not shipped: %s", job_log.job_id, error)
                return False
            return all(answer in ("ok", "already") for answer in answers)
