"""Rides of calls with a process each, through real workers: they share a slot, one after another, and nothing else."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson
import pytest

from gpulayer_broker import functions
from gpulayer_broker.spec import lane_of
from tests.reliability.nemesis import fork_servers
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk

from .conftest import Hire
from .lines import COUNT, RIDE, Line

NUMBERS = list(range(COUNT))


class Stop:
    """Where a line waits for its ride: a worker all of whose slots are taken, and whose fork server is there."""

    def __init__(self, desk: Desk, hire: Hire, folder: Path) -> None:
        self.desk, self.hire, self.folder = desk, hire, folder

    def line(
        self,
        function: Callable[[int], Any],
        slots: int = 1,
        ready: Callable[[Line], object] = id,
        worker: Mapping[str, Any] = MappingProxyType({}),
        **fields: Any,
    ) -> Line:
        """Calls that get on as soon as they are all there, and `ready` has seen them."""
        gate = self.folder / "gate of the stop"
        self.worker = self.hire(slots=slots, **worker)
        before = [self.desk.function(wait_for, gate) for _ in range(slots)]
        for job in before:
            self.desk.reaches(job, "running")
        wait_until(lambda: fork_servers(self.worker.pid), PATIENCE_S, "the fork server is there")
        line = Line(self.desk, function, isolation="fresh", **fields)
        ready(line)
        gate.touch()
        return line


@pytest.fixture
def stop(desk: Desk, hire: Hire, tmp_path: Path) -> Stop:
    return Stop(desk, hire, tmp_path)


def losses(line: Line) -> set[int]:
    return {line.desk.record(job).losses for job in line.jobs}


def wall_s(desk: Desk, job: str) -> float:
    return float(orjson.loads(desk.record(job).usage)["wall_s"])


# --- for calls, which take them along ---


def ask(path: str, request: bytes) -> bytes:
    """A call's own word with the queue's server, without an import that would take longer than the call may."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        link.sendall(request)
        return link.recv(1 << 12)


