"""Everything that one namespace holds, read at one instant: what the checkers and the explorer look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gpulayer_broker.connection import Link

_DUMP = """
local out = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1] .. '*')) do
  local kind, value = redis.call('TYPE', key).ok, nil
  if kind == 'hash' then value = redis.call('HGETALL', key)
  elseif kind == 'zset' then value = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  elseif kind == 'set' then value = redis.call('SMEMBERS', key)
  elseif kind == 'string' then value = redis.call('GET', key)
  elseif kind == 'list' then value = redis.call('LRANGE', key, 0, -1)
  elseif kind == 'stream' then
    local pending = redis.pcall('XPENDING', key, 'g', '-', '+', 1000000)
    value = {redis.call('XRANGE', key, '-', '+'), pending.err and {} or pending}
  end
  out[#out + 1] = {string.sub(key, #ARGV[1] + 1), kind, value}
end
return out
"""


@dataclass
class Stream:
    """Entries in order (id → fields), and who holds what: id → consumer."""

    entries: dict[str, dict[str, str]]
    pending: dict[str, str]


@dataclass
class Snapshot:
    """Keys by name, without the root, apart by type."""

    hashes: dict[str, dict[str, str]] = field(default_factory=dict)
    zsets: dict[str, dict[str, float]] = field(default_factory=dict)
    sets: dict[str, set[str]] = field(default_factory=dict)
    strings: dict[str, str] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)

    @property
    def jobs(self) -> dict[str, dict[str, str]]:
        return {job: j for job, j in under(self.hashes, "job:") if "/" not in job}

    @property
    def chunks(self) -> dict[str, dict[str, str]]:
        """Ranges of arrays that are out; of one that has ended only what answers a repeated report stays."""
        records = {job: j for job, j in under(self.hashes, "job:") if "/" in job}
        return {job: j for job, j in records.items() if j.get("state") == "running"}

    def job(self, job_id: str) -> dict[str, str]:
        return self.hashes.get(f"job:{job_id}", {})


def under(keys: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """(rest of the name, value) of each key that starts so."""
    return ((name[len(prefix) :], value) for name, value in keys.items() if name.startswith(prefix))


def read(link: Link, root: str) -> Snapshot:
    """The namespace now, in one call."""
    return parse(link.call(*command(root)))


def command(root: str) -> tuple[bytes | str | int, ...]:
    """For a pipeline: the call whose reply `parse` understands."""
    return ("EVAL", _DUMP, 0, root)


def parse(reply: Any) -> Snapshot:
    out = Snapshot()
    for name, kind, value in reply:
        key = _text(name)
        if kind == b"hash":
            out.hashes[key] = _pairs(value)
        elif kind == b"zset":
            out.zsets[key] = {k: float(v) for k, v in _pairs(value).items()}
        elif kind == b"set":
            out.sets[key] = {_text(v) for v in value}
        elif kind == b"list":
            out.lists[key] = [_text(v) for v in value]
        elif kind == b"stream":
            out.streams[key] = _stream(value)
        else:
            out.strings[key] = _text(value)
    return out


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _pairs(flat: list[bytes]) -> dict[str, str]:
    texts = [_text(v) for v in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _stream(value: Any) -> Stream:
    entries, pending = value
    return Stream(
        {_text(entry): _pairs(fields) for entry, fields in entries},
        {_text(p[0]): _text(p[1]) for p in pending},
    )
