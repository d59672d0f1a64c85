"""The queue's functions under a clock and draws that a test sets: the same Lua, under another name beside the library.

Three things differ. `H.now` reads the time from a key, and so does what tells an event's: no time passes unless the
test says so. A key that ends at some time ends by that clock. Where the order of a set's members is the server's
affair (SRANDMEMBER, SMEMBERS), it is shuffled by a seed, so that every order that some server may choose comes up and
one seed gives the same order on every server; or it is the order of their names. The typed stubs call these functions
while `virtual_library` is open.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from gpulayer_broker import library
from gpulayer_broker.connection import Link

NAME = "gpulayer_virtual"
CLOCK, DRAWS, ENDS = "gpulayer-virtual-clock", "gpulayer-virtual-draws", "gpulayer-virtual-ends"
START_MS = 1_000_000_000

_NOW = re.compile(r"function H\.now\(\).*?\nend\n", re.DOTALL)
_TOLD_AT = re.compile(r"function H\.told_at\(entry\).*?\nend\n", re.DOTALL)
_VIRTUAL = f"""
function H.now()
  local now = tonumber(redis.call('GET', '{CLOCK}'))
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', '{ENDS}', '-inf', now)) do
    redis.call('DEL', key)
    redis.call('ZREM', '{ENDS}', key)
  end
  return now
end
function H.told_at() return H.now() end
function H.ends_at(key, at) redis.call('ZADD', '{ENDS}', at, key) end
"""
_END = "redis.call('PEXPIREAT', "
_DRAW = re.compile(r"redis\.call\('(?:SRANDMEMBER|SMEMBERS)', ")
_DRAWN = """
function H.drawn(key, most)
  local all, state = redis.call('SMEMBERS', key), tonumber(redis.call('GET', '{DRAWS}') or '1')
  table.sort(all)
  for last = state == 0 and 1 or #all, 2, -1 do
    state = state * 16807 % 2147483647
    local other = state % last + 1
    all[last], all[other] = all[other], all[last]
  end
  redis.call('SET', '{DRAWS}', string.format('%d', state))
  while most and #all > most do table.remove(all) end
  return all
end
""".replace("{DRAWS}", DRAWS)


class Clock:
    """The time that the functions see, in milliseconds."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.set(START_MS)

    def set(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self._link.call("SET", CLOCK, now_ms)

    def draw_from(self, seed: int) -> None:
        """From now on the orders of sets are those of this seed."""
        self._link.call("SET", DRAWS, seed + 1)

    def draw_in_order(self) -> None:
        """From now on every set gives its members in the order of their names."""
        self._link.call("SET", DRAWS, 0)

    def advance(self, by_ms: int) -> None:
        self.set(self.now_ms + by_ms)


def virtual_source(patches: dict[str, str] | None = None) -> str:
    """The library with the clock replaced, and each text of `patches` that must occur in it."""
    parts = library.sources()
    parts["h_base.lua"], replaced = _NOW.subn(_VIRTUAL, parts["h_base.lua"])
    parts["h_base.lua"], told = _TOLD_AT.subn("", parts["h_base.lua"])
    assert (replaced, told) == (1, 1), "h_base.lua no longer defines H.now and H.told_at as one function each"
    parts = {name: _DRAW.sub("H.drawn(", text.replace(_END, "H.ends_at(")) for name, text in parts.items()}
    parts["h_base.lua"] += _DRAWN
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
        link.call("DEL", CLOCK, DRAWS, ENDS)
