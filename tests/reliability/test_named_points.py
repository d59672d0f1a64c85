"""A worker that is killed at a named point of a job's way: nothing is lost, nothing ends twice, nothing of it lives on.

Each point is real and seen from outside: the fork server stands still, so the worker waits between a claim and the
process; its way to the queue is shut, so it waits between a process's exit and the commit. Then it is killed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from gpulayer_broker.store.bundle import make_bundle
from tests.reliability.conftest import Hire
from tests.reliability.nemesis import fork_servers, is_gone, standing_still
from tests.reliability.proxy import Proxy
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, WorkerProcess

FILES = 200


class Scene:
    """A worker behind a proxy, whose fork server is there, and one job that waits for a gate before it ends."""

    def __init__(self, desk: Desk, proxy: Proxy, hire: Hire, folder: Path) -> None:
        self.desk, self.proxy = desk, proxy
        self.marks, self.pids, self.gate, self.asked = (
            folder / name for name in ("marks", "pids", "gate", "asked")
        )
        self.worker: WorkerProcess = hire(endpoint=proxy.endpoint)
        desk.final(desk.command("true"))
        # Its watchdog lets it go on when it has looked: seconds after its start, when the worker is long dead.
        self.fork_server = fork_servers(self.worker.pid)[0]
        source = folder / "source"
        source.mkdir()
        (source / "data.txt").write_text("data")
        self.source = make_bundle(source, desk.store).digest

    def submit(self, source: str = "") -> str:
        """Each attempt tells its number and process first; what it returns names the attempt."""
        script = f"""trap 'echo asked >> {self.asked}; wait_for_gate' TERM
            wait_for_gate() {{ while [ ! -e {self.gate} ]; do sleep 0.01; done; }}
            echo $$ >> {self.pids}; echo $GPULAYER_ATTEMPT >> {self.marks}
            wait_for_gate
            echo of $GPULAYER_ATTEMPT; n=0
            while [ $n -lt {FILES} ]; do
                echo "$GPULAYER_JOB_ID $GPULAYER_ATTEMPT $n" > outputs/$n; n=$((n + 1)); done"""
        return self.desk.shell(script, source=source)

    def granted(self, job: str) -> None:
        wait_until(lambda: self.desk.record(job).attempt == 1, PATIENCE_S, "it is granted", every=0.001)

    def runs(self) -> int:
        """The job's process, once it runs."""
        wait_until(lambda: self.marks.exists() and self.marks.read_text(), PATIENCE_S, "it runs", every=0.001)
        return int(self.pids.read_text())

    def opened(self) -> None:
        self.gate.touch()

    def gone(self, pid: int) -> None:
        wait_until(lambda: is_gone(pid), PATIENCE_S, "its process has ended", every=0.001)

    def cut_off(self) -> None:
        """The worker reaches its queue no more."""
        self.proxy.shut()

    def asked_to_hand_back(self) -> None:
        """Two signals: what runs goes back. The job has heard, and takes its time."""
        self.worker.send(signal.SIGTERM)
        wait_until(lambda: "stopping: " in self.worker.said(), PATIENCE_S, "it has heard")
        self.worker.send(signal.SIGTERM)
        wait_until(self.asked.exists, PATIENCE_S, "the job is asked to end")


# --- the points: each leaves the worker there, about to be killed; the job ---


def claimed_and_not_spawned(scene: Scene) -> str:
    os.kill(scene.fork_server, signal.SIGSTOP)
    job = scene.submit()
    scene.granted(job)
    return job


def spawned_and_not_told(scene: Scene) -> str:
    with standing_still(scene.fork_server):
        job = scene.submit(source=scene.source)
        scene.granted(job)
        scene.cut_off()
    scene.runs()
    assert scene.desk.record(job).state == "scheduled"
    return job


def running(scene: Scene) -> str:
    job = scene.submit()
    scene.runs()
    return job


