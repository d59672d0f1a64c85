"""Sizes and durations as people write them, and as GPUlayer shows them.

In a request `GB` is 10^9 bytes and `GiB` 2^30, so that "24GB" fits the card that is sold as 24 GB; a bare
number is bytes, or seconds. On display sizes are divided by 2^30 and written "GB", as vendors do. What
cannot be read is a `BadSize` that names the value and gives examples.
"""

from __future__ import annotations

import re

from gpulayer_broker.errors import BadSize

KIB = 2**10
MIB = 2**20
GIB = 2**30

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2**40,
}
_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]{1,20})(?:\.([0-9]{1,20}))?\s*([A-Za-z]*)")
_DURATION_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,12})?)\s*(ms|[smhd])\s*")
_SECONDS = re.compile(r"[0-9]{1,12}(?:\.[0-9]{1,12})?")

# The queue's functions count in doubles and whole MiB; this bound keeps every amount exact.
_LARGEST_SIZE_BYTES = 2**60
_LONGEST_S = 10 * 365 * 86400.0


def parse_size(value: str | int) -> int:
    """The bytes that a size means: 24GB, 24GiB, 1.5TB, 512MiB, or a bare number of bytes."""
    size_bytes = _size_bytes(value)
    if size_bytes is None or not 0 <= size_bytes <= _LARGEST_SIZE_BYTES:
        raise BadSize(
            f"{shown(value)} is not a size: write 24GB (10^9 bytes), 24GiB (2^30), 512MB or bare bytes",
            value=value,
        )
    return size_bytes


def _size_bytes(value: str | int) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return None
    whole, fraction, unit = match[1], match[2] or "", match[3].lower()
    if unit not in _SIZE_UNITS:
        return None
    # Whole numbers all the way, so that no size is a byte short of what was written.
    divisor: int = 10 ** len(fraction)
    return -(-int(whole + fraction) * _SIZE_UNITS[unit] // divisor)


def parse_duration(value: str | int | float) -> float:
    """The seconds that a duration means: 90, 90s, 5m, 1h30m, 2d, 500ms."""
    seconds = _seconds(value)
    if seconds is None or not 0 <= seconds <= _LONGEST_S:
        raise BadSize(
            f"{shown(value)} is not a duration: write 90s, 5m, 1h30m, 2d or a number of seconds",
            value=value,
        )
    return seconds


def _seconds(value: str | int | float) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) <= _LONGEST_S else None
    if not isinstance(value, str):
        return None
    text = value.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    return _sum_of_parts(text)


def _sum_of_parts(text: str) -> float | None:
    """The parts' sum, from the larger unit to the smaller, each unit once."""
    at, total_s, last = 0, 0.0, float("inf")
    while match := _DURATION_PART.match(text, at):
        unit_s = _DURATION_UNITS[match[2]]
        if unit_s >= last:
            return None
        at, total_s, last = match.end(), total_s + float(match[1]) * unit_s, unit_s
    return total_s if text and at == len(text) else None


def shown(value: object) -> str:
    """A value for a line of text: quoted, and short."""
    text = str(value)
    return f"'{text}'" if len(text) <= 60 else f"'{text[:57]}…'"


def format_size(size_bytes: int, digits: int = 1) -> str:
    """The size for people: 15.0 GB, 300.0 MB, 1.5 kB, 12 B; never more than GB, to compare at sight."""
    for unit, name in ((GIB, "GB"), (MIB, "MB"), (KIB, "kB")):
        # Half of the last digit shown, so that 1023.97 MB is written as the 1.0 GB that it rounds to.
        if size_bytes >= unit - unit * 0.5 / 10**digits / 1024:
            return f"{size_bytes / unit:.{digits}f} {name}"
    return f"{size_bytes} B"


def format_unlike(one_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Two different sizes for people, with the digits that tell them apart: 24.00 and 23.99 GB."""
    for digits in (1, 2, 3):
        one, other = format_size(one_bytes, digits), format_size(other_bytes, digits)
        if one != other:
            return one, other
    return f"{one_bytes} B", f"{other_bytes} B"


def format_duration(seconds: float) -> str:
    """The duration for people, in one unit: 40 s, 5 min, 3 h, 4 days."""
    whole_s = max(0, int(seconds))
    for unit_s, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if whole_s >= 2 * unit_s:
            return f"{whole_s // unit_s} {name}"
    return f"{whole_s} s"


def mib_up(size_bytes: int) -> int:
    """Whole MiB that hold so many bytes."""
    return -(-size_bytes // MIB)
