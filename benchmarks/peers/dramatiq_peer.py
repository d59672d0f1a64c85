"""Dramatiq with its Redis broker and its Redis results.

`send`: messages one by one, each result read with `get_result`. `group`: `dramatiq.group(…).run()` and
`get_results`, the road that its guide gives for many messages whose results are wanted.
"""

from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks.peers.asked import Road, serve

TIMEOUT_MS = 120_000
URL = "unix://" + os.environ["BENCH_SOCKET"]

broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=RedisBackend(url=URL)))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def no_op(number: int) -> int:
    return number


def _group(numbers: range) -> Any:
    return dramatiq.group([no_op.message(number) for number in numbers]).run()


ROADS = {
    "send": Road(
        lambda numbers: [no_op.send(number) for number in numbers],
        lambda sent: [message.get_result(block=True, timeout=TIMEOUT_MS) for message in sent],
    ),
    "group": Road(_group, lambda sent: list(sent.get_results(block=True, timeout=TIMEOUT_MS))),
}


def main() -> None:
    serve(ROADS)
