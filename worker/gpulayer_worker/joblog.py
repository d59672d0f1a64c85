"""One job's log while the job runs: all its bytes in the order they came, and which stream each run of them is of.

The first MiB stays in memory, a longer log is in a file. Nothing that a job writes, and no full disk, makes `write`
fail: what cannot be kept is counted and told in the log itself. After `close` bytes are dropped in silence.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_worker.processes.told import Told

CHUNK_BYTES = 65536
TAIL_BYTES = 1 << 20
MEMORY_BYTES = 1 << 20
# A job that changes streams more often has the rest of its log counted to the stream it changed to last.
MOST_RUNS = 100_000
# A run knows when its last byte came. One that goes on for longer is followed by another, as long as there is room for
# changes of the stream too: who asks for what came last is not given much more.
RUN_MS = 1000
OVER_LIMIT = b"\n[gpulayer: the log is over its limit, what follows is not kept]\n"
DISK_FULL = b"\n[gpulayer: the worker cannot write its disk, what follows is not kept]\n"


class Spool:
    """Bytes to append and to read back: in memory, then in a file as soon as they are many."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        self.size = 0
        self._memory = bytearray()
        self._file = -1

    @property
    def in_memory(self) -> bool:
        return self._file < 0

    def append(self, data: bytes) -> None:
        """Keeps all of it; OSError where the disk takes none of it, or not all (then `size` says how much)."""
        if self.in_memory and self.size + len(data) > MEMORY_BYTES:
            self._spill()
        if self.in_memory:
            self._memory += data
            self.size += len(data)
            return
        view = memoryview(data)
        while view:
            taken = os.pwrite(self._file, view, self.size)
            self.size += taken
            view = view[taken:]

    def _spill(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            while at < self.size:
                at += os.pwrite(file, self._memory[at:], at)
        except OSError:
            os.close(file)
            raise
        self._file, self._memory = file, bytearray()

    def read(self, at: int, count: int) -> bytes:
        return bytes(self._memory[at : at + count]) if self.in_memory else os.pread(self._file, count, at)

    def close(self) -> None:
        self._memory.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JobLog:
    """The log of one rank of one attempt. `closed` is told once both of its pipes have ended."""

    def __init__(
        self, job_id: str, token: str, spill: str | Path, limit_bytes: int, pipes: int, rank: int = 0
    ) -> None:
        self.job_id, self.token, self.rank = job_id, token, rank
        self.shipped = 0
        self.dropped = 0
        self.refused = False
        self.rests_until_s = 0.0
        self.is_mid_line = False
        # First byte, length, stream, when its last byte came (ms since 1970, this machine's clock).
        self.runs: list[list[Any]] = []
        self._run_began_ms = 0
        self.closed: Told[None] = Told()
        # The pipes that no thread reads yet, with their streams.
        self.unwatched: list[tuple[int, str]] = []
        self._limit_bytes = limit_bytes
        self._spool = Spool(spill)
        self._open_pipes = pipes
        self._forgotten = False
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._spool.size

    @property
    def unsent(self) -> bool:
        """Whether the queue could still be given something."""
        return not self.refused and self.shipped < self.size

    def write(self, stream: str, data: bytes) -> None:
        with self._lock:
            if self._forgotten:
                return
            self.is_mid_line = not data.endswith(b"\n")
            room = 0 if self.dropped else max(0, self._limit_bytes - self.size)
            kept = self._keep(stream, data[:room])
            if kept < len(data):
                self._drop(len(data) - kept, OVER_LIMIT if kept == room else DISK_FULL)

    def _keep(self, stream: str, data: bytes) -> int:
        """Appends what the spool takes; how much that was."""
        before = self.size
        with contextlib.suppress(OSError):  # the caller sees that not all was kept, and tells
            self._spool.append(data)
        kept = self.size - before
        came_ms = now_ms()
        if kept and self._goes_on(stream, came_ms):
            self.runs[-1][1] += kept
            self.runs[-1][3] = came_ms
        elif kept:
            self.runs.append([before, kept, stream, came_ms])
            self._run_began_ms = came_ms
        return kept

    def _goes_on(self, stream: str, came_ms: int) -> bool:
        """Whether what comes now belongs to the last run."""
        if not self.runs or len(self.runs) >= MOST_RUNS:
            return bool(self.runs)
        is_short = came_ms - self._run_began_ms < RUN_MS or len(self.runs) >= MOST_RUNS // 2
        return bool(self.runs[-1][2] == stream and is_short)

    def _drop(self, count: int, why: bytes) -> None:
        first = not self.dropped
        self.dropped += count
        if first:
            self._keep("err", why)

    def pipe_ended(self) -> None:
        self._open_pipes -= 1
        if self._open_pipes == 0:
            self.closed.tell(None)

    def unshipped(self, most: int) -> list[tuple[str, int, bytes]]:
        """(stream, offset, bytes) of what was not taken for shipping yet; what no tail would hold is skipped."""
        with self._lock:
            out: list[tuple[str, int, bytes]] = []
            if self._forgotten:
                return out
            self.shipped = max(self.shipped, self.size - TAIL_BYTES)
            while self.shipped < self.size and len(out) < most:
                start, length, stream, _ = self.runs[bisect_right(self.runs, self.shipped, key=_start) - 1]
                count = min(start + length - self.shipped, CHUNK_BYTES)
                out.append((stream, self.shipped, self._spool.read(self.shipped, count)))
                self.shipped += count
            return out

    def ship_again(self, offset: int) -> None:
        """What was taken from there on did not arrive."""
        with self._lock:
            self.shipped = min(self.shipped, offset)

    def last(self, count: int) -> list[tuple[str, bytes]]:
        """(stream, bytes) of what came last, so many bytes at most."""
        with self._lock:
            if self._forgotten:
                return []
            at, out = max(0, self.size - count), list[tuple[str, bytes]]()
            for start, length, stream, _ in self.runs[max(0, bisect_right(self.runs, at, key=_start) - 1) :]:
                out.append((stream, self._spool.read(max(at, start), start + length - max(at, start))))
            return out

    def store(self, store: BlobStore) -> dict[str, Any]:
        """Puts the whole log and its index into the store; the record's entry."""
        import orjson

        with self._lock:
            spool = self._spool
            sha = (
                store.put_bytes(spool.read(0, spool.size))
                if spool.in_memory
                else store.put_file(Path(spool.path))[0]
            )
            index = b"".join(orjson.dumps(run) + b"\n" for run in self.runs)
            return {"sha256": sha, "size": self.size, "index_sha256": store.put_bytes(index)}

    def forget(self) -> None:
        with self._lock:
            self._forgotten = True
            self._spool.close()


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)


def _start(run: list[Any]) -> int:
    return int(run[0])
