"""Messages between worker and fork server arrive whole and in order, however the socket cuts them."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import orjson
import pytest

from gpulayer_worker.processes.outbox import parsed
from gpulayer_worker.runner import wire

MESSAGES: list[tuple[dict[str, Any], list[bytes]]] = [
    ({"request": "start", "id": "a"}, [b"function", b""]),
    ({"request": "stats"}, []),
    ({"request": "start", "id": "b"}, [b"\x00" * 3000]),
    ({"request": "end", "id": "a", "grace_s": 0.5}, []),
]


def encoded() -> bytes:
    return b"".join(wire.encode(message, blobs) for message, blobs in MESSAGES)


@pytest.mark.parametrize("step", [1, 3, 7, 100, 3001, 1 << 20])
def test_messages_come_as_they_were_sent_however_they_are_cut(step: int) -> None:
    data = encoded()
    decoder = wire.Decoder()

    heard = [
        message
        for start in range(0, len(data), step)
        for message, _ in decoder.feed(data[start : start + step], [])
    ]

    assert [message.pop("blobs", []) for message in heard] == [blobs for _, blobs in MESSAGES]
    assert heard == [message for message, _ in MESSAGES]


def test_one_that_is_not_whole_yet_is_not_told() -> None:
    decoder = wire.Decoder()

    assert list(decoder.feed(encoded()[:-1], [])) != []
    assert list(decoder.feed(b"", [])) == []
    assert [message["request"] for message, _ in decoder.feed(encoded()[-1:], [])] == ["end"]


def test_descriptors_come_with_their_messages() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = os.pipe()
    decoder = wire.Decoder()
    heard: list[tuple[dict[str, Any], list[int]]] = []
    with ours, theirs:
        wire.send(ours, wire.encode({"number": 1, "descriptors": 2}), [reader, writer])
        wire.send(ours, wire.encode({"number": 2}))
        os.close(reader)
        os.close(writer)
        while received := wire.receive(theirs):
            heard += decoder.feed(*received)

    assert [message["number"] for message, _ in heard] == [1, 2]
    (new_reader, new_writer), none = heard[0][1], heard[1][1]
    os.write(new_writer, b"through")
    assert os.read(new_reader, 100) == b"through"
    assert none == []
    os.close(new_reader)
    os.close(new_writer)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (wire.LENGTH.pack(3) + b"no!", "is not JSON"),
        (wire.LENGTH.pack(2) + b"[]", "is not an object"),
        (wire.LENGTH.pack(wire.MAX_MESSAGE_BYTES + 1), "over the limit"),
        (wire.encode({"descriptors": 1}), "descriptors that did not come"),
    ],
)
@pytest.mark.parametrize("quick", [False, True])
def test_what_is_no_message_is_told_as_such(data: bytes, why: str, quick: bool) -> None:
    decoder = wire.Decoder(parsed) if quick else wire.Decoder()

    with pytest.raises(wire.BrokenWire, match=why):
        list(decoder.feed(data, []))


def test_names_of_any_bytes_come_through_both_decoders() -> None:
    message = {"cwd": os.fsdecode(b"/tmp/\xff")}
    data = wire.encode(message)

    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(data[wire.LENGTH.size :])
    assert [heard for heard, _ in wire.Decoder().feed(data, [])] == [message]
    assert [heard for heard, _ in wire.Decoder(parsed).feed(data, [])] == [message]


def test_both_decoders_read_the_same_numbers() -> None:
    text = json.dumps({"usage": [0.001234, 0.0, 17000], "wall_s": 1e-06, "signal": None}).encode()

    assert parsed(text) == wire.from_json(text)
