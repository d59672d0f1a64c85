"""Calls of one function in line, of a lane that is known as quick: whoever comes to them takes them as rides.

Functions of here that calls use travel with them, by value.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle

from gpulayer_broker.spec import Payload, Spec, lane_of
from tests.reliability.nemesis import fork_servers
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, Hire

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


NUMBERS = list(range(COUNT))


class Stop:
    """Where a line waits for its ride: a worker all of whose slots are taken, and whose fork server is there."""

    def __init__(self, desk: Desk, hire: Hire, folder: Path) -> None:
        self.desk, self.hire, self.folder = desk, hire, folder

    def line(
        self,
        function: Callable[[int], Any],
        slots: int = 1,
        ready: Callable[[Line], object] = id,
        worker: Mapping[str, Any] = MappingProxyType({}),
        **fields: Any,
    ) -> Line:
        """Calls that get on as soon as they are all there, and `ready` has seen them."""
        gate = self.folder / "gate of the stop"
        self.worker = self.hire(slots=slots, **worker)
        before = [self.desk.function(wait_for, gate) for _ in range(slots)]
        for job in before:
            self.desk.reaches(job, "running")
        wait_until(lambda: fork_servers(self.worker.pid), PATIENCE_S, "the fork server is there")
        line = Line(self.desk, function, isolation="fresh", **fields)
        ready(line)
        gate.touch()
        return line


def losses(line: Line) -> set[int]:
    return {line.desk.record(job).losses for job in line.jobs}


# --- for calls ---


def ask(path: str, request: bytes) -> bytes:
    """A call's own word with the queue's server, without an import that would take longer than the call may."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.sendall(request)
        return link.recv(1 << 12)


def own_worker() -> int:
    """The process whose fork server this call's is the child of."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[1])


def note(file: Path, *words: object) -> None:
    with open(file, "a") as lines:
        lines.write(" ".join(map(str, words)) + "\n")


def attempt() -> int:
    return int(os.environ["GPULAYER_ATTEMPT"])


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)


cloudpickle.register_pickle_by_value(sys.modules[__name__])
