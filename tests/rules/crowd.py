"""Workers and clients that race and die: threads and processes with links of their own, on one namespace.

`python -m tests.rules.crowd SOCKET ROOT WORKER` is a worker process: it claims one job at a time, says on its output
what it holds, writes a piece of log and commits; until it is killed.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.functions import DeviceLot
from tests import snapshot
from tests.checker import violations
from tests.queueing import Hand, Machine, signature
from tests.snapshot import Snapshot
from tests.support import PATIENCE_S, wait_until

CPU = signature()
REPOSITORY = Path(__file__).parents[2]
FINAL = ("succeeded", "failed", "cancelled", "timed_out")


@dataclass
class Place:
    """A namespace of a server, to which anybody opens a link of their own."""

    endpoint: Endpoint
    root: str

    @contextlib.contextmanager
    def hand(self) -> Iterator[Hand]:
        with Link(self.endpoint) as link:
            yield Hand(link, self.root)

    def look(self) -> Snapshot:
        with Link(self.endpoint) as link:
            return snapshot.read(link, self.root)

    def check(self) -> Snapshot:
        """The snapshot, in which every invariant holds."""
        seen = self.look()
        assert violations(seen) == []
        return seen


def each(work: Callable[[str], object], *names: str) -> list[Callable[[], object]]:
    """The work for each name, for `together`."""
    return [partial(work, name) for name in names]


def together(*works: Callable[[], object]) -> None:
    """Runs all at once, each in a thread; the first error is raised when all have ended, and one that hangs is one."""
    barrier, errors = threading.Barrier(len(works)), list[BaseException]()

    def run(work: Callable[[], object]) -> None:
        try:
            barrier.wait()
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"not within {PATIENCE_S} s: all have ended"


class Process:
    """A worker process; `lines` is what it has said."""

    def __init__(self, place: Place, worker: str, pause_at: str = "") -> None:
        command = [
            sys.executable,
            "-m",
            "tests.rules.crowd",
            place.endpoint.path,
            place.root,
            worker,
            pause_at,
        ]
        self.process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def count(self, word: str) -> int:
        return sum(line.startswith(word) for line in list(self.lines))

    def said(self, word: str) -> None:
        wait_until(lambda: self.count(word), PATIENCE_S, f"the worker says {word}", every=0.002)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def go_on(self) -> None:
        """Past the place at which it was told to pause."""
        assert self.process.stdin is not None
        self.process.stdin.write("go on\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and everything is over when this returns."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@contextlib.contextmanager
def processes(place: Place, *workers: str, pause_at: str = "") -> Iterator[list[Process]]:
    """Worker processes that are gone afterwards, whatever happens."""
    started: list[Process] = []
    try:
        for worker in workers:
            started.append(Process(place, worker, pause_at))
        yield started
    finally:
        for process in started:
            process.kill()


def feed(hand: Hand, workers: list[Process], *times: int, **facts: Any) -> list[str]:
    """Submits until each worker has ended so many jobs, and leaves some waiting; the jobs' ids."""
    jobs: list[str] = []

    def fed() -> bool:
        jobs.extend(hand.submit(CPU, **facts) for _ in range(20))
        return all(worker.count("ended") >= most for worker, most in zip(workers, times, strict=True))

    wait_until(fed, PATIENCE_S, f"the workers have ended {times} jobs", every=0.005)
    return jobs


def lose_all(hand: Hand) -> None:
    """Every lease has run out, and somebody looks."""
    for job in hand.link.call("ZRANGE", hand.key("leases"), 0, -1):
        hand.expire(job.decode())
    # However long this test has been at it: it is no outage, after which leases are not judged for a while.
    hand.link.call("HDEL", hand.key("clock"), "last_ms", "floor_ms")
    hand.tick()


def finish_all(hand: Hand, machine: Machine) -> None:
    """Works alone until nothing waits."""
    while grants := hand.claim(machine, 1):
        hand.commit(machine, grants[0])


def lots(count: int) -> tuple[DeviceLot, ...]:
    return tuple(DeviceLot(f"GPU-{n}", 0, 0, 10_000) for n in range(count))


def work(endpoint: Endpoint, root: str, worker: str, pause_at: str) -> None:
    """The worker process."""
    with Link(endpoint) as link:
        hand = Hand(link, root)
        machine = hand.machine(worker, slots=1)
        print("ready", flush=True)
        while True:
            for grant in hand.claim(machine, 1):
                print("holds", grant.id, grant.token, flush=True)
                if pause_at == "holds":
                    sys.stdin.readline()
                answers = [hand.run(fn.log(grant.id, grant.token, 0, "out", 0, b"x"))]
                answers.append(hand.run(fn.checkpoint(grant.id, grant.token, worker)))
                renewed = hand.renew(machine)
                answers.append("stale" if grant.id in renewed.stale else "ok")
                if pause_at == "holds":
                    answers.append(hand.run(fn.release(grant.id, grant.token, "lost")))
                answers.append(hand.commit(machine, grant, fields={"result": worker.encode()}).verdict)
                print("ended", *answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(QueueUnreachable, KeyboardInterrupt):
        work(Endpoint.unix(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4])
