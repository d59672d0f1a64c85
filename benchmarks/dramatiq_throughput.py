"""No-op messages of a Dramatiq app: CapabilityBroker beside Dramatiq's own Redis broker, same server, same threads.

Both send one by one and read every result, through one worker process that is already up. Repeats are interleaved;
printed are medians, the spread and the ratio of the medians, and the CPU time that a message takes of each process:
on a machine that does other things too, that is the steadier figure. `--profile` shows where the worker of ours
spends its time.

    python -m benchmarks.dramatiq_throughput --messages 3000 --threads 8 --repeats 5 [--save FOLDER]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
import psutil
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from dramatiq.worker import ConsumerThread, WorkerThread

from benchmarks.common import median, own_queue, save
from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.connection import Endpoint, plain_client
from gpulayer_broker.results import QueueResults

KINDS = ("stock", "ours")
SHOWN = {
    "per_s": "messages/s",
    "send_us": "µs a send",
    "sender_cpu_us": "µs of CPU a message, sender",
    "worker_cpu_us": "µs of CPU a message, worker",
    "server_cpu_us": "µs of CPU a message, server",
}


def app(kind: str, endpoint: Endpoint) -> tuple[dramatiq.Broker, dramatiq.Actor[[], int]]:
    """The same actor on one of the two brokers, its results kept."""
    broker: dramatiq.Broker
    if kind == "ours":
        broker = CapabilityBroker(endpoint)
        broker.add_middleware(Results(backend=QueueResults(broker)))
    else:
        client = plain_client(endpoint, socket_timeout_s=60)
        broker = RedisBroker(client=client)
        broker.add_middleware(Results(backend=RedisBackend(client=client)))
    dramatiq.set_broker(broker)

    @dramatiq.actor(store_results=True)
    def no_op() -> int:
        return 1

    return broker, no_op


def work(kind: str, endpoint: Endpoint, threads: int, profiled: bool) -> None:
    """A worker process, until it is told to end."""
    broker, _ = app(kind, endpoint)
    worker = dramatiq.Worker(broker, worker_threads=threads)
    with _profile(profiled):
        worker.start()
        print("up", flush=True)
        signal.sigwait({signal.SIGTERM})
        worker.stop()


@contextmanager
def _profile(wanted: bool) -> Iterator[None]:
    """Of every thread of this process, printed at the end."""
    if not wanted:
        yield
        return
    import cProfile
    import pstats

    profiles: list[cProfile.Profile] = []

    def profiled(run: Callable[[Any], None]) -> Callable[[Any], None]:
        def runs(thread: Any) -> None:
            profiles.append(cProfile.Profile())
            profiles[-1].runcall(run, thread)

        return runs

    for kind in (WorkerThread, ConsumerThread):
        setattr(kind, "run", profiled(kind.run))  # noqa: B010 - a method is replaced for this process alone
    yield
    stats = pstats.Stats(*profiles, stream=sys.stderr)
    stats.sort_stats("tottime").print_stats(35)


@contextmanager
def worker_process(kind: str, url: str, threads: int, profiled: bool) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "benchmarks.dramatiq_throughput", "--work", kind, url]
    command += ["--threads", str(threads), *(["--profile"] if profiled else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "GPULAYER_PRIVATE": "0"})
    assert process.stdout is not None
    assert process.stdout.readline().strip() == b"up"
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def measure(kind: str, endpoint: Endpoint, threads: int, messages: int, profiled: bool) -> dict[str, float]:
    """Microseconds of a send, messages a second from the first send to the last result, and what CPU they took."""
    broker, no_op = app(kind, endpoint)
    with worker_process(kind, endpoint.url, threads, profiled) as worker:
        processes = {"sender": psutil.Process(), "worker": worker, "server": _server(endpoint)}
        no_op.send().get_result(block=True, timeout=30_000)
        used_s = {name: _cpu_s(process) for name, process in processes.items()}
        start = time.perf_counter()
        sent = [no_op.send() for _ in range(messages)]
        sending_s = time.perf_counter() - start
        for message in sent:
            message.get_result(block=True, timeout=120_000)
        whole_s = time.perf_counter() - start
        cpu = {
            f"{name}_cpu_us": (_cpu_s(process) - used_s[name]) / messages * 1e6
            for name, process in processes.items()
        }
    broker.close()
    return {"send_us": sending_s / messages * 1e6, "per_s": messages / whole_s, **cpu}


def _server(endpoint: Endpoint) -> psutil.Process:
    info = plain_client(endpoint).info("server")
    return psutil.Process(info["process_id"])


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Every repeat runs both, one after the other."""
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with own_queue() as (endpoint, _):
        for _ in range(args.repeats):
            for kind in KINDS:
                runs[kind].append(measure(kind, endpoint, args.threads, args.messages, args.profile))
    return {"messages": args.messages, "threads": args.threads, "runs": runs}


def show(found: dict[str, Any]) -> None:
    runs = found["runs"]
    for kind in KINDS:
        for name, unit in SHOWN.items():
            values = [run[name] for run in runs[kind]]
            print(f"{kind:6} {median(values):9.0f} {unit}  ({min(values):.0f} to {max(values):.0f})")
    ours, stock = (median([run["per_s"] for run in runs[kind]]) for kind in ("ours", "stock"))
    print(f"ratio  {ours / stock:9.2f} of messages/s, ours to stock")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--messages", type=int, default=3000)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", metavar="FOLDER", help="keep the raw figures below benchmarks/results/")
    parser.add_argument("--work", nargs=2, metavar=("KIND", "URL"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        work(args.work[0], Endpoint.parse(args.work[1]), args.threads, args.profile)
        return
    found = compare(args)
    show(found)
    save("dramatiq_throughput", found, args.save)


if __name__ == "__main__":
    main()
