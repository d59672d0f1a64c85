"""The benchmark's side: one system with its workers and its client, on a queue server of its own.

Every system is given the same server with the same settings, and as many worker processes. A system's processes are
gone when its `with` block ends.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import gpulayer as gl
from benchmarks.common import own_queue
from benchmarks.peers.environments import ROOT, environment, version_of
from gpulayer_broker.queue import Queue

ENDING_S = 20.0
WORKERS_COME_S = 120.0
ANSWER_S = 180.0
TAIL_BYTES = 4000


@dataclass(frozen=True)
class System:
    """One of those compared. `burst` and `calls` are how many jobs of each road take about a second, by its name."""

    name: str
    title: str
    burst: dict[str, int]
    calls: dict[str, int]
    worker: Callable[[Path, str, int], list[str]] | None
    own: bool = False

    @property
    def programs(self) -> Path:
        """The folder of this system's Python."""
        return Path(sys.executable).parent if self.own else environment(self.name)

    @property
    def version(self) -> str:
        return metadata.version("gpulayer") if self.own else version_of(self.name)


def _gpulayer(programs: Path, socket: str, processes: int) -> list[str]:
    where = ["--redis", f"unix://{socket}", "--slots", str(processes), "--gpus", "none"]
    return [str(programs / "python"), "-m", "gpulayer_worker", *where]


def _dramatiq(programs: Path, socket: str, processes: int) -> list[str]:
    # With one thread it waits for its own acknowledgements; four were faster here, and than its default of eight too.
    app = "benchmarks.peers.dramatiq_peer"
    return [str(programs / "dramatiq"), app, "--processes", str(processes), "--threads", "4"]


def _celery(programs: Path, socket: str, processes: int) -> list[str]:
    app = ["-A", "benchmarks.peers.celery_peer", "worker", "--concurrency", str(processes)]
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel", "error"]
    return [str(programs / "celery"), *app, *quiet]


def _rq(programs: Path, socket: str, processes: int) -> list[str]:
    pool = ["worker-pool", "--num-workers", str(processes), "--url", f"unix://{socket}", "--quiet", "bench"]
    return [str(programs / "rq"), *pool]


OURS = System(
    "gpulayer",
    "GPUlayer",
    {"fresh delay": 400, "fresh map": 400, "warm delay": 2000, "warm map": 20_000},
    {"fresh delay": 60, "warm delay": 200},
    _gpulayer,
    own=True,
)
PEERS = (
    System("dramatiq", "Dramatiq", {"send": 2000, "group": 2000}, {"send": 200}, _dramatiq),
    System("celery", "Celery", {"delay": 600, "group": 600}, {"delay": 200}, _celery),
    System("rq", "RQ", {"enqueue": 100, "enqueue_many": 100}, {"enqueue": 60}, _rq),
    System("ray", "Ray", {"remote": 2000, "pool": 20_000}, {"remote": 200}, None),
)
SYSTEMS = (OURS, *PEERS)


def contest_arguments(about: str | None) -> argparse.Namespace:
    """The options of a benchmark that repeats every system."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default=",".join(system.name for system in SYSTEMS), metavar="NAMES")
    parser.add_argument("--save", metavar="FOLDER", help="keep the raw figures below benchmarks/results/")
    return parser.parse_args()


def await_workers(client: gl.Client, count: int) -> None:
    """Returns when so many workers are online; TimeoutError where they never come."""
    end = time.monotonic() + WORKERS_COME_S
    while sum(worker.state == "online" for worker in client.workers()) < count:
        if time.monotonic() > end:
            raise TimeoutError(f"not all of {count} workers are online after {WORKERS_COME_S} s")
        time.sleep(0.05)


def named(names: str) -> list[System]:
    """The systems of a list that is separated by commas."""
    known = {system.name: system for system in SYSTEMS}
    return [known[name] for name in names.split(",")]


def rotated(systems: Sequence[System], repeat: int) -> list[System]:
    """Another one goes first each time."""
    first = repeat % len(systems)
    return [*systems[first:], *systems[:first]]


@dataclass
class Client:
    """A system's client process, which answers one question at a time."""

    process: subprocess.Popen[str]

    def ask(self, question: str, road: str, jobs: int) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = json.dumps({"question": question, "road": road, "jobs": jobs})
        print(asked, file=self.process.stdin, flush=True)
        ready = select.select([self.process.stdout], [], [], ANSWER_S)[0]
        line = self.process.stdout.readline() if ready else ""
        if not line:
            how = f"exit code {self.process.poll()}" if ready else f"no answer within {ANSWER_S:.0f} s"
            raise RuntimeError(f"{question} of {jobs} jobs by {road}: {how}")
        return json.loads(line)


@dataclass
class Stage:
    """A system on its server; workers are started when they are wanted."""

    system: System
    processes: int
    queue: Queue
    told: dict[str, str]
    client: Client
    _stack: ExitStack
    worker: subprocess.Popen[str] | None = None

    @property
    def socket(self) -> str:
        """Where its server listens."""
        return self.told["BENCH_SOCKET"]

    def start_workers(self) -> None:
        """Returns when the workers have run jobs of each road."""
        self.launch()
        for road in self.system.burst:
            self.client.ask("burst", road, 4 * self.processes)

    def launch(self) -> None:
        """Starts the workers, and waits for nothing."""
        if self.system.worker is not None:
            self.worker = self._stack.enter_context(
                running(self.system.worker(self.system.programs, self.socket, self.processes), self.told)
            )


def environment_of(socket: str, processes: int, state: str) -> dict[str, str]:
    """What workers and clients are told; of the caller's own settings of GPUlayer nothing."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPULAYER_")}
    return {
        **kept,
        "BENCH_SOCKET": socket,
        "BENCH_PROCESSES": str(processes),
        "PYTHONPATH": str(ROOT),
        "GPULAYER_PRIVATE": "off",
        "GPULAYER_STATE_DIR": state,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextmanager
def on_stage(system: System, processes: int) -> Iterator[Stage]:
    """The system's client and server, no worker yet."""
    with ExitStack() as stack:
        endpoint, queue = stack.enter_context(own_queue())
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpb-", dir="/tmp"))
        told = environment_of(endpoint.path, processes, state)
        command = [str(system.programs / "python"), "-m", "benchmarks.peers.asked", system.name]
        client = Client(stack.enter_context(running(command, told, talks=True)))
        yield Stage(system, processes, queue, told, client, stack)


@contextmanager
def running(
    command: list[str], told: dict[str, str], *, talks: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, gone afterwards; what it wrote to stderr is shown where something failed."""
    pipe = subprocess.PIPE if talks else subprocess.DEVNULL
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=told,
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        except Exception:
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - TAIL_BYTES))
            print(f"-- {' '.join(command)}\n{errors.read().decode(errors='replace')}", file=sys.stderr)
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """A client ends when its questions do, a worker by TERM, and what is left after that by KILL."""
    if process.stdin is not None:
        process.stdin.close()
    else:
        process.terminate()
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
