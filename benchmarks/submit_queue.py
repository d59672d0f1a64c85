"""What a submit costs, against queued jobs and signatures, beside a PING and Dramatiq's own broker.

At the longest queue also what a claim takes, and how long a killed server needs until it serves again.

    python benchmarks/submit_queue.py [--quick] [--save FOLDER]

One client, one warm connection to the embedded server; in the same run a PING of that connection, one by redis-py's
own client, and Dramatiq's stock Redis broker.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import redis

from benchmarks import long_queue
from benchmarks.common import (
    machine,
    median,
    no_op_command,
    own_folders,
    own_queue,
    requirements_of,
    save,
    timed,
)
from gpulayer_broker import functions
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.embedded import ensure_server
from gpulayer_broker.queue import Queue

BATCH = 1000
SAMPLES = 2000


def fill(queue: Queue, upto: int, signatures: int, have: int) -> None:
    needs = [requirements_of(n) for n in range(signatures)]
    for need in needs:
        queue.introduce(need)
    for start in range(have, upto, BATCH):
        jobs = [no_op_command(needs[i % signatures]) for i in range(start, min(upto, start + BATCH))]
        queue.run_many([functions.submit(job) for job in jobs])


def server_us(queue: Queue, action: Any, times: int) -> float:
    """Microseconds in the server per call, by its own statistics."""
    queue.link.call("CONFIG", "RESETSTAT")
    for _ in range(times):
        action()
    text = queue.link.call("INFO", "commandstats").decode()
    line = next(line for line in text.splitlines() if line.startswith("cmdstat_fcall:"))
    return float(line.split("usec_per_call=")[1].split(",")[0])


def settle(queue: Queue) -> None:
    """Waits until the server no longer rewrites its file: a forked copy makes every write dearer."""
    while b"aof_rewrite_in_progress:1" in queue.link.call("INFO", "persistence"):
        time.sleep(0.2)


def at(queue: Queue, signatures: int) -> dict[str, float]:
    """The figures at the present length of the queue.

    PING and submit take turns in an order that is drawn anew each time, so that they meet the same moments and the same
    caches; redis-py's PINGs, which are another program to the processor, come after them.
    """
    settle(queue)
    need = requirements_of(0)
    queue.introduce(need)
    submit = [no_op_command(need) for _ in range(3 * SAMPLES)]
    one = iter(submit[: 2 * SAMPLES])
    ping: list[float] = []
    single: list[float] = []
    client = redis.Redis(unix_socket_path=queue.link.endpoint.path)
    turns: list[tuple[list[float], Callable[[], Any]]] = [
        (ping, lambda: queue.link.call("PING")),
        (single, lambda: queue.run(functions.submit(next(one)))),
    ]
    for _ in range(SAMPLES):
        random.shuffle(turns)
        for times, action in turns:
            times += timed(action, 1)
    stock = timed(client.ping, SAMPLES)
    server = server_us(queue, lambda: queue.run(functions.submit(next(one))), SAMPLES)
    rest = submit[2 * SAMPLES :]
    batches = [rest[i : i + 100] for i in range(0, len(rest), 100)]
    batch = iter(batches)
    pipelined = timed(lambda: queue.run_many([functions.submit(job) for job in next(batch)]), len(batches))
    return {
        "signatures": signatures,
        "ping_us": median(ping),
        "redis_py_ping_us": median(stock),
        "submit_us": median(single),
        "ratio_to_ping": median(single) / median(ping),
        "ratio_to_redis_py_ping": median(single) / median(stock),
        "submit_server_us": server,
        "pipelined_us": median(pipelined) / 100,
    }


def dramatiq_us(endpoint: Endpoint) -> float:
    """A send of Dramatiq's stock Redis broker on the same server."""
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=f"unix://{endpoint.path}")

    @dramatiq.actor(broker=broker)
    def nothing() -> None: ...

    return median(timed(nothing.send, SAMPLES))


def memory(queue: Queue) -> int:
    text = queue.link.call("INFO", "memory").decode()
    return int(next(line for line in text.splitlines() if line.startswith("used_memory:")).split(":")[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="up to 10^5 queued")
    parser.add_argument("--save", metavar="FOLDER", help="keep the raw figures below benchmarks/results/")
    args = parser.parse_args()
    lengths = [0, 1_000, 100_000] + ([] if args.quick else [1_000_000])
    rows: list[dict[str, Any]] = []
    print(machine())
    print(
        f"{'queued':>9} {'sigs':>5} {'PING us':>8} {'redis-py':>8} {'submit us':>10} {'ratio':>6} {'server us':>10} "
        f"{'piped us':>9}"
    )
    with own_folders() as folders:
        queue = Queue(Link(ensure_server(folders)), "bench")
        queue.load()
        empty, have = memory(queue), 0
        for length in lengths:
            fill(queue, length, 10, have)
            held = memory(queue) - empty
            row = {"queued": length, **at(queue, 10), "bytes_per_job": held / length if length else None}
            have = length
            rows.append(row)
            show(row)
        print(f"memory per queued job at {have}: {rows[-1]['bytes_per_job']:.0f} B")
        settle(queue)
        rows[-1].update(long_queue.measure(queue, folders, 10))
        show_long(rows[-1])
    with own_queue() as (endpoint, queue):
        fill(queue, 10_000, 1_000, 0)
        rows.append({"queued": 10_000, **at(queue, 1_000)})
        show(rows[-1])
        peer = dramatiq_us(endpoint)
        ours = rows[-1]["submit_us"]
    print(
        f"Dramatiq 2.2 on the same server: {peer:.0f} us a send; ours {ours:.0f} us, {ours / peer:.2f} of it"
    )
    save("submit_queue", {"rows": rows, "dramatiq_send_us": peer}, args.save)


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['queued']:>9} {row['signatures']:>5} {row['ping_us']:>8.0f} {row['redis_py_ping_us']:>8.0f} "
        f"{row['submit_us']:>10.0f} {row['ratio_to_ping']:>6.2f} {row['submit_server_us']:>10.1f} "
        f"{row['pipelined_us']:>9.1f}"
    )


def show_long(row: dict[str, Any]) -> None:
    again = row["restart"]
    print(f"a claim: {row['claim_p50_ms']:.2f} ms, p99 {row['claim_p99_ms']:.2f} ms")
    print(
        f"after a kill -9 with {again['queued']:,} queued: answers in {again['answers_s']:.1f} s, "
        f"claims in {again['claims_s']:.1f} s ({again['file_bytes'] / 1e6:.0f} MB of file)"
    )


if __name__ == "__main__":
    main()
