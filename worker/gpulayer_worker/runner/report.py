"""What a job tells of its end: one frame on its report pipe, JSON header and payload.

Plain values travel as JSON, numpy arrays as npy bytes, the rest as pickle. A payload over 32 KiB goes to a
file beside the job and the frame names it, so that a frame fits into the pipe and a worker that stands still
does not hold up its jobs.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import files

LENGTH = struct.Struct("!I")
INLINE_BYTES = 32 * 1024
MESSAGE_CHARS = 4 * 1024
TRACEBACK_CHARS = 12 * 1024
KIND_CHARS = 400
MOST_KINDS = 32
EXACT_INTEGER = 2**53
JSON_DEPTH = 50
# The header of the commonest report, with the size of its payload.
PLAIN = b'{"ok":true,"kind":"json","size":%d,"file":null}'
FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


# An encoder of JSON is the longest step of a tiny job's report, and these need none.
SCALARS: dict[type, Callable[[Any], str]] = {
    int: int.__repr__,
    float: float.__repr__,
    str: json.encoder.encode_basestring_ascii,
    bool: lambda value: "true" if value else "false",
    type(None): lambda _: "null",
}


# By names of their own: in a forked child, to look one up elsewhere touches more pages than the call.
_pack_length, _write = LENGTH.pack, os.write


class ResultTooLarge(Exception):
    """A result is over its limit."""


class ResultNotWritten(Exception):
    """The file of a result cannot be written."""


class Payload:
    """A binary file object that keeps little in memory and spills the rest into the named file."""

    def __init__(self, path: str, limit_bytes: int | None) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._file: Any = io.BytesIO()
        self.size = 0
        self.spilled = False

    def write(self, data: Any) -> int:
        """Appends; ResultTooLarge beyond the limit."""
        count = memoryview(data).nbytes
        self.size += count
        if self._limit_bytes is not None and self.size > self._limit_bytes:
            raise ResultTooLarge(f"the result is larger than the limit of {self._limit_bytes} bytes")
        if not self.spilled and self.size > INLINE_BYTES:
            self._spill()
        try:
            self._file.write(data)
        except OSError as error:
            raise ResultNotWritten(
                f"the result cannot be written to {self._path}: {error.strerror}"
            ) from None
        return count

    def _spill(self) -> None:
        try:
            file = open(self._path, "wb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise ResultNotWritten(
                f"the result cannot be written to {self._path}: {error.strerror}"
            ) from None
        file.write(self._file.getvalue())
        self._file, self.spilled = file, True

    def close(self) -> bytes:
        """Finishes; the bytes that travel in the frame, none when they are in the file."""
        if self.spilled:
            try:
                self._file.close()
            except OSError as error:
                raise ResultNotWritten(
                    f"the result cannot be written to {self._path}: {error.strerror}"
                ) from None
            return b""
        return bytes(self._file.getvalue())

    def facts(self) -> dict[str, Any]:
        """How the header names this payload."""
        return {"size": self.size, "file": self._path if self.spilled else None}


def send(descriptor: int, header: dict[str, Any], payload: bytes = b"") -> None:
    """Writes the one frame of this job."""
    text = PLAIN % header["size"] if is_commonest(header) else _encoded(header)
    frame = _pack_length(len(text)) + text + payload
    while frame:
        frame = frame[_write(descriptor, frame) :]


def is_commonest(header: dict[str, Any]) -> bool:
    """Whether it is the report of a plain result that travels in the frame."""
    return header["ok"] and header.get("kind") == "json" and header["file"] is None


def _encoded(header: dict[str, Any]) -> bytes:
    return json.dumps(header, ensure_ascii=False).encode("utf-8", "backslashreplace")


# --- results ---


def is_plain(value: Any, depth: int = JSON_DEPTH) -> bool:
    """Whether JSON gives back exactly this value."""
    kind = type(value)
    if kind is str:
        return not any("\ud800" <= sign <= "\udfff" for sign in value) if not value.isascii() else True
    if kind is int:
        return -EXACT_INTEGER <= int(value) <= EXACT_INTEGER
    if kind is float:
        return math.isfinite(value)
    if depth == 0:
        return False
    if kind is list:
        return all(is_plain(item, depth - 1) for item in value)
    if kind is dict:
        return all(
            type(key) is str and is_plain(key) and is_plain(item, depth - 1) for key, item in value.items()
        )
    return value is None or kind is bool


def scalar(value: Any) -> bytes | None:
    """The JSON of a simple value that travels in the frame; None for any other."""
    form = SCALARS.get(type(value))
    if form is None or not is_plain(value):
        return None
    data = form(value).encode("ascii")
    return data if len(data) <= INLINE_BYTES else None


def is_plain_array(value: Any) -> bool:
    """Whether the value is a numpy array whose npy bytes say everything about it."""
    numpy = sys.modules.get("numpy")
    if numpy is None or type(value) is not numpy.ndarray:
        return False
    return value.dtype.kind in "?biufcSUmM" and value.dtype.metadata is None


def write_result(value: Any, payload: Payload, dump: Callable[[Any, Any], None]) -> str:
    """Writes a result in the safest form that keeps it whole; the name of the form."""
    if is_plain(value):
        payload.write(json.dumps(value, separators=(",", ":")).encode("ascii"))
        return "json"
    if is_plain_array(value):
        sys.modules["numpy"].lib.format.write_array(payload, value, allow_pickle=False)
        return "numpy"
    dump(value, payload)
    return "pickle"


# --- errors ---


def describe(error: BaseException) -> dict[str, Any]:
    """Type, message and traceback of an error, without the runner's own frames; never fails."""
    kind = type(error)
    return {
        "ok": False,
        "type": str(kind.__qualname__)[:200],
        "module": str(kind.__module__)[:200],
        "kinds": _kinds(kind),
        "message": _text(error),
        "traceback": _traceback(error),
    }


def _kinds(kind: type) -> list[str]:
    """The class and those that it derives from, with their modules, as far as they tell anything."""
    classes = [each for each in kind.__mro__ if each not in (BaseException, object)]
    return [f"{each.__module__}.{each.__qualname__}"[:KIND_CHARS] for each in classes[:MOST_KINDS]]


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as second:  # noqa: BLE001 - the first error is what matters
        return f"<its message cannot be shown: {type(second).__name__}>"
    return _cut(text, MESSAGE_CHARS)


def _traceback(error: BaseException) -> str:
    try:
        frames = _users_frames(error.__traceback__)
        told = traceback.TracebackException(type(error), error, frames)
        files.name_files(told, error, frames)
        return _cut("".join(told.format()), TRACEBACK_CHARS)
    except BaseException as second:  # noqa: BLE001 - as above
        return f"<its traceback cannot be shown: {type(second).__name__}>"


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(FOLDER):
        frames = frames.tb_next
    return frames


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - limit} characters left out ...\n{text[-half:]}"


def pickled(error: BaseException, dump: Callable[[Any, Any], None], payload: Payload) -> bool:
    """Writes the error itself, where its pickle gives it back."""
    buffer = io.BytesIO()
    try:
        dump(error, buffer)
        if type(pickle.loads(buffer.getvalue())) is not type(error):
            return False
        payload.write(buffer.getvalue())
        return True
    except BaseException:  # noqa: BLE001 - an error that cannot be pickled is told by its text alone
        return False
