"""The state machine, as it was seen: each event of a namespace is a move that `job.TRANSITIONS` names."""

from __future__ import annotations

from collections.abc import Iterable

from gpulayer_broker.connection import Link
from gpulayer_broker.job import TRANSITIONS

MOVES = {(t.source, t.target) for t in TRANSITIONS}


def strange_moves(link: Link, root: str) -> list[str]:
    """One line for each event that is no move of the table. The oldest events may be gone: the stream has a bound."""
    entries = (fields for _, fields in link.call("XRANGE", f"{root}events", "-", "+"))
    events = (dict(zip(fields[::2], fields[1::2], strict=True)) for fields in entries)
    return strange((event[b"job"].decode(), event[b"state"].decode()) for event in events)


def strange(events: Iterable[tuple[str, str]]) -> list[str]:
    """Of jobs and the states that they came to, in order."""
    before: dict[str, str] = {}
    found = []
    for job, state in events:
        if job in before and (before[job], state) not in MOVES:
            found.append(f"{job}: {before[job]} → {state}")
        before[job] = state
    return found
