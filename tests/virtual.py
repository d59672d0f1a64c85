"""The queue's functions under a clock that a test sets: the same Lua, beside the real library under another name.

Only the body of `H.now` differs: it reads the time from a key. While `virtual_library` is open, the typed stubs call
these functions, and no time passes unless the test says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from gpulayer_broker import library
from gpulayer_broker.connection import Link

NAME = "gpulayer_virtual"
CLOCK = "gpulayer-virtual-clock"
START_MS = 1_000_000_000

_NOW = re.compile(r"function H\.now\(\).*?\nend\n", re.DOTALL)
_VIRTUAL = f"function H.now() return tonumber(redis.call('GET', '{CLOCK}')) end\n"


class Clock:
    """The time that the functions see, in milliseconds."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.set(START_MS)

    def set(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self._link.call("SET", CLOCK, now_ms)

    def advance(self, by_ms: int) -> None:
        self.set(self.now_ms + by_ms)


def virtual_source(patches: dict[str, str] | None = None) -> str:
    """The library with the clock replaced, and each text of `patches` that must occur in it."""
    parts = library.sources()
    parts["h_base.lua"], replaced = _NOW.subn(_VIRTUAL, parts["h_base.lua"])
    assert replaced == 1, "h_base.lua no longer defines H.now as one function"
    code = library.assemble(parts, NAME)
    for old, new in (patches or {}).items():
        assert old in code, f"the library no longer holds {old!r}"
        code = code.replace(old, new)
    return code


@contextmanager
def virtual_library(link: Link, patches: dict[str, str] | None = None) -> Iterator[Clock]:
    """Loads the patched library and points the stubs at it, for as long as the block lasts."""
    link.call("FUNCTION", "LOAD", "REPLACE", virtual_source(patches))
    real, library.NAME = library.NAME, NAME
    try:
        yield Clock(link)
    finally:
        library.NAME = real
        link.call("FUNCTION", "DELETE", NAME)
        link.call("DEL", CLOCK)
