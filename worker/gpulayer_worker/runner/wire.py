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
    """Turns received bytes and descriptors back into messages."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Sequence[int]) -> Iterator[tuple[dict[str, Any], list[int]]]:
        """Every message that is whole now with the descriptors that came with it; `blobs` are its bytes."""
        self._data += data
        self._descriptors.extend(descriptors)
        while True:
            message = self._next()
            if message is None:
                return
            count = int(message.get("descriptors", 0))
            if count > len(self._descriptors):
                raise BrokenWire(f"a message names {count} descriptors that did not come")
            yield message, [self._descriptors.popleft() for _ in range(count)]

    def _next(self) -> dict[str, Any] | None:
        if len(self._data) < LENGTH.size:
            return None
        (size,) = LENGTH.unpack_from(self._data)
        if size > MAX_MESSAGE_BYTES:
            raise BrokenWire(f"a message of {size} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        end = LENGTH.size + size
        if len(self._data) < end:
            return None
        try:
            message, _ = _from_text(self._data[LENGTH.size : end].decode("utf-8", "surrogatepass"), 0)
        except StopIteration:
            raise BrokenWire("a message is not JSON") from None
        if not isinstance(message, dict):
            raise BrokenWire("a message is not an object")
        if "blobs" in message:
            start, end = end, end + sum(message["blobs"])
            if len(self._data) < end:
                return None
            message["blobs"] = self._cut(start, message["blobs"])
        del self._data[:end]
        return message

    def _cut(self, start: int, sizes: Sequence[int]) -> list[bytes]:
        blobs = []
        for size in sizes:
            blobs.append(bytes(self._data[start : start + size]))
            start += size
        return blobs
