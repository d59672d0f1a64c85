"""Puts what other jobs returned among the arguments of a call.

The worker has read these results and written them to one file: a length, a JSON head, and the results' bytes.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Sequence
from typing import Any

LENGTH = struct.Struct("!I")


def fill(path: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, each that is another job's result in its place."""
    filled, named = list(arguments), dict(keywords)
    with open(path, "rb") as file:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        for each in json.loads(file.read(length).decode()):
            values = [_value(kind, file.read(size)) for kind, size in each["values"]]
            value = values if each["many"] else values[0]
            if isinstance(each["at"], str):
                named[each["at"]] = value
            else:
                filled[each["at"]] = value
    return filled, named


def _value(kind: str, data: bytes) -> Any:
    if kind in ("", "none"):
        return None
    if kind == "json":
        return json.loads(data.decode())
    if kind == "numpy":
        from numpy.lib import format as npy

        return npy.read_array(io.BytesIO(data), allow_pickle=False)
    return pickle.loads(data)
