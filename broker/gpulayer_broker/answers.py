"""What the Lua functions answer, each as a record of its own, and how it is read from the reply.

Times are milliseconds of the server's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gpulayer_broker.damage import words


class Submitted(NamedTuple):
    """outcome: added (id: empty for the job's own), existing, conflict, introduce (id: signature), full (id: limit) or
    missing (id: predecessor)."""

    outcome: str
    id: str


@dataclass(frozen=True)
class Matched:
    """outcome ok, too_many, or match: the other side's table has that version and must be judged first."""

    outcome: str
    version: str


class Grant(NamedTuple):
    """One attempt that this worker may start: the token is its fence. Grants of one `ride` share a slot."""

    id: str
    token: str
    lots: tuple[tuple[str, int], ...]
    attempt: int
    losses: int
    options: bytes
    spec: bytes
    signature: str
    owner: str
    queued_ms: int
    state: str
    cancelled: bool
    start: int = -1
    stop: int = -1
    ride: str = ""
    lane: str = ""

    @property
    def is_chunk(self) -> bool:
        """Whether it is a range [start, stop) of an array's items."""
        return self.start >= 0


class Claimed(NamedTuple):
    """The grants; status 'unknown' where the worker must register first, 'superseded' where it was replaced."""

    status: str
    grants: tuple[Grant, ...]

    @property
    def known(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Renewed:
    """Attempts that are no longer this worker's, attempts to cancel, and whether it keeps the clock."""

    status: str
    stale: tuple[str, ...] = ()
    cancelled: tuple[str, ...] = ()
    keeper: bool = False
    state: str = "online"

    @property
    def known(self) -> bool:
        return self.status == "ok"


class Committed(NamedTuple):
    """verdict ok, already, stale, cancelled, or introduce (with the signature; nothing was changed); of calls that
    ended together each its own."""

    verdict: str
    signature: str
    claimed: Claimed
    verdicts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ticked:
    """Milliseconds until something falls due, and how much did: `purged` records left, and `faded` results."""

    next_ms: int
    reaped: int
    rung: int
    purged: int
    faded: int


@dataclass(frozen=True)
class Page:
    """A page of a table: its version, the next cursor ('0' at the end), and name → canonical record."""

    version: str
    cursor: str
    rows: dict[str, bytes]


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def first(reply: Any) -> str:
    return text(reply[0])


def with_state(reply: Any) -> tuple[str, str]:
    return text(reply[0]), words(reply[1]) if len(reply) > 1 else ""


ADDED = Submitted("added", "")


def submitted(reply: Any) -> Submitted:
    if reply == b"added":
        return ADDED
    return Submitted(text(reply[0]), text(reply[1]))


def matched(reply: Any) -> Matched:
    return Matched(text(reply[0]), text(reply[1]) if len(reply) > 1 else "")


def page(reply: Any) -> Page:
    rows = {text(reply[i]): bytes(reply[i + 1]) for i in range(2, len(reply), 2)}
    return Page(text(reply[0]), text(reply[1]), rows)


def _lots(text: bytes) -> tuple[tuple[str, int], ...]:
    lots = (lot.rpartition("/") for lot in text.decode().split(",") if lot)
    return tuple((uuid, int(share)) for uuid, _, share in lots)


def _grant(r: Any) -> Grant:
    return Grant(
        id=text(r[0]),
        token=text(r[1]),
        lots=_lots(r[2]),
        attempt=int(r[3]),
        losses=int(r[4]),
        options=r[5],
        spec=r[6],
        signature=text(r[7]),
        owner=text(r[8]),
        queued_ms=int(r[9] or 0),
        state=text(r[10]),
        cancelled=bool(r[11]),
        start=int(r[12]),
        stop=int(r[13]),
        ride=text(r[14]),
        lane=text(r[15]),
    )


def claimed(status: Any, grants: Any) -> Claimed:
    return Claimed(text(status), tuple(_grant(g) for g in grants))


def renewed(r: Any) -> Renewed:
    if r[0] != b"ok":
        return Renewed(text(r[0]))
    return Renewed("ok", tuple(map(text, r[1])), tuple(map(text, r[2])), r[3] == b"1", text(r[4]))


def committed(r: Any) -> Committed:
    if r[0] == b"introduce":
        return Committed("introduce", text(r[1]), Claimed("ok", ()))
    return Committed(text(r[0]), "", claimed(r[2] if len(r) > 2 else b"ok", r[1]))


def committed_calls(r: Any) -> Committed:
    next_ones = claimed(r[2] if len(r) > 2 else b"ok", r[1])
    return Committed("ok", "", next_ones, tuple(map(text, r[0])))


def states(r: Any) -> dict[str, str]:
    return {text(r[i]): text(r[i + 1]) for i in range(0, len(r), 2)}
