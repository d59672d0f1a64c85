"""The key-leak check: every key of a namespace is one that `keys.TABLE` names, of its type, and hangs on something.

A key with lifetime `ttl` carries an expiry; one that belongs to a job or worker has its owner in place; indexes of
what waits are empty when nothing does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from gpulayer_broker.connection import Link
from gpulayer_broker.keys import TABLE, KeyKind

_REGEXES = [(kind, kind.regex()) for kind in TABLE]


def leaks(link: Link, root: str) -> list[str]:
    """One line for each key that should not be there, or not so."""
    return [line for key in sorted(_keys(link, root)) if (line := _judge(link, root, key))]


def _keys(link: Link, root: str) -> Iterator[str]:
    cursor = b"0"
    while True:
        cursor, keys = link.call("SCAN", cursor, "MATCH", f"{root}*", "COUNT", 1000)
        yield from (key.decode() for key in keys)
        if cursor == b"0":
            return


def _kind_of(name: str) -> KeyKind | None:
    exact = [kind for kind, _ in _REGEXES if kind.pattern == name]
    matching = [kind for kind, regex in _REGEXES if regex.fullmatch(name)]
    return next(iter(exact + matching), None)


def _judge(link: Link, root: str, key: str) -> str | None:
    name = key[len(root) :]
    kind = _kind_of(name)
    if kind is None:
        return f"{name}: not in the table of keys"
    real = link.call("TYPE", key).decode()
    if real not in (kind.type, "none"):
        return f"{name}: is a {real}, the table says {kind.type}"
    if kind.lifetime == "ttl" and link.call("PTTL", key) == -1:
        return f"{name}: has no expiry"
    if kind.lifetime == "job":
        return _orphan(link, root, name)
    if kind.lifetime == "worker" and not link.call("ZSCORE", f"{root}workers", name.split(":", 1)[1]):
        return f"{name}: its worker is not known"
    return None


def _orphan(link: Link, root: str, name: str) -> str | None:
    found = re.fullmatch(r"(?:job|watchers|log|array|ranges|chunks|pages):([^:]+)(?::\d+:\d+)?", name)
    if found and not link.call("EXISTS", f"{root}job:{found[1]}"):
        return f"{name}: its job is gone"
    if found and name.startswith("job:") and not _indexed(link, root, found[1]):
        return f"{name}: in no index of its state"
    return None


def _indexed(link: Link, root: str, job_id: str) -> bool:
    state = link.call("HGET", f"{root}job:{job_id}", "state").decode()
    if "/" in job_id:  # a chunk of an array is listed there while it is out
        out = link.call("SISMEMBER", f"{root}chunks:{job_id.rpartition('/')[0]}", job_id)
        return bool(out or link.call("PTTL", f"{root}job:{job_id}") > 0)
    final = state not in ("queued", "scheduled", "running")
    listed = link.call("ZSCORE", f"{root}jobs:{state}", job_id) is not None
    return listed and (not final or link.call("ZSCORE", f"{root}jobs:final", job_id) is not None)
