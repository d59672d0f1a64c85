"""Rides of calls with a process each, through real workers: they share a slot, one after another, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from gpulayer_broker import functions
from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.spec import lane_of
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk

from .conftest import Hire
from .lines import COUNT, NUMBERS, RIDE, Line, Stop, ask, attempt, losses, note, own_worker, wait_for
from .test_agent_usage import needs_memory_groups


def wall_s(desk: Desk, job: str) -> float:
    return float(orjson.loads(desk.record(job).usage)["wall_s"])


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


@needs_memory_groups
def test_a_call_over_its_memory_takes_no_other_along(desk: Desk, stop: Stop) -> None:
    def work(n: int) -> int:
        return len(bytearray(200 << 20)) if n == 1 else n

    desk.needs = build_requirements(memory="64MiB")
    line = stop.line(work)

    ends = [(desk.final(job).state, desk.record(job).end_reason) for job in line.jobs]
    assert ends == [("failed", "oom") if n == 1 else ("succeeded", "") for n in NUMBERS]


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
