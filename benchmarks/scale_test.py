"""A sweep over many workers: `--workers` processes, each a worker of one slot, share `--runs` small training runs.

    python -m benchmarks.scale_test [--workers 30] [--runs 480] [--save FOLDER]

Printed are the wall time from the first submit to the last result, and how evenly the workers shared the runs. All of
them are on this machine, so its cores are the bound: `own_s` is what the runs alone need here, one after another on
every core. Each result is compared with the same run in this process.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import gpulayer as gl
from benchmarks.common import own_queue, save
from benchmarks.peers.contest import await_workers, environment_of, running

STEPS = 400
POINTS = 200
PATIENCE_S = 300


def train(rate: float) -> float:
    """The last loss of a straight line fitted by gradient descent; some 15 ms of pure Python."""
    numbers = random.Random(7)
    points = [(x, 3 * x + 1 + numbers.gauss(0, 0.1)) for x in (numbers.random() for _ in range(POINTS))]
    slope = offset = loss = 0.0
    for _ in range(STEPS):
        errors = [(slope * x + offset - y, x) for x, y in points]
        loss = sum(error * error for error, _ in errors) / POINTS
        slope -= rate * sum(error * x for error, x in errors) / POINTS
        offset -= rate * sum(error for error, _ in errors) / POINTS
    return loss


def rates(runs: int) -> list[float]:
    return [0.01 + run / runs for run in range(runs)]


def own_s(wanted: list[float]) -> tuple[float, list[float]]:
    """Seconds of the runs without any queue, on every core of this machine; and their results."""
    start = time.perf_counter()
    results = [train(rate) for rate in wanted]
    return (time.perf_counter() - start) / (os.cpu_count() or 1), results


def sweep(client: gl.Client, wanted: list[float], expected: list[float]) -> dict[str, Any]:
    """One sweep, by a job for each run."""
    start = time.perf_counter()
    jobs = [client.submit(train, args=(rate,)) for rate in wanted]
    submitted_s = time.perf_counter() - start
    results = [job.result(PATIENCE_S) for job in jobs]
    whole_s = time.perf_counter() - start
    if results != expected:
        raise AssertionError("a run came back with another loss than the same run here")
    shares = Counter(job.record.worker for job in jobs)
    return {"submit_s": submitted_s, "whole_s": whole_s, "runs_of_a_worker": sorted(shares.values())}


def measure(workers: int, runs: int) -> dict[str, Any]:
    """Starts the workers, runs the sweep, ends them."""
    wanted = rates(runs)
    alone_s, expected = own_s(wanted)
    with ExitStack() as stack:
        endpoint, _ = stack.enter_context(own_queue())
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpb-", dir="/tmp"))
        told = environment_of(endpoint.path, 1, state)
        start = time.perf_counter()
        for number in range(workers):
            name = f"node-{number}"
            command = [sys.executable, "-m", "gpulayer_worker", "--redis", endpoint.url, "--slots", "1"]
            stack.enter_context(running([*command, "--gpus", "none", "--name", name, "--node", name], told))
        client = stack.enter_context(gl.Client(redis=endpoint.url))
        await_workers(client, workers)
        started_s = time.perf_counter() - start
        # Each worker has started its fork server: a machine that does nothing else would have it already.
        [job.result(PATIENCE_S) for job in [client.submit(train, args=(0.1,)) for _ in range(4 * workers)]]
        found = sweep(client, wanted, expected)
    return {"workers": workers, "runs": runs, "own_s": alone_s, "workers_started_s": started_s, **found}


def show(found: dict[str, Any]) -> None:
    shares = found["runs_of_a_worker"]
    print(
        f"{found['runs']} runs on {found['workers']} workers: {found['whole_s']:.2f} s "
        f"({found['runs'] / found['whole_s']:.0f} runs/s; submitted in {found['submit_s']:.2f} s; the runs alone need "
        f"{found['own_s']:.2f} s on this machine's cores)"
    )
    print(f"{len(shares)} workers took part, {shares[0]} to {shares[-1]} runs each")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=30)
    parser.add_argument("--runs", type=int, default=480)
    parser.add_argument("--save", metavar="FOLDER", help="keep the raw figures below benchmarks/results/")
    args = parser.parse_args()
    found = measure(args.workers, args.runs)
    show(found)
    save("scale_test", found, args.save)


if __name__ == "__main__":
    main()
