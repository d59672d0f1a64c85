"""Jobs and maps among the arguments of a call: their results are handed over by the queue, when they are there.

The call waits until all of them have succeeded, and the worker that runs it fetches what they returned. So a pipeline
and the callback of a map need nobody who waits in between.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpulayer.groups import is_group
from gpulayer.handle import Job
from gpulayer.options import Plan
from gpulayer_broker.errors import UsageError
from gpulayer_broker.given import Given

if TYPE_CHECKING:
    from gpulayer.mapping import MapResult
    from gpulayer.session import Session

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def taken_out(session: Session, call: Arguments) -> tuple[Arguments, tuple[Given, ...]]:
    """The call with nothing where a job or a map stood, and what is to stand there."""
    args, kwargs = call
    everywhere: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    places = [(place, value) for place, value in everywhere if _is_handle(value)]
    if not places:
        return call, ()
    given = tuple(_given(session, place, value) for place, value in places)
    numbers, names = {each.place for each in given}, {each.place for each in given}
    left = tuple(None if number in numbers else value for number, value in enumerate(args))
    return (left, {name: None if name in names else value for name, value in kwargs.items()}), given


def waiting_for(plan: Plan, given: tuple[Given, ...]) -> Plan:
    """The plan, begun after all that is given."""
    return replace(plan, after=tuple(dict.fromkeys((*plan.after, *(each.job for each in given)))))


def _is_handle(value: Any) -> bool:
    # Who has the result of a map has loaded its module.
    mapping = sys.modules.get("gpulayer.mapping")
    return isinstance(value, Job) or (mapping is not None and isinstance(value, mapping.MapResult))


def _given(session: Session, place: int | str, value: Job[Any] | MapResult[Any]) -> Given:
    if value._client._session.target != session.target:
        raise UsageError(f"{value!r} is of another target: give its result() instead")
    if isinstance(value, Job):
        return Given(place, value.id)
    ids = value.ids
    if len(ids) != 1 or not value._sized:
        raise UsageError(
            "only the whole result of one map with a length can be an argument: give its results()"
        )
    return Given(place, ids[0], many=True, size=len(value) if is_group(ids[0]) else 0)