def own_worker() -> int:
    """The process whose fork server this call's is the child of."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[1])


def note(file: Path, *words: object) -> None:
    with open(file, "a") as lines:
        lines.write(" ".join(map(str, words)) + "\n")


def attempt() -> int:
    return int(os.environ["GPULAYER_ATTEMPT"])


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.005)


# --- what each has for itself ---


def test_quick_calls_are_granted_together(desk: Desk, stop: Stop) -> None:
    path, rides = desk.endpoint.path, f"HVALS {desk.queue.keys.root}rides\r\n".encode()

    line = stop.line(lambda n: ask(path, rides) if n == 0 else b"")

    assert b"\r\n%d\r\n" % RIDE in line.values()[0]


def test_each_call_has_a_process_a_folder_and_an_identity_of_its_own(desk: Desk, stop: Stop) -> None:
    def work(n: int) -> tuple[object, ...]:
        left = os.environ.get("LEFT"), sorted(os.listdir("."))
        os.environ["LEFT"] = "here"
        Path("left").touch()
        return (n, os.environ["GPULAYER_JOB_ID"], str(attempt()), *left, os.getcwd(), os.getpid())

    line = stop.line(work)

    values = line.values()
    assert [value[0] for value in values] == NUMBERS
    assert [value[1:3] for value in values] == [(job, str(desk.record(job).attempt)) for job in line.jobs]
    assert [value[3:5] for value in values] == [(None, ["outputs"])] * COUNT
    assert len({value[5] for value in values}) == len({value[6] for value in values}) == COUNT


def test_a_slot_never_runs_two_at_once(desk: Desk, stop: Stop) -> None:
    def work(n: int) -> tuple[float, float]:
        began_s = time.monotonic()
        time.sleep(0.005)
        return began_s, time.monotonic()

    line = stop.line(work)

    assert all(before[1] <= behind[0] for before, behind in pairwise(sorted(line.values())))


def test_each_keeps_its_own_output_and_results_files(desk: Desk, stop: Stop) -> None:
    def work(n: int) -> int:
        print(f"words of {n}")
        Path("outputs", f"{n}.txt").write_text(str(n))
        return n

    line = stop.line(work)

    assert line.values() == NUMBERS
    assert [desk.whole_log(job) for job in line.jobs] == [b"words of %d\n" % n for n in NUMBERS]
    assert [desk.output(job, f"outputs/{n}.txt") for n, job in enumerate(line.jobs)] == [
        str(n).encode() for n in NUMBERS
    ]


def test_an_error_and_a_crash_are_those_of_one_call(desk: Desk, stop: Stop) -> None:
    def work(n: int) -> int:
        if n == 3:
            raise KeyError("no such thing")
        if n == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if n == 5:
            os._exit(7)
        return n

    line = stop.line(work)

    ends = [(desk.final(job).state, desk.record(job).end_reason) for job in line.jobs]
    bad = {3: ("failed", "user_error"), 4: ("failed", "signal"), 5: ("failed", "user_error")}
    assert ends == [bad.get(number, ("succeeded", "")) for number in NUMBERS]
    assert desk.error(line.jobs[3])["type"] == "KeyError"
    assert desk.error(line.jobs[5])["exit_code"] == 7
    assert losses(line) == {0}


def test_what_a_call_started_is_gone_before_the_next_begins(desk: Desk, stop: Stop, tmp_path: Path) -> None:
    started = tmp_path / "started"

    def work(n: int) -> bool:
        if n == 0:
            pid = os.posix_spawn("/bin/sh", ["sh", "-c", "sleep 1000"], os.environ, setsid=True)
            started.write_text(str(pid))
        return n == 1 and Path("/proc", started.read_text()).exists()

    line = stop.line(work)

    assert line.values() == [False] * COUNT


# --- those that take their time ---


def test_a_slow_call_keeps_nobody_behind_it(desk: Desk, stop: Stop, tmp_path: Path) -> None:
    gate, ran = tmp_path / "gate", tmp_path / "ran"

    def work(n: int) -> int:
        note(ran, n)
        if n == 0:
            print("waiting", flush=True)
            wait_for(gate)
        return n

    line = stop.line(work, slots=2)

    others = [job for number, job in enumerate(line.jobs) if number]
    assert {desk.final(job).state for job in others} == {"succeeded"}
    assert desk.record(line.jobs[0]).state == "running"
    number = desk.record(line.jobs[0]).attempt
    wait_until(lambda: desk.tail(line.jobs[0], number) == b"waiting\n", PATIENCE_S, "its output is shipped")
    gate.touch()
    assert line.values() == NUMBERS
    order = list(map(int, ran.read_text().split()))
    assert sorted(order) == NUMBERS
    # They have gone back at their old age.
    assert max(map(order.index, range(RIDE))) < min(map(order.index, range(5 * RIDE, COUNT)))
    assert losses(line) == {0}


def test_each_call_has_its_own_time(desk: Desk, stop: Stop) -> None:
    def work(n: int) -> int:
        if n == 3:
            time.sleep(1000)
        return n

    line = stop.line(work, timeout_s=3)

    ends = [desk.final(job).state for job in line.jobs]
    assert ends == ["timed_out" if n == 3 else "succeeded" for n in NUMBERS]


def test_a_call_that_waits_for_its_turn_uses_up_nothing_of_its_time(
    desk: Desk, stop: Stop, tmp_path: Path
) -> None:
    late = tmp_path / "late"

    def work(n: int) -> int:
        if attempt() == 1 and n == 0:
            time.sleep(0.02)
            os.kill(own_worker(), signal.SIGSTOP)
        elif attempt() == 1 and n == 1:
            # The worker hears of its beginning when it is let go on.
            time.sleep(2.5)
            late.touch()
            time.sleep(0.5)
        return n

    line = stop.line(work, timeout_s=2)
    wait_until(late.exists, PATIENCE_S, "the call has run for longer than it may")
    stop.worker.send(signal.SIGCONT)

    assert line.states() == {"succeeded"}
    assert wall_s(desk, line.jobs[0]) < 2 < wall_s(desk, line.jobs[1])


# --- those that are stopped ---


@pytest.mark.parametrize(
    ("number", "pause_s"),
    [(0, 0), (1, 0.3), (6, 0.3), (6, 0.01)],
    ids=["the one that runs", "the next", "one that goes back", "one that may have begun"],
)
def test_one_of_a_ride_is_cancelled_and_the_others_run(
    desk: Desk, stop: Stop, tmp_path: Path, number: int, pause_s: float
) -> None:
    ran, cancel, path = tmp_path / "ran", tmp_path / "cancel", desk.endpoint.path

    def work(n: int) -> int:
        note(ran, n)
        if n == 0:
            ask(path, cancel.read_bytes())
        time.sleep(1000 if n == number else pause_s if n <= 5 else 0)
        return n

    def ready(line: Line) -> None:
        cancel.write_bytes(packed(functions.cancel(line.jobs[number]).command(desk.queue.keys.root)))

    line = stop.line(work, ready=ready)

    ends = [desk.final(job).state for job in line.jobs]
    assert ends == ["cancelled" if n == number else "succeeded" for n in NUMBERS]
    if pause_s != 0.01:
        assert ran.read_text().split().count(str(number)) == (number == 0)


def packed(command: tuple[Any, ...]) -> bytes:
    words = [word if isinstance(word, bytes) else str(word).encode() for word in command]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def test_an_interrupt_reaches_the_call_that_runs(desk: Desk, stop: Stop, tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def work(n: int) -> str:
        try:
            if n == 2:
                ready.touch()
                time.sleep(1000)
        except KeyboardInterrupt:
            return "interrupted"
        return ""

    line = stop.line(work)
    wait_until(ready.exists, PATIENCE_S, "the call runs")
    desk.queue.run(functions.interrupt(line.jobs[2]))

    assert line.values() == ["interrupted" if n == 2 else "" for n in NUMBERS]


def test_a_worker_that_is_stopped_finishes_its_ride(
    desk: Desk, stop: Stop, hire: Hire, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"

    def work(n: int) -> None:
        note(ran, n)
        time.sleep(0.002)

    line = stop.line(work)
    desk.reaches(line.jobs[0], "succeeded")
    assert stop.worker.stop() == 0
    hire(slots=1)

    assert line.states() == {"succeeded"}
    assert sorted(map(int, ran.read_text().split())) == NUMBERS
    assert losses(line) == {0}


def test_a_worker_that_has_to_stop_at_once_hands_its_ride_back(
    desk: Desk, stop: Stop, hire: Hire, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"

    def work(n: int) -> int:
        if n == 2 and not ready.exists():
            ready.touch()
            time.sleep(1000)
        return n

    line = stop.line(work)
    wait_until(ready.exists, PATIENCE_S, "the call runs")
    stop.worker.end()
    assert stop.worker.process.returncode == 0
    hire(slots=1)

    assert line.values() == NUMBERS
    assert losses(line) == {0}


# --- what goes wrong ---


def test_a_killed_worker_loses_no_call_and_ends_none_twice(desk: Desk, stop: Stop, hire: Hire) -> None:
    def work(n: int) -> int:
        time.sleep(0.002)
        return n

    line = stop.line(work, slots=2)
    desk.reaches(line.jobs[3], "succeeded")
    stop.worker.kill()
    hire(slots=2)

    assert line.values() == NUMBERS
    assert losses(line) <= {0, 1}
    root = desk.queue.keys.root
    wait_until(lambda: not desk.link.call("EXISTS", root + "rides"), PATIENCE_S, "no ride is left")


def test_a_call_of_a_worker_that_stands_still_never_begins_when_its_lease_is_over(
    desk: Desk, stop: Stop, hire: Hire, tmp_path: Path
) -> None:
    ran, stopped = tmp_path / "ran", tmp_path / "stopped"

    def work(n: int) -> int:
        note(ran, n)
        if n == 0 and attempt() == 1:
            time.sleep(0.02)
            stopped.touch()
            os.kill(own_worker(), signal.SIGSTOP)
            time.sleep(1000)
        return n

    line = stop.line(work, worker={"lease_s": 3})
    wait_until(stopped.exists, PATIENCE_S, "the worker stands still")
    hire(slots=1)

    assert line.values() == NUMBERS
    order = list(map(int, ran.read_text().split()))
    assert {n for n in NUMBERS if order.count(n) != 1} == {0}
    assert order.count(0) == 2


def test_a_fork_server_that_dies_takes_no_more_along_than_what_was_handed_to_it(
    desk: Desk, stop: Stop
) -> None:
    def work(n: int) -> int:
        if n == 0 and attempt() == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(1000)
        return n

    line = stop.line(work)

    assert line.values() == NUMBERS
    assert {n for n, job in enumerate(line.jobs) if desk.record(job).losses} <= {0, 1}
    assert losses(line) == {0, 1}


def test_through_an_outage_a_call_that_takes_its_time_goes_on(desk: Desk, stop: Stop, tmp_path: Path) -> None:
    ran, path = tmp_path / "ran", desk.endpoint.path

    def work(n: int) -> int:
        note(ran, n)
        if n == 0 and attempt() == 1:
            ask(path, b"CLIENT PAUSE 8000 ALL\r\n")  # those behind cannot go back
            time.sleep(10)
        return n

    line = stop.line(work)

    assert line.values() == NUMBERS
    assert ran.read_text().split().count("0") == 1
    assert losses(line) == {0}


def test_a_call_that_cannot_be_read_fails_by_itself(desk: Desk, stop: Stop) -> None:
    def damage(line: Line) -> None:
        desk.link.call("HSET", f"{desk.queue.keys.root}job:{line.jobs[3]}", "spec", b"no record")

    line = stop.line(int, ready=damage)

    records = [desk.final(job) for job in line.jobs]
    assert [r.id for r in records if r.state != "succeeded"] == [line.jobs[3]]
    assert (records[3].state, records[3].end_reason) == ("failed", "undecodable")


def test_what_only_claims_to_be_of_the_lane_runs_by_itself(desk: Desk, stop: Stop) -> None:
    strangers: list[str] = []

    def mix(line: Line) -> None:
        line.jobs = []
        for number in NUMBERS:
            if number in (3, 40):
                command = desk.command_spec("echo", str(number))
                strangers.append(desk.submit(command, lane=line.lane, priority=1))
            line.jobs.append(line.submit(number, priority=1))

    line = stop.line(int, ready=mix)

    assert line.values() == NUMBERS
    assert [desk.whole_log(desk.final(job).id) for job in strangers] == [b"3\n", b"40\n"]


# Runs in a worker before its own first line, and in no other process.
BREAKING = """
import sys
if "gpulayer_worker" in sys.orig_argv:
    from pathlib import Path
    from gpulayer_worker import {module}
    whole = {module}.{place}
    def broken(*arguments):
        mark = Path({mark!r})
        if mark.exists():
            mark.unlink()
            raise RuntimeError("broken for a test")
        return whole(*arguments)
    {module}.{place} = broken
