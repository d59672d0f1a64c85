"""The items of an array and their outcomes, as bytes that are read without unpickling anything.

Items (each the pickle of one call's arguments) travel as one payload: a count, the lengths, the bytes. Outcomes travel
as pages: for a range of items, one after another, how it ended and what came of it. Both are length-prefixed and
checked, so that rubbish is an error and never more than that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpulayer_broker.errors import StoreError

MAGIC = b"gpi1"
_COUNT = struct.Struct("<4sI")
_OUTCOME = struct.Struct("<BBI")
KINDS = ("none", "json", "pickle", "numpy", "blob", "error")


class DamagedItems(StoreError):
    """Bytes that are no items, or no page of outcomes."""

    code = "damaged_items"


@dataclass(frozen=True, slots=True)
class ItemOutcome:
    """One item's end: its result as `kind` and bytes, or, where not `ok`, an error as a record keeps it (JSON)."""

    ok: bool
    kind: str
    data: bytes


def pack_items(items: Sequence[bytes]) -> bytes:
    """One payload of many items."""
    lengths = struct.pack(f"<{len(items)}I", *map(len, items))
    return b"".join((_COUNT.pack(MAGIC, len(items)), lengths, *items))


class Items:
    """A payload of items, each found by its number."""

    def __init__(self, data: bytes) -> None:
        try:
            magic, count = _COUNT.unpack_from(data)
            lengths = struct.unpack_from(f"<{count}I", data, _COUNT.size) if magic == MAGIC else ()
        except struct.error as error:
            raise DamagedItems(f"not the items of an array: {error}") from None
        start = _COUNT.size + 4 * len(lengths)
        if magic != MAGIC or start + sum(lengths) != len(data):
            raise DamagedItems("not the items of an array: their lengths do not add up")
        self._data = memoryview(data)
        self._ends = [start]
        for length in lengths:
            self._ends.append(self._ends[-1] + length)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> bytes:
        return bytes(self._data[self._ends[number] : self._ends[number + 1]])


def pack_outcomes(outcomes: Iterable[ItemOutcome]) -> bytes:
    """A page, as a worker commits it."""
    parts: list[bytes] = []
    for outcome in outcomes:
        parts.append(_OUTCOME.pack(outcome.ok, KINDS.index(outcome.kind), len(outcome.data)))
        parts.append(outcome.data)
    return b"".join(parts)


def read_outcomes(start: int, page: bytes) -> Iterator[tuple[int, ItemOutcome]]:
    """(item, outcome) of a page whose first item is `start`.

    A page that begins with `!` was written by the queue itself: all items up to a number failed for one reason.
    """
    if page[:1] == b"!":
        yield from _failed_together(start, page)
        return
    offset, number = 0, start
    while offset < len(page):
        try:
            ok, kind, size = _OUTCOME.unpack_from(page, offset)
            name = KINDS[kind]
        except (struct.error, IndexError):
            raise DamagedItems("not a page of outcomes") from None
        offset += _OUTCOME.size
        if offset + size > len(page):
            raise DamagedItems("a page of outcomes that is cut off")
        yield number, ItemOutcome(bool(ok), name, page[offset : offset + size])
        offset, number = offset + size, number + 1


def _failed_together(start: int, page: bytes) -> Iterator[tuple[int, ItemOutcome]]:
    try:
        stop, _reason, error = page[1:].split(b" ", 2)
        numbers = range(start, int(stop))
    except ValueError:
        raise DamagedItems("not a page of outcomes") from None
    for number in numbers:
        yield number, ItemOutcome(False, "error", error)
