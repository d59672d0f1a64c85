"""Bytes inside a record: they come back as they were, small pickles get smaller, rubbish is refused and never grows."""

from __future__ import annotations

import zlib
from binascii import b2a_base64
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker import inline
from gpulayer_broker.spec import Payload, UndecodableSpec, decode_job


def raw_deflate(data: bytes) -> str:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS, zdict=inline.WORDS)
    return b2a_base64(compressor.compress(data) + compressor.flush(), newline=False).decode()


@given(st.binary(max_size=2 * inline.MOST_BYTES))
def test_any_bytes_come_back_as_they_were(data: bytes) -> None:
    payload = Payload(data, "", len(data))

    assert Payload.decode(payload.encode()) == payload


def test_the_pickle_of_a_function_takes_less_than_half_of_its_bytes_in_the_record() -> None:
    def area(width: float, height: float) -> float:
        return width * height

    data = cloudpickle.dumps(area)

    assert len(inline.pack(data)["z"]) < len(data) / 2


def test_what_compression_does_not_shorten_stays_as_it_is() -> None:
    noise = bytes((n * n * 167 + n * 91) >> 5 & 0xFF for n in range(inline.LEAST_BYTES))

    assert set(inline.pack(noise)) == {"b64"}


@pytest.mark.parametrize(
    "raw",
    [
        {"z": raw_deflate(b"x" * (inline.MOST_BYTES + 1))},
        {"z": raw_deflate(b"some bytes that are long enough to be cut")[:-8]},
        {"z": "no base64!"},
        {"z": b2a_base64(b"\xff\xfe rubbish", newline=False).decode()},
        {"b64": "no base64!"},
        {"b64": 7},
        {"z": None},
        {},
    ],
    ids=["grows", "cut", "no base64", "no deflate", "plain no base64", "number", "null", "nothing"],
)
def test_rubbish_is_an_undecodable_record(raw: dict[str, Any]) -> None:
    job = {"v": 1, "kind": "function", "call": {"function": raw, "arguments": raw}}

    with pytest.raises(UndecodableSpec):
        decode_job(job)
