"""The client's side of a contest: answers what is asked on stdin, a JSON line each; standard library only.

    python -m benchmarks.peers.asked SYSTEM

A *road* is one documented way to hand over jobs and to get their results. Every job returns the number that it was
given, and each answer is checked: a figure counts only where all results came back right and in order.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Road(NamedTuple):
    """`send` hands over one job for each number, `results` waits for what they returned."""

    send: Callable[[range], Any]
    results: Callable[[Any], list[int]]


def burst(road: Road, jobs: int) -> dict[str, float]:
    """Seconds until all are handed over, and until the last result is there."""
    numbers = range(jobs)
    start = time.perf_counter()
    sent = road.send(numbers)
    sent_s = time.perf_counter() - start
    results = road.results(sent)
    whole_s = time.perf_counter() - start
    _check(results, numbers)
    return {"jobs": jobs, "send_s": sent_s, "whole_s": whole_s}


def latency(road: Road, jobs: int) -> list[float]:
    """Milliseconds from submit to result of single jobs, one after another."""
    found = []
    for number in range(jobs):
        numbers = range(number, number + 1)
        start = time.perf_counter()
        results = road.results(road.send(numbers))
        found.append((time.perf_counter() - start) * 1000)
        _check(results, numbers)
    return found


def send(road: Road, jobs: int) -> None:
    """Only hands over; nobody waits for the results."""
    road.send(range(jobs))


def _check(results: list[int], numbers: range) -> None:
    if list(results) != list(numbers):
        raise AssertionError(f"{len(numbers)} jobs returned {len(results)} results, not all of them right")


QUESTIONS: dict[str, Callable[[Road, int], Any]] = {"burst": burst, "latency": latency, "send": send}


def serve(roads: dict[str, Road]) -> None:
    """Answers until stdin ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        answer = QUESTIONS[asked["question"]](roads[asked["road"]], asked["jobs"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    # By its name, and not as __main__: the system's worker imports the same module.
    import_module(f"benchmarks.peers.{sys.argv[1]}_peer").main()
