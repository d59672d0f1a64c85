"""Many quick calls of one function, by `map` and by `delay`: however a worker takes them, each has its own process."""

from __future__ import annotations

import os
from typing import Any

import pytest

import gpulayer as gl
from tests.support import PATIENCE_S
from tests.workers import WorkerProcess

COUNT = 150

pytestmark = pytest.mark.usefixtures("remotely")


def who(number: int) -> list[Any]:
    found = sorted(os.listdir("."))
    with open("left", "w") as file:
        file.write("here")
    return [number, os.getpid(), *found]


def are_alone(answers: list[list[Any]]) -> bool:
    """In order, each with a process and a folder in which nobody was before."""
    numbers, processes, found = zip(*answers, strict=True)
    assert numbers == tuple(range(COUNT))
    assert set(found) == {"outputs"}
    return len(set(processes)) == COUNT


def test_each_call_of_a_map_has_a_process_of_its_own(worker: WorkerProcess) -> None:
    assert are_alone(gl.remote(who).map(range(COUNT)).results())


def test_each_delayed_call_has_a_process_of_its_own(worker: WorkerProcess) -> None:
    jobs = [gl.remote(who).delay(number) for number in range(COUNT)]

    assert are_alone([job.result(timeout=PATIENCE_S) for job in jobs])
