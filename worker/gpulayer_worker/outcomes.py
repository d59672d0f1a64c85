"""What an attempt came to, by how its process ended and what it reported."""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpulayer_broker.consumer import Outcome, dumps, error_field
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.units import format_size, format_unlike
from gpulayer_worker.processes.cgroup import GroupFacts
from gpulayer_worker.processes.job import Ending, Report

RESULT_INLINE_BYTES = 1 << 20
FULL_DISK_BYTES = 1 << 20
# What a shell says of a command that was killed by SIGKILL.
KILLED_CODE = 128 + signal.SIGKILL
END_REASONS = {
    "ResultNotPicklable": "result_error",
    "ResultTooLarge": "result_error",
    "ResultNotWritten": "result_error",
    "CannotLoad": "cannot_start",
}
COMMAND_ENDED = "the command ended"
NO_REPORT = "the function's process ended"


def succeeded(kind: str, data: bytes) -> Outcome:
    return Outcome("succeeded", "", {"result": data, "result_kind": kind})


def failed(reason: str, kind: str, message: str, traceback: str = "", **more: Any) -> Outcome:
    return Outcome("failed", reason, {"error": error_field(kind, message, traceback, **more)})


def cannot_start(error: Exception) -> Outcome:
    return failed("cannot_start", type(error).__name__, str(error))


def timed_out(timeout_s: float) -> Outcome:
    text = f"it ran longer than its timeout of {timeout_s:g} s"
    return Outcome("timed_out", "timeout", {"error": error_field("JobTimedOut", text)})


def process_outcome(ending: Ending, what: str) -> Outcome:
    """By exit code or signal: of a command, or of a function that did not report."""
    end = ending.exit
    if end is None:
        return Outcome("released", "lost")
    if end.signal is not None:
        return failed("signal", "Signalled", f"{what} by signal {end.signal}", signal=end.signal)
    if end.code:
        return failed("user_error", "CommandFailed", f"{what} with exit code {end.code}", exit_code=end.code)
    if what == NO_REPORT:
        return failed("user_error", "NoReport", f"{what} before it reported, with exit code 0", exit_code=0)
    return succeeded("none", b"")


def out_of_memory(ending: Ending, facts: GroupFacts, limit_bytes: int) -> Outcome | None:
    """The outcome of a job that the kernel killed because memory was over; None for any other end."""
    end = ending.exit
    if end is None or not facts.oom_kills or not (end.signal == signal.SIGKILL or end.code == KILLED_CODE):
        return None
    if limit_bytes:
        text = f"it needed more than its memory of {format_size(limit_bytes)}: ask for more with memory="
    else:
        text = (
            "the machine's memory was over, and the kernel killed it: ask for memory= so that it has its own"
        )
    return failed("oom", "OutOfMemory", text, signal=int(signal.SIGKILL))


def over_disk(size_bytes: int, limit_bytes: int) -> Outcome:
    """The outcome of a job that was ended because its folder had grown beyond what it asked for, or filled the disk."""
    if not limit_bytes:
        text = (
            f"the worker's disk was full, and it had the most of it, {format_size(size_bytes)}: ask for disk="
        )
        return failed("disk", "DiskOver", text)
    size, limit = format_unlike(size_bytes, limit_bytes)
    return failed("disk", "DiskOver", f"its folder has {size}, its disk is {limit}: ask for more with disk=")


def report_outcome(report: Report, store: BlobStore) -> Outcome:
    """By what a function's process reported."""
    header = report.header
    if report.ok:
        return _result(str(header.get("kind", "json")), report.payload, header.get("file"), store)
    more: dict[str, Any] = {}
    if header.get("kind") == "pickle":
        import base64

        # Its file is the job's to remove: type, message and traceback are then told without it.
        with suppress(OSError):
            more["pickle"] = base64.b85encode(report.read_payload()).decode()
    kind = str(header.get("type", "Error"))
    reason = END_REASONS.get(kind, "user_error")
    outcome = failed(reason, kind, str(header.get("message", "")), str(header.get("traceback", "")), **more)
    outcome.kinds = tuple(map(str, header.get("kinds", ())))
    return outcome


def _result(kind: str, data: bytes, file: str | None, store: BlobStore) -> Outcome:
    if file is None:
        return succeeded(kind, data)
    path = Path(file)
    try:
        if path.stat().st_size <= RESULT_INLINE_BYTES:
            return succeeded(kind, path.read_bytes())
        sha, size = store.put_file(path)
    except (GpulayerError, OSError) as error:
        return failed("result_error", type(error).__name__, f"the result cannot be kept: {error}")
    return succeeded("blob", dumps({"sha256": sha, "size": size, "kind": kind}))


def tells_full_disk(outcome: Outcome, free_bytes: int) -> bool:
    """Whether a job failed because its disk was full: it says so itself, or there is hardly any room left."""
    told = bytes(str(outcome.fields.get("error", b"")), "utf-8")
    return free_bytes < FULL_DISK_BYTES or os.strerror(errno.ENOSPC).encode() in told