"""


def breaking(folder: Path, mark: Path, module: str, place: str) -> dict[str, str]:
    """The environment of a worker in which this raises, once, as soon as the mark is there."""
    (folder / "sitecustomize.py").write_text(
        BREAKING.format(module=module, place=place, mark=str(mark)), encoding="utf-8"
    )
    known = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{folder}:{known}" if known else str(folder)}


def test_a_ride_that_breaks_off_leaves_nothing_running(desk: Desk, stop: Stop, tmp_path: Path) -> None:
    mark, first = tmp_path / "mark", tmp_path / "first"

    def work(n: int) -> bool:
        if n:
            return False
        if attempt() == 1:
            first.write_text(str(os.getpid()))
            mark.touch()
            time.sleep(1000)
        return Path("/proc", first.read_text()).exists()

    broken = breaking(tmp_path, mark, "tally", "Tally.tell_some")
    line = stop.line(work, worker={"environment": broken})

    assert line.values() == [False] * COUNT
    assert "a ride broke off" in stop.worker.said()
    assert losses(line) == {0, 1}


def test_a_fault_at_the_start_of_one_ends_no_other(desk: Desk, stop: Stop, tmp_path: Path) -> None:
    mark, ran = tmp_path / "mark", tmp_path / "ran"

    def work(n: int) -> int:
        note(ran, n)
        if n == 0 and attempt() == 1:
            mark.touch()
            time.sleep(0.02)
        return n

    broken = breaking(tmp_path, mark, "running", "Run._prepare")
    line = stop.line(work, worker={"environment": broken})

    assert line.values() == NUMBERS
    assert not mark.exists()
    assert "could not be started" in stop.worker.said()
    assert sorted(map(int, ran.read_text().split())) == NUMBERS


# --- what lanes learn ---


@pytest.mark.parametrize("function", [int, print], ids=["quiet", "loud"])
def test_single_calls_tell_what_their_lane_takes_also_those_that_write(
    desk: Desk, stop: Stop, function: Callable[[int], Any]
) -> None:
    def alone(line: Line) -> None:
        desk.link.call("DEL", line.key)
        for job in line.jobs[1:]:
            desk.queue.run(functions.cancel(job))

    line = stop.line(function, ready=alone)

    assert desk.final(line.jobs[0]).state == "succeeded"
    assert 0 < float(desk.link.call("GET", line.key)) < 60e6


def test_fresh_and_warm_calls_of_one_function_are_of_two_lanes(desk: Desk) -> None:
    spec = desk.function_spec(int, 0)
    assert lane_of(spec) != lane_of(replace(spec, isolation="warm"))
