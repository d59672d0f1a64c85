"""What a finished job gives its caller: the value, or the error that says why there is none.

What a worker sends is unpickled only where it is trusted: on this user's private set-up, or where the client was told
so. Elsewhere values travel as JSON and numpy arrays, built-in exceptions are rebuilt by name, and anything else is a
RemoteError with the remote traceback.
"""

from __future__ import annotations

import ast
import base64
import binascii
import builtins
import io
import json
import pickle
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gpulayer.session import Session
from gpulayer.slots import MISSING, Notice
from gpulayer_broker.errors import (
    BlobMissing,
    GpulayerError,
    JobCancelled,
    JobError,
    JobFailed,
    JobNotFound,
    JobTimedOut,
    NotAllowed,
    RemoteError,
    ResultNotPicklable,
    StoreError,
    WorkerLost,
)
from gpulayer_broker.items import ItemOutcome, read_outcomes
from gpulayer_broker.job import CANCELLED, SUCCEEDED, TIMED_OUT, JobRecord
from gpulayer_broker.log_lines import MOST_LINES, safe_line

# A longer key is left as it was told.
MOST_KEY = 1000
SIGNAL_EXIT = 128
# How an item that came to no end of its own is told: the error's type, its end reason, and what to say without a text.
_ENDS: dict[str, tuple[type[JobError], str, str]] = {
    "WorkerLost": (WorkerLost, "worker_lost", "its workers were lost"),
    "JobTimedOut": (JobTimedOut, "timeout", "it ran past its timeout"),
    "ResultNotPicklable": (ResultNotPicklable, "result_error", "its result cannot be pickled"),
    "ResultTooLarge": (ResultNotPicklable, "result_error", "its result is too large"),
    "CannotStart": (JobFailed, "cannot_start", "it could not be started"),
    "CannotLoad": (JobFailed, "cannot_start", "it could not be loaded"),
    "Signalled": (JobFailed, "signal", ""),
    "OutOfMemory": (JobFailed, "oom", "its memory was not enough"),
    "NoReport": (JobFailed, "user_error", "its process ended before it reported"),
    "Failed": (JobFailed, "", "it failed"),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """There is no value. The error is raised by whoever was asked for it: no line of ours then stands in between."""

    error: Exception


def value_of(session: Session, job_id: str, notice: Notice, *, trusted: bool) -> Any:
    """The job's value, or Failure."""
    if notice.state == MISSING:
        return Failure(JobNotFound(f"job {job_id} is no longer kept", job_id=job_id, value=job_id))
    if notice.state != SUCCEEDED:
        record = session.attempt(lambda queue: queue.record(job_id))
        if record.is_array:
            return array_values(session, record, trusted=trusted)
        return Failure(error_of(record, trusted=trusted))
    kind, data = notice.kind, notice.result
    if kind == "fetch":
        found, raw = session.attempt(lambda queue: queue.result(job_id))
        if raw is None:
            return _without_result(session, job_id, trusted=trusted)
        kind, data = found, raw
    return _stored(session, kind, data, job_id, trusted=trusted)


def _without_result(session: Session, job_id: str, *, trusted: bool) -> Any:
    """An array has a value of each item, a command none; a function's may be gone."""
    record = session.attempt(lambda queue: queue.record(job_id))
    if record.is_array:
        return array_values(session, record, trusted=trusted)
    if record.kind == "function" and record.result_kind not in ("", "none"):
        text = f"the result of job {job_id} is no longer kept: run it again"
        return Failure(BlobMissing(text, job_id=job_id))
    return None


def array_values(session: Session, record: JobRecord, *, trusted: bool) -> list[Any] | Failure:
    """The values of a finished array in the order of its items, or the first Failure."""
    outcomes: list[ItemOutcome | None] = [None] * record.count
    for start, page in session.attempt(lambda queue: queue.pages(record.id)).items():
        for number, outcome in read_outcomes(start, page):
            outcomes[number] = outcome
    values: list[Any] = []
    for number, known in enumerate(outcomes):
        if known is None:
            return Failure(item_missing(record, number))
        value = item_value(session, record.id, number, known, trusted=trusted)
        if isinstance(value, Failure):
            return value
        values.append(value)
    return values


def item_value(session: Session, array_id: str, number: int, outcome: ItemOutcome, *, trusted: bool) -> Any:
    """What one item of an array came to: its value, or Failure."""
    kind, data = outcome.kind, outcome.data
    if not outcome.ok:
        return Failure(item_error(array_id, number, data, trusted=trusted))
    if kind == "json":
        # Of ten thousand items this is the whole cost.
        return orjson.loads(data)
    return _stored(session, kind, data, array_id, trusted=trusted)


def item_error(array_id: str, number: int, error: bytes, *, trusted: bool) -> Exception:
    """The error of one item, by the rules of a job's."""
    told = _told(error)
    name, message = str(told.get("type") or ""), str(told.get("message") or "")
    where = f"item {number} of job {array_id}"
    if not told.get("traceback") and name in _ENDS:
        kind, reason, otherwise = _ENDS[name]
        if kind is JobFailed:
            return _failed(where, array_id, reason, {"message": message or otherwise, **told})
        text = f"{where}: {message or otherwise}"
        return kind(text, job_id=array_id, end_reason=reason, log_tail=tail_of(told))
    return _raised(told, f"in {where}", array_id, "user_error", trusted=trusted)


def item_missing(record: JobRecord, number: int) -> Exception:
    """Why an item of a finished array has no outcome."""
    where = f"item {number} of job {record.id}"
    if record.state == CANCELLED:
        return JobCancelled(f"{where} was cancelled", job_id=record.id, end_reason="cancelled")
    if record.end_reason in ("", "user_error"):
        return BlobMissing(f"the result of {where} is no longer kept: run it again", job_id=record.id)
    return error_of(record, trusted=False)


def _stored(session: Session, kind: str, data: bytes, job_id: str, *, trusted: bool) -> Any:
    """The value of what the record holds, or names in the store; or Failure."""
    if kind == "blob":
        named = json.loads(data)
        try:
            data = session.store.read_bytes(str(named["sha256"]), session.settings.result_bytes)
        except StoreError as error:
            return Failure(error)
        kind = str(named["kind"])
    return decoded(kind, data, job_id, trusted=trusted)


def _array_of(data: bytes) -> Any:
    from numpy.lib import format as npy

    return npy.read_array(io.BytesIO(data), allow_pickle=False)


_READERS: dict[str, Callable[[bytes], Any]] = {
    "": lambda data: None,
    "none": lambda data: None,
    # What a worker writes as JSON all readers read alike.
    "json": orjson.loads,
    "numpy": _array_of,
    "pickle": pickle.loads,
}


def decoded(kind: str, data: bytes, job_id: str, *, trusted: bool) -> Any:
    """The value that a worker wrote as `kind`, or Failure where it may not be read."""
    if kind not in _READERS:
        text = f"the result of job {job_id} is of kind {kind!r}: update gpulayer on this machine"
        return Failure(NotAllowed(text, job_id=job_id))
    if kind == "pickle" and not trusted:
        text = (
            f"the result of job {job_id} is a pickle, which could run code here: return JSON or numpy values, "
            "or use gl.Client(trust_workers=True)"
        )
        return Failure(NotAllowed(text, job_id=job_id))
    try:
        return _READERS[kind](data)
    except Exception as error:  # noqa: BLE001 - a value's own classes may raise anything, damaged bytes too
        error.add_note(f"the result of job {job_id} cannot be loaded here")
        return Failure(error)


def error_of(record: JobRecord, *, trusted: bool) -> Exception:
    """The error of a job that ended without success."""
    told = _told(record.error)
    message = str(told.get("message") or "")
    if record.state == CANCELLED:
        why = (
            ": a job that it was to run after did not succeed"
            if record.end_reason == "predecessor_failed"
            else ""
        )
        return JobCancelled(
            f"job {record.id} was cancelled{why}", job_id=record.id, end_reason=record.end_reason
        )
    if record.state == TIMED_OUT:
        text = f"job {record.id} timed out: {message or 'it ran past its timeout'}"
        return JobTimedOut(text, job_id=record.id, end_reason="timeout", log_tail=tail_of(told))
    if record.end_reason == "worker_lost":
        text = f"job {record.id} was given up: {message or 'its workers were lost'}"
        return WorkerLost(text, job_id=record.id, end_reason="worker_lost")
    if record.end_reason == "result_error":
        return ResultNotPicklable(f"job {record.id}: {message}", job_id=record.id, end_reason="result_error")
    if record.end_reason == "user_error" and record.kind == "function":
        where = f"in job {record.id} on worker {record.worker}"
        return _raised(told, where, record.id, record.end_reason, trusted=trusted)
    return _failed(f"job {record.id}", record.id, record.end_reason, told)


def _told(raw: bytes) -> Mapping[str, Any]:
    try:
        told = json.loads(raw) if raw else {}
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}


