"""The key-leak check: every key of a namespace is one that `keys.TABLE` names, of its type, and hangs on something.

A key with lifetime `ttl` carries an expiry; one that belongs to a job, worker, class, signature or machine has its
owner in place; what an index lists is there. What is of the right kind and wrong in its content: `tests/checker.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from gpulayer_broker.connection import Link
from gpulayer_broker.keys import TABLE, KeyKind
from tests.support import PATIENCE_S

_KINDS = {kind.pattern: kind for kind in TABLE}
_REGEXES = [(kind.pattern.partition(":")[0], kind.regex(), kind) for kind in TABLE]
_OF_A_JOB = re.compile(r"(?:job|watchers|after|log|array|ranges|chunks|pages):([^:]+)(?::\d+:\d+)?")
_LISTS_JOBS = re.compile(
    r"jobs:\w+|dead:.+|(?:after|key|permits|running):[^:]+|expiring|leases|delayed|releasing|idem:.+"
)
_LISTS_WORKERS = re.compile(r"(?:idle|siblings):[^:]+|room|rung|rungsig|workers")
_LISTS_SIGNATURES = re.compile(r"fits:[^:]+|sigseen|sigjobs")
_LISTS_CLASSES = re.compile(r"classes:[^:]+|classseen|idleclasses")


def leaks(link: Link, root: str) -> list[str]:
    """One line for each key that should not be there, or not so."""
    return Leaks(link, root).found()


class Leaks:
    """One look at a namespace in which nobody works."""

    def __init__(self, link: Link, root: str) -> None:
        self._link, self._root = link, root
        names = sorted({key.decode()[len(root) :] for key in self._scan()})
        types = self._each("TYPE", names)
        self._types = {
            name: real.decode() for name, real in zip(names, types, strict=True) if real != b"none"
        }
        self._signatures = self._fields("signatures")
        self._classes = self._fields("classcaps")
        # Tests judge by hand for a class of which no worker has come yet.
        self._classes_came = "classes_version" in self._types
        self._members = {name: self._read(name) for name in self._types if _lists(name)}

    def found(self) -> list[str]:
        found = [line for name in self._types for line in self._judge(name)]
        return [*found, *self._lost_jobs(), *self._half_matched()]

    def _scan(self) -> Iterator[bytes]:
        cursor = b"0"
        while True:
            cursor, keys = self._link.call("SCAN", cursor, "MATCH", f"{self._root}*", "COUNT", 1000)
            yield from keys
            if cursor == b"0":
                return

    def _each(self, command: str, names: list[str], *more: str) -> list[Any]:
        commands = [(command, self._root + name, *more) for name in names]
        parts = (commands[start : start + 10_000] for start in range(0, len(commands), 10_000))
        return [reply for part in parts for reply in self._link.pipeline(part, timeout_s=PATIENCE_S)]

    def _fields(self, name: str) -> set[str]:
        return {field.decode() for field in self._link.call("HKEYS", self._root + name)}

    def _judge(self, name: str) -> Iterator[str]:
        kind = _kind_of(name)
        if kind is None:
            yield f"{name}: not in the table of keys"
        elif self._types[name] != kind.type:
            yield f"{name}: is a {self._types[name]}, the table says {kind.type}"
        else:
            if kind.lifetime == "ttl" and self._link.call("PTTL", self._root + name) == -1:
                yield f"{name}: has no expiry"
            yield from self._owner(name, kind)
            yield from self._listed(name)

    def _owner(self, name: str, kind: KeyKind) -> Iterator[str]:
        """Why the key hangs on nothing."""
        owner = name.partition(":")[2]
        if kind.lifetime == "worker" and f"worker:{owner}" not in self._types:
            yield f"{name}: its worker is not known"
        if kind.lifetime == "class" and self._classes_came and owner not in self._classes:
            yield f"{name}: its class is not known"
        if kind.lifetime == "signature" and owner not in self._signatures:
            yield f"{name}: its signature is not known"
        found = _OF_A_JOB.fullmatch(name)
        if found and f"job:{found[1]}" not in self._types:
            yield f"{name}: its job is gone"

    def _listed(self, name: str) -> Iterator[str]:
        """What an index lists and is not there."""
        known: set[str] | None = None
        if _LISTS_JOBS.fullmatch(name):
            known = set(self._under("job:"))
        elif _LISTS_WORKERS.fullmatch(name):
            known = set(self._under("worker:"))
        elif _LISTS_SIGNATURES.fullmatch(name):
            known = self._signatures
        elif _LISTS_CLASSES.fullmatch(name) and self._classes_came:
            known = self._classes
        if known is not None:
            gone = self._members[name] - known - {""}  # of `rungsig`: no worker, an earmark is there
            yield from (f"{name}: lists {member}, which is gone" for member in sorted(gone)[:3])

    def _half_matched(self) -> Iterator[str]:
        """A match that one of its two tables knows alone: who claims finds the job, and nobody is rung for it."""
        fits = {(each, sig) for each in self._under("fits:") for sig in self._members[f"fits:{each}"]}
        classes = {(each, sig) for sig in self._under("classes:") for each in self._members[f"classes:{sig}"]}
        yield from (f"{sig} and class {each} are matched by halves" for each, sig in sorted(fits ^ classes))

    def _lost_jobs(self) -> Iterator[str]:
        """Records that no index leads to."""
        jobs = self._under("job:")
        states = self._each("HGET", [f"job:{job}" for job in jobs], "state")
        for job, state in zip(jobs, states, strict=True):
            if self._types[f"job:{job}"] == "hash" and not self._indexed(job, state.decode()):
                yield f"job:{job}: in no index of its state"

    def _indexed(self, job: str, state: str) -> bool:
        if "/" in job:  # a chunk of an array is listed there while it is out
            out = job in self._read(f"chunks:{job.rpartition('/')[0]}")
            return bool(out or self._link.call("PTTL", f"{self._root}job:{job}") > 0)
        final = state not in ("queued", "scheduled", "running")
        listed = job in self._members.get(f"jobs:{state}", ())
        return listed and (not final or job in self._members.get("jobs:final", ()))

    def _under(self, prefix: str) -> list[str]:
        return [name[len(prefix) :] for name in self._types if name.startswith(prefix)]

    def _read(self, name: str) -> set[str]:
        """The members of an index; the jobs that an idempotency key names."""
        key, kind = self._root + name, self._types.get(name, "set")
        if kind == "string":
            return {self._link.call("GET", key).decode().split(" ")[0]}
        whole = {"zset": ("ZRANGE", key, 0, -1), "set": ("SMEMBERS", key), "hash": ("HKEYS", key)}
        return {member.decode() for member in self._link.call(*whole[kind])} if kind in whole else set()


def _lists(name: str) -> bool:
    indexes = (_LISTS_JOBS, _LISTS_WORKERS, _LISTS_SIGNATURES, _LISTS_CLASSES)
    return any(index.fullmatch(name) for index in indexes)


def _kind_of(name: str) -> KeyKind | None:
    head = name.partition(":")[0]
    matching = (kind for first, regex, kind in _REGEXES if first == head and regex.fullmatch(name))
    return _KINDS.get(name) or next(matching, None)
