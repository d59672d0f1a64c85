"""Ray, on a cluster of its own on this machine; it keeps tasks in memory, where the others have a broker.

`remote`: a task for each call, all results by one `ray.get`. `pool`: `ray.util.multiprocessing.Pool.map`, which hands
several calls to a process at once, as Ray's guide advises for tiny tasks.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import ray
from ray.util.multiprocessing import Pool

from benchmarks.peers.asked import Road, serve


@ray.remote
def no_op(number: int) -> int:
    return number


def plain(number: int) -> int:
    return number


def main() -> None:
    processes = int(os.environ["BENCH_PROCESSES"])
    # The path of a socket may be 107 characters long, and Ray adds most of them.
    with tempfile.TemporaryDirectory(prefix="gpb-", dir="/tmp") as folder:
        ray.init(
            num_cpus=processes,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            object_store_memory=128 << 20,
            _temp_dir=folder,
        )
        pool: Any = Pool(processes)
        roads = {
            "remote": Road(lambda numbers: [no_op.remote(number) for number in numbers], ray.get),
            "pool": Road(lambda numbers: pool.map_async(plain, numbers), lambda sent: list(sent.get())),
        }
        serve(roads)
        ray.shutdown()
