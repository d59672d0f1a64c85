"""The two pipes on which a job speaks to its worker: report (one frame) and progress (lines).

Reading never blocks, and what does not follow the form is dropped: a job can write into these pipes what it
likes.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Callable
from typing import Any

from gpulayer_worker.runner.report import LENGTH, PLAIN

from .job import Report

log = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 1024
MAX_FRAME_BYTES = 1024 * 1024
MAX_LINE_BYTES = 4096
PLAIN_BEFORE, PLAIN_AFTER = PLAIN.split(b"%d")


class Pipe:
    """A pipe whose reading end is ours; the writing end is handed to a job and then closed."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC) if hasattr(os, "pipe2") else os.pipe()
        os.set_blocking(self.reader, False)

    def close_writer(self) -> None:
        """Forgets our copy of the job's end."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Forgets both ends."""
        self.close_writer()
        if self.reader >= 0:
            os.close(self.reader)
            self.reader = -1

    def read(self) -> bool:
        """Takes what is there; False once it is known that no more can come."""
        while True:
            try:
                data = os.read(self.reader, CHUNK_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self.feed(data)
            if len(data) < CHUNK_BYTES:
                return True

    def feed(self, data: bytes) -> None:
        """What to do with bytes that came."""
        raise NotImplementedError


class ReportPipe(Pipe):
    """Collects the frame that the runner's `report.send` writes."""

    def __init__(self) -> None:
        super().__init__()
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Keeps the bytes, up to the size that a frame may have."""
        self._data += data[: MAX_FRAME_BYTES - len(self._data)]

    def report(self) -> Report | None:
        """The report; None while it is not whole, or when it is none."""
        if len(self._data) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._data)[0]
        if len(self._data) < end:
            return None
        try:
            header = parsed_header(self._data[LENGTH.size : end])
        except (ValueError, RecursionError):
            return None
        if not isinstance(header, dict):
            return None
        payload = self._data[end:]
        whole = header.get("file") or "size" not in header or len(payload) == header["size"]
        return Report(header, payload) if whole else None


class ProgressPipe(Pipe):
    """Hands each line of progress to a callback. A full pipe drops lines instead of holding up the job."""

    def __init__(self, callback: Callable[[dict[str, float]], None]) -> None:
        super().__init__()
        os.set_blocking(self.writer, False)
        self._callback = callback
        self._data = b""

    def feed(self, data: bytes) -> None:
        """Only the newest whole line counts: progress is where the job is, not where it was."""
        lines = (self._data + data).split(b"\n")
        self._data = lines.pop()[-MAX_LINE_BYTES:]
        for line in reversed(lines):
            progress = parsed_progress(line)
            if progress is not None:
                self._tell(progress)
                return

    def _tell(self, progress: dict[str, float]) -> None:
        try:
            self._callback(progress)
        except Exception:
            # It runs in the thread that watches over all jobs, which must go on.
            log.exception("a callback for progress failed")


def parsed_header(text: bytes) -> Any:
    """The header of a report. The commonest needs no decoder."""
    if text.startswith(PLAIN_BEFORE) and text.endswith(PLAIN_AFTER):
        size = text[len(PLAIN_BEFORE) : -len(PLAIN_AFTER)]
        if size.isdigit():
            return {"ok": True, "kind": "json", "size": int(size), "file": None}
    return json.loads(text)


def parsed_progress(line: bytes) -> dict[str, float] | None:
    """A line of progress; None when it is none."""
    try:
        message = json.loads(line)
        return {"done": float(message["done"]), "total": float(message["total"])}
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def own_copies(descriptors: list[int]) -> list[int]:
    """Duplicates that outlive the caller's closing of the originals."""
    return [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3) for descriptor in descriptors]
