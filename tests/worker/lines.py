"""Calls of one function in line, of a lane that is known as quick: whoever comes to them takes them as rides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle

from gpulayer_broker.spec import Payload, Spec, lane_of
from tests.workers import Desk

COUNT, RIDE = 80, 10  # so many calls in line make a ride of so many


class Line:
    """All submitted at once."""

    def __init__(
        self, desk: Desk, function: Callable[[int], Any], isolation: str = "warm", **fields: Any
    ) -> None:
        self.desk = desk
        self.spec: Spec = desk.function_spec(function, 0, isolation=isolation, **fields)
        self.lane = lane_of(self.spec)
        self.key = f"{desk.queue.keys.root}lane:{self.lane}"
        desk.link.call("SET", self.key, "1000", "PX", 600_000)
        self.jobs = [self.submit(number) for number in range(COUNT)]

    def submit(self, number: int, **facts: Any) -> str:
        assert self.spec.call is not None
        call = replace(self.spec.call, arguments=Payload(cloudpickle.dumps(((number,), {}))))
        return self.desk.submit(replace(self.spec, call=call), lane=self.lane, **facts)

    def states(self) -> set[str]:
        return {self.desk.final(job).state for job in self.jobs}

    def values(self) -> list[Any]:
        return [self.desk.value(self.desk.final(job).id) for job in self.jobs]
