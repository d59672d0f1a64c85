"""Celery with Redis as its broker and as its result backend.

`delay`: tasks one by one, each result read with `get`. `group`: `group(…)()` and its `get`. The worker runs without
gossip, mingle and heartbeats, as Celery's guide to optimizing has it for speed.
"""

from __future__ import annotations

import os

from celery import Celery, group

from benchmarks.peers.asked import Road, serve

TIMEOUT_S = 120
URL = "redis+socket://" + os.environ["BENCH_SOCKET"]

app = Celery("bench", broker=URL, backend=URL)
app.conf.broker_connection_retry_on_startup = True


@app.task
def no_op(number: int) -> int:
    return number


ROADS = {
    "delay": Road(
        lambda numbers: [no_op.delay(number) for number in numbers],
        lambda sent: [result.get(timeout=TIMEOUT_S) for result in sent],
    ),
    "group": Road(
        lambda numbers: group(no_op.s(number) for number in numbers)(),
        lambda sent: list(sent.get(timeout=TIMEOUT_S)),
    ),
}


def main() -> None:
    serve(ROADS)
