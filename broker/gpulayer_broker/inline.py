"""Bytes inside a job's record, which is JSON: base64, and compressed where that makes a small pickle smaller.

The pickle of a function by value is mostly the same words, whatever the function: they are the dictionary of the
compression. What is read may be anything: rubbish is a ValueError, and never grows to more than `MOST_BYTES`.
"""

from __future__ import annotations

import zlib
from binascii import a2b_base64, b2a_base64
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

# Below, a header would eat what is won; above, time is dearer than memory, and the store is near.
LEAST_BYTES = 96
MOST_BYTES = 4096
REMEMBERED = 256

# A part of the format: records that were compressed with it are read with it. The commonest stands last.
WORDS = (
    b"_make_skeleton_class\x94_class_setstate\x94_make_empty_cell\x94_make_cell\x94subimport\x94numpy\x94"
    b"annotations\x94self\x94value\x94float\x94str\x94list\x94dict\x94int\x94return\x94__builtins__\x94"
    b"\x80\x05\x95)\x02\x00\x00\x00\x00\x00\x00\x8c\x17cloudpickle.cloudpickle\x94\x8c\x0e_make_function\x94\x93\x94("
    b"h\x00\x8c\r_builtin_type\x94\x93\x94\x8c\x08CodeType\x94\x85\x94R\x94(K\x01K\x00K\x00K\x01K\x02J\x03\x00\x00\x01C\x06"
    b"\x97\x00|\x00S\x00\x94N\x85\x94)\x8c\x01x\x94\x85\x94\x8c\x0e<dynamic-code>\x94\x8c\x01f\x94h\x0eK\x01C\x07"
    b"\x80\x00\xd8\x0b\x11\x80M\x94C\x00\x94))t\x94R\x94}\x94(\x8c\x0b__package__\x94N\x8c\x08__name__\x94\x8c\x08__main__"
    b"\x94\x8c\x08__file__\x94\x8c\x03.py\x94uNNNt\x94R\x94h\x00\x8c\x12_function_setstate\x94\x93\x94h\x1b}\x94}\x94(h\x16"
    b"\x8c\x01f\x94\x8c\x0c__qualname__\x94\x8c\x01f\x94\x8c\x0f__annotations__\x94}\x94(h\n\x8c\x03int\x94\x8c\x06return"
    b"\x94h%u\x8c\x0e__kwdefaults__\x94N\x8c\x0c__defaults__\x94N\x8c\n__module__\x94h\x17\x8c\x07__doc__\x94N\x8c\x0b"
    b"__closure__\x94N\x8c\x17_cloudpickle_submodules\x94]\x94\x8c\x0b__globals__\x94}\x94u\x86\x94\x86R0."
)


def pack(data: bytes) -> dict[str, str]:
    """The bytes as a part of a record."""
    if LEAST_BYTES <= len(data) <= MOST_BYTES and (packed := _compressed(data)):
        return {"z": packed}
    return {"b64": _text(data)}


def written(data: bytes) -> bytes:
    """What `pack` gives, as JSON."""
    if len(data) < LEAST_BYTES:
        return b'{"b64":"%b"}' % b2a_base64(data, newline=False)
    ((name, text),) = pack(data).items()
    return b'{"%b":"%b"}' % (name.encode(), text.encode())


def unpack(raw: Mapping[str, Any]) -> bytes:
    """The bytes of such a part; ValueError, KeyError or TypeError where it is none."""
    if "z" in raw:
        return _expanded(raw["z"])
    return a2b_base64(raw["b64"], strict_mode=True)


# All calls of one function have the same bytes.
@lru_cache(REMEMBERED)
def _compressed(data: bytes) -> str:
    """Empty where nothing is won."""
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS, zdict=WORDS)
    packed = compressor.compress(data) + compressor.flush()
    return _text(packed) if len(packed) < len(data) else ""


@lru_cache(REMEMBERED)
def _expanded(text: str) -> bytes:
    expander = zlib.decompressobj(wbits=-zlib.MAX_WBITS, zdict=WORDS)
    try:
        data = expander.decompress(a2b_base64(text, strict_mode=True), MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"not compressed bytes: {error}") from None
    if not expander.eof or expander.unused_data:
        raise ValueError("compressed bytes that are cut off, or too many")
    return data


def _text(data: bytes) -> str:
    return b2a_base64(data, newline=False).decode()
