"""RQ, whose worker forks for each job.

`enqueue`: jobs one by one. `enqueue_many`: all jobs in one pipeline. Each result is waited for with `latest_result`.
"""

from __future__ import annotations

import os
from typing import Any

from redis import Redis
from rq import Queue

from benchmarks.peers.asked import Road, serve

TIMEOUT_S = 120

queue = Queue("bench", connection=Redis(unix_socket_path=os.environ["BENCH_SOCKET"]))


def no_op(number: int) -> int:
    return number


def _many(numbers: range) -> Any:
    return queue.enqueue_many([Queue.prepare_data(no_op, (number,)) for number in numbers])


def _results(jobs: list[Any]) -> list[int]:
    return [job.latest_result(timeout=TIMEOUT_S).return_value for job in jobs]


ROADS = {
    "enqueue": Road(lambda numbers: [queue.enqueue(no_op, number) for number in numbers], _results),
    "enqueue_many": Road(_many, _results),
}


def main() -> None:
    serve(ROADS)
