"""Messages between worker and fork server: length-prefixed JSON over a unix stream socket, file descriptors beside it.

Both sides use this file. A message names how many descriptors belong to it; they travel with its first byte,
so they have arrived when the message is whole. It also names the sizes of the bytes that follow it as they are.
Nothing here blocks: what a full socket does not take is handed back to the caller.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_DESCRIPTORS = 8
NUMBER = struct.Struct("i")
ROOM = socket.CMSG_SPACE(MAX_DESCRIPTORS * NUMBER.size)
CHUNK_BYTES = 256 * 1024
# Plain numbers: an operation on enums is several calls.
AT_ONCE = int(socket.MSG_DONTWAIT)
AT_ONCE_AND_OURS = AT_ONCE | int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


_to_text = json.JSONEncoder(separators=(",", ":")).encode
# Without the look for spaces around, of which a message has none.
_from_text: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]


def _to_json(message: dict[str, Any]) -> bytes:
    return _to_text(message).encode("utf-8", "surrogatepass")


def from_json(data: bytes) -> Any:
    """What the other side has encoded."""
    try:
        return _from_text(data.decode("utf-8", "surrogatepass"), 0)[0]
    except StopIteration:
        raise BrokenWire("a message is not JSON") from None


# A text as JSON; what is made of these by hand needs no encoder, which is much for a message of three fields.
quoted = json.encoder.encode_basestring_ascii


class BrokenWire(Exception):
    """The other side sent something that is not a message."""


def framed(text: str) -> bytes:
    """The bytes of a message that is JSON already."""
    body = text.encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(body)) + body


def encode(
    message: dict[str, Any],
    blobs: Sequence[bytes] = (),
    to_json: Callable[[dict[str, Any]], bytes] = _to_json,
) -> bytes:
    """The bytes of one message; `to_json` is for a side that has a quicker way."""
    if blobs:
        message = dict(message, blobs=[len(blob) for blob in blobs])
    body = to_json(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise BrokenWire(f"a message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return b"".join([LENGTH.pack(len(body)), body, *blobs])


def send(link: socket.socket, data: bytes, descriptors: Sequence[int] = ()) -> int:
    """Sends what the socket takes now; the number of bytes taken. Descriptors go with the first of them."""
    ancillary = []
    if descriptors:
        numbers = struct.pack(f"{len(descriptors)}i", *descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)]
    try:
        return link.sendmsg([data], ancillary, AT_ONCE)
    except BlockingIOError:
        return 0


def receive(link: socket.socket) -> tuple[bytes, list[int]] | None:
    """What has arrived, with its descriptors; None when nothing has. Empty bytes mean that the other side is gone."""
    try:
        data, ancillary, _, _ = link.recvmsg(CHUNK_BYTES, ROOM, AT_ONCE_AND_OURS)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b"", []
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            count = len(payload) // NUMBER.size
            descriptors += struct.unpack_from(f"{count}i", payload)
    return data, descriptors


class Decoder:
    """Turns received bytes and descriptors back into messages; `parsed` is for a side that has a quicker way."""

    def __init__(self, parsed: Callable[[bytes], Any] = from_json) -> None:
        self._parsed = parsed
        # What came of a message that is not whole, and how many bytes it takes at least to go on.
        self._parts: list[bytes] = []
        self._missing_bytes = 0
        self._descriptors: deque[int] = deque()

    def descriptors(self) -> list[int]:
        """Those that have come with what is not whole yet."""
        return list(self._descriptors)

    def feed(self, data: bytes, descriptors: Sequence[int]) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Every message that is whole now with the descriptors that came with it; `blobs` are its bytes."""
        self._descriptors.extend(descriptors)
        self._missing_bytes -= len(data)
        if self._parts:
            self._parts.append(data)
            if self._missing_bytes > 0:
                return
            data = b"".join(self._parts)
        start, size = 0, len(data)
        while True:
            message, end = self._next(data, start, size)
            if message is None:
                break
            start = end
            yield message, self._take(message["descriptors"]) if "descriptors" in message else []
        self._parts = [data[start:]] if start < size else []
        self._missing_bytes = end - size

    def _take(self, count: int) -> list[int]:
        if count > len(self._descriptors):
            raise BrokenWire(f"a message names {count} descriptors that did not come")
        return [self._descriptors.popleft() for _ in range(count)]

    def _next(self, data: bytes, start: int, size: int) -> tuple[dict[str, Any] | None, int]:
        """The message at `start`, None where it is not whole; and where it ends, as far as that is known."""
        body = start + LENGTH.size
        if size < body:
            return None, body
        (length,) = LENGTH.unpack_from(data, start)
        if length > MAX_MESSAGE_BYTES:
            raise BrokenWire(f"a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        end = body + length
        if size < end:
            return None, end
        message = self._parsed(data[body:end])
        if not isinstance(message, dict):
            raise BrokenWire("a message is not an object")
        if "blobs" in message:
            sizes = message["blobs"]
            blobs, end = end, end + sum(sizes)
            if size < end:
                return None, end
            message["blobs"] = _cut(data, blobs, sizes)
        return message, end


def _cut(data: bytes, start: int, sizes: Sequence[int]) -> list[bytes]:
    blobs = []
    for size in sizes:
        blobs.append(data[start : start + size])
        start += size
    return blobs
