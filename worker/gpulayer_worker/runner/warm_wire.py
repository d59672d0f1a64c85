"""What worker and warm process say to each other; both use this file.

A request is a length, a JSON head and the bytes that the head measures: one function at most, then the arguments of
each item. Descriptors come with it: the batch's stdout and stderr, and for a ride the pipe of its tokens. A reply is a
fixed head, a JSON header (none for the commonest report, a plain result) and a payload; each is written as its item
ends, so a process that dies has told of all items before.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")

LENGTH = struct.Struct("!I")
# Index, length of the header, length of the payload, processor time and wall time in microseconds, and for a ride how
# long its stdout and stderr are by then.
REPLY = struct.Struct("!IIIQQQQ")
# The index of replies that are about the batch and not about an item.
ABOUT_BATCH = 0xFFFFFFFF
MOST_FUNCTIONS = 32
DESCRIPTORS = 3
CHUNK_BYTES = 1 << 20
CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Recent(Generic[T]):
    """The things used last, by name. Two of them that are used alike hold the same names."""

    def __init__(self) -> None:
        self._things: OrderedDict[str, T] = OrderedDict()

    def find(self, name: str) -> T | None:
        """The thing, which is the newest now; None where it is not kept."""
        if name not in self._things:
            return None
        self._things.move_to_end(name)
        return self._things[name]

    def keep(self, name: str, thing: T) -> None:
        """Keeps it as the newest, and lets go of what was not used for longest."""
        self._things[name] = thing
        if len(self._things) > MOST_FUNCTIONS:
            self._things.popitem(last=False)


class Reply(NamedTuple):
    """One reply as it was received."""

    number: int
    header: dict[str, Any]
    payload: bytes
    cpu_s: float
    wall_s: float
    written: tuple[int, int] = (0, 0)


def plain_json(head: dict[str, Any]) -> bytes:
    """JSON of any text, Unicode or not."""
    return json.dumps(head).encode("utf-8", "surrogatepass")


def encode_request(
    head: dict[str, Any], parts: Sequence[bytes], dumps: Callable[[dict[str, Any]], bytes] = plain_json
) -> bytes:
    """The bytes of a request; `head` gets the sizes of its parts."""
    text = dumps(dict(head, sizes=[len(part) for part in parts]))
    return b"".join([LENGTH.pack(len(text)), text, *parts])


def send_request(link: socket.socket, data: bytes, descriptors: Sequence[int]) -> None:
    """Sends all of it, and copies of the descriptors with its first byte."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sent = link.sendmsg([data], ancillary)
    if sent < len(data):
        link.sendall(memoryview(data)[sent:])


def receive_request(link: socket.socket) -> tuple[dict[str, Any], list[memoryview], list[int]] | None:
    """The next request: head, parts, descriptors. None when the worker is gone."""
    buffer = bytearray()
    descriptors: list[int] = []
    if not _fill(link, buffer, LENGTH.size, descriptors):
        return None
    (size,) = LENGTH.unpack_from(buffer)
    start = LENGTH.size + size
    if not _fill(link, buffer, start, descriptors):
        return None
    head = json.loads(buffer[LENGTH.size : start].decode("utf-8", "surrogatepass"))
    if not _fill(link, buffer, start + sum(head["sizes"]), descriptors):
        return None
    view, parts = memoryview(buffer), []
    for size in head["sizes"]:
        parts.append(view[start : start + size])
        start += size
    return head, parts, descriptors


def _fill(link: socket.socket, buffer: bytearray, count: int, descriptors: list[int]) -> bool:
    """Reads until the buffer has so many bytes; False when no more come. One request is on its way at a time."""
    room = socket.CMSG_SPACE(DESCRIPTORS * array.array("i").itemsize)
    while len(buffer) < count:
        try:
            data, ancillary, _, _ = link.recvmsg(CHUNK_BYTES, room, CLOSE_ON_EXEC)
        except ConnectionError:
            return False
        if not data:
            return False
        buffer += data
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(payload[: len(payload) - len(payload) % found.itemsize])
                descriptors.extend(found)
    return True


def encode_reply(
    index: int,
    header: bytes,
    payload: bytes,
    cpu_s: float = 0.0,
    wall_s: float = 0.0,
    written: tuple[int, int] = (0, 0),
) -> bytes:
    """The bytes of a reply."""
    times = (max(0, int(cpu_s * 1e6)), max(0, int(wall_s * 1e6)))
    return REPLY.pack(index, len(header), len(payload), *times, *written) + header + payload


class ReplyDecoder:
    """Turns received bytes back into replies."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Reply]:
        """Every reply that is whole now."""
        self._data += data
        replies, at = [], 0
        while len(self._data) - at >= REPLY.size:
            index, header_size, payload_size, cpu_us, wall_us, *written = REPLY.unpack_from(self._data, at)
            start = at + REPLY.size
            end = start + header_size + payload_size
            if len(self._data) < end:
                break
            payload = bytes(self._data[start + header_size : end])
            if header_size:
                header = json.loads(self._data[start : start + header_size])
            else:
                header = {"ok": True, "kind": "json", "size": payload_size, "file": None}
            replies.append(
                Reply(index, header, payload, cpu_us / 1e6, wall_us / 1e6, (written[0], written[1]))
            )
            at = end
        del self._data[:at]
        return replies
