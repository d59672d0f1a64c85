"""Jobs and maps among the arguments of a call: their results are handed over by the queue, when they are there.

The call waits until all of them have succeeded, and the worker that runs it fetches what they returned. So a pipeline
and the callback of a map need nobody who waits in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpulayer.options import Plan
from gpulayer.payload import ATOMS
from gpulayer.targets import Target
from gpulayer_broker.given import Given

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Handle(ABC):
    """What stands for a value that may not be there yet: a job, or a map."""

    __slots__ = ()

    @abstractmethod
    def _given(self, place: int | str, target: Target) -> Given:
        """What is to stand at this place of a call on this target; UsageError for what cannot be handed over."""


def taken_out(target: Target, call: Arguments) -> tuple[Arguments, tuple[Given, ...]]:
    """The call with nothing where a job or a map stood, and what is to stand there."""
    args, kwargs = call
    if ATOMS.issuperset(map(type, args)) and ATOMS.issuperset(map(type, kwargs.values())):
        return call, ()
    everywhere: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    given = tuple(value._given(place, target) for place, value in everywhere if isinstance(value, Handle))
    if not given:
        return call, ()
    places = {each.place for each in given}
    left = tuple(None if number in places else value for number, value in enumerate(args))
    return (left, {name: None if name in places else value for name, value in kwargs.items()}), given


def waiting_for(plan: Plan, given: tuple[Given, ...]) -> Plan:
    """The plan, begun after all that is given."""
    return replace(plan, after=tuple(dict.fromkeys((*plan.after, *(each.job for each in given)))))