def _failed(where: str, job_id: str, end_reason: str, told: Mapping[str, Any]) -> JobError:
    code, number = told.get("exit_code"), told.get("signal")
    text = str(told.get("message") or "")
    if isinstance(number, int) and number:
        code = SIGNAL_EXIT + number
        text = text or f"ended by {_signal_name(number)}"
    elif isinstance(code, int):
        text = text or f"exited with code {code}"
    text = text or end_reason or "no reason was told"
    return JobFailed(
        f"{where} failed: {text}",
        job_id=job_id,
        end_reason=end_reason,
        exit_code=code if isinstance(code, int) and code else 1,
        log_tail=tail_of(told),
    )


def tail_of(told: Mapping[str, Any]) -> str:
    """The last lines of a dead job's log, as its record carries them; they are as foreign as the log itself."""
    tail = told.get("tail")
    return "\n".join(map(safe_line, tail.splitlines()[-MOST_LINES:])) if isinstance(tail, str) else ""


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _raised(told: Mapping[str, Any], where: str, job_id: str, end_reason: str, *, trusted: bool) -> Exception:
    """What the job's function raised, with the remote traceback as its note."""
    name, message = str(told.get("type") or "Exception"), str(told.get("message") or "")
    traceback = str(told.get("traceback") or "")
    error = _unpickled(told.get("pickle")) if trusted else _builtin(told, name, message)
    if error is None:
        tail = tail_of(told)
        error = RemoteError(name, message, traceback, job_id=job_id, end_reason=end_reason, log_tail=tail)
    if traceback:
        error.add_note(f"{where}:\n{traceback.rstrip()}")
    return error


def _unpickled(text: Any) -> Exception | None:
    """The exception itself; None where it is none, or needs what is not installed here."""
    if not isinstance(text, str) or not text:
        return None
    try:
        error = pickle.loads(base64.b85decode(text))
    except (
        binascii.Error,
        pickle.UnpicklingError,
        ImportError,
        AttributeError,
        TypeError,
        ValueError,
        EOFError,
    ):
        return None
    # SystemExit and its like would end the caller instead of telling of the job.
    return error if isinstance(error, Exception) else None


def _key(message: str) -> Any:
    """The key of a KeyError, whose message is how Python writes it; the message itself where that is no literal."""
    try:
        return ast.literal_eval(message) if len(message) <= MOST_KEY else message
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return message


def _builtin(told: Mapping[str, Any], name: str, message: str) -> Exception | None:
    known = getattr(builtins, name, None) if told.get("module", "builtins") == "builtins" else None
    if not (isinstance(known, type) and issubclass(known, Exception)):
        return None
    try:
        return known(_key(message) if known is KeyError else message)
    except TypeError:  # one that takes more than a message
        return None


def exit_code_of(error: BaseException) -> int:
    """The exit code that tells this error to a script."""
    return error.exit_code if isinstance(error, GpulayerError) else 1
