"""Reads what stands in a record of the queue without trusting it: what is no number is none, and nobody is kept from
seeing the other records by it."""

from __future__ import annotations

import json
from typing import Any

MOST = 2**53
# The end of the year 9999, after which no date can be written.
LAST_MS = 253_402_300_799_999


def whole(raw: bytes | str | None, most: int = MOST) -> int | None:
    """A number from 0 to `most`; None where there is none."""
    try:
        number = int(raw or b"")
    except ValueError:
        return None
    return number if 0 <= number <= most else None


def words(raw: bytes | None) -> str:
    """A text; what is no UTF-8 in it is marked as such."""
    return (raw or b"").decode("utf-8", "replace")


def document(raw: bytes | str | None) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        found = json.loads(raw or b"{}", parse_constant=_refused)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number that can be shown")
