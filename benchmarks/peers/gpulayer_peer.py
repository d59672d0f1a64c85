"""GPUlayer, in a process of its own for each call (*fresh*) and in processes that stay (*warm*).

`.delay`: calls one by one, each result read with `result`. `.map`: one `map`, its `results`.
"""

from __future__ import annotations

import os
from typing import Any

import gpulayer as gl
from benchmarks.peers.asked import Road, serve


def no_op(number: int) -> int:
    return number


def _roads(function: gl.RemoteFunction[[int], int], name: str) -> dict[str, Road]:
    def mapped(numbers: range) -> Any:
        return function.map(numbers, progress=False)

    return {
        f"{name} delay": Road(
            lambda numbers: [function.delay(number) for number in numbers],
            lambda jobs: [job.result(timeout=120) for job in jobs],
        ),
        f"{name} map": Road(mapped, lambda found: list(found.results())),
    }


ROADS = {
    **_roads(gl.remote(no_op), "fresh"),
    **_roads(gl.remote(no_op, isolation="warm"), "warm"),
}


def main() -> None:
    os.environ["GPULAYER_REDIS_URL"] = "unix://" + os.environ["BENCH_SOCKET"]
    serve(ROADS)