def exited_and_not_heard(scene: Scene) -> str:
    job = scene.submit()
    pid = scene.runs()
    os.kill(scene.fork_server, signal.SIGSTOP)
    scene.opened()
    scene.gone(pid)
    return job


def storing_what_it_returns(scene: Scene) -> str:
    job = scene.submit()
    pid = scene.runs()
    names = [sha256(f"{job} 1 {n}\n".encode()).hexdigest() for n in range(FILES)]
    scene.opened()
    scene.gone(pid)
    store = scene.desk.store
    wait_until(lambda: len(store.has(names)) < FILES, PATIENCE_S, "some of it is stored", every=0.001)
    os.kill(scene.worker.pid, signal.SIGSTOP)
    assert store.has(names), "not all of it"
    return job


def exited_and_not_committed(scene: Scene) -> str:
    job = scene.submit()
    pid = scene.runs()
    scene.cut_off()
    scene.opened()
    scene.gone(pid)
    last = sha256(f"{job} 1 {FILES - 1}\n".encode()).hexdigest()
    wait_until(lambda: not scene.desk.store.has([last]), PATIENCE_S, "what it returns is stored", every=0.001)
    return job


def committed_and_not_heard(scene: Scene) -> str:
    job = scene.submit()
    scene.runs()
    scene.proxy.delay_s = 0.5
    scene.opened()
    wait_until(lambda: scene.desk.record(job).final, PATIENCE_S, "its end is accepted", every=0.001)
    return job


def handing_back_what_still_runs(scene: Scene) -> str:
    job = scene.submit()
    pid = scene.runs()
    scene.asked_to_hand_back()
    assert not is_gone(pid)
    return job


def ended_and_not_handed_back(scene: Scene) -> str:
    job = scene.submit()
    pid = scene.runs()
    scene.cut_off()
    scene.asked_to_hand_back()
    scene.gone(pid)
    return job


@dataclass(frozen=True)
class Point:
    """How the worker gets there, and which attempts have run when all is over."""

    reach: Callable[[Scene], str]
    attempts: str = "1\n2\n"
    is_over: bool = False


POINTS = {
    point.reach.__name__: point
    for point in (
        Point(claimed_and_not_spawned, attempts="2\n"),
        Point(spawned_and_not_told),
        Point(running),
        Point(exited_and_not_heard),
        Point(storing_what_it_returns),
        Point(exited_and_not_committed),
        Point(committed_and_not_heard, attempts="1\n", is_over=True),
        Point(handing_back_what_still_runs),
        Point(ended_and_not_handed_back),
    )
}


@pytest.mark.parametrize("name", POINTS)
def test_a_worker_killed_at_a_named_point_loses_nothing_and_leaves_nothing(
    desk: Desk, proxy: Proxy, hire: Hire, tmp_path: Path, name: str
) -> None:
    point, scene = POINTS[name], Scene(desk, proxy, hire, tmp_path)
    job = point.reach(scene)
    assert desk.record(job).final == point.is_over
    scene.worker.kill()
    of_the_dead = [
        scene.fork_server,
        *map(int, scene.pids.read_text().split() if scene.pids.exists() else ()),
    ]
    assert not (name == "claimed_and_not_spawned" and scene.marks.exists()), "nothing was spawned"

    scene.opened()
    proxy.delay_s = 0.0
    proxy.reopen()
    scene.worker.start().settle()
    assert all(map(is_gone, of_the_dead)), "leftovers are gone before it registers"
    record = desk.final(job)
    assert record.state == "succeeded"
    assert (record.attempt, record.losses) == ((1, 0) if point.is_over else (2, 1))
    assert scene.marks.read_text() == point.attempts
    assert desk.whole_log(job) == f"of {record.attempt}\n".encode()
    assert desk.output(job, f"outputs/{FILES - 1}") == f"{job} {record.attempt} {FILES - 1}\n".encode()
    assert len(list(desk.outputs(job).of_kind("file"))) == FILES
    assert desk.final(desk.command("true")).state == "succeeded"
