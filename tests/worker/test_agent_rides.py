"""Rides through real workers: calls that share a slot are as separate as if each had it for itself."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpulayer_broker import functions
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk

from .conftest import Hire
from .lines import COUNT, Line
from .processes.bench import is_gone


def calls_made(desk: Desk) -> int:
    text = desk.link.call("INFO", "commandstats").decode()
    return int(text.split("cmdstat_fcall:calls=")[1].split(",")[0])


def test_calls_of_a_ride_share_a_process_and_each_is_its_own_job(desk: Desk, hire: Hire) -> None:
    line = Line(
        desk, lambda n: (os.getpid(), n, os.environ["GPULAYER_JOB_ID"], os.environ["GPULAYER_ATTEMPT"])
    )

    hire(slots=1)

    values = line.values()
    assert [value[1] for value in values] == list(range(COUNT))
    assert [value[2:] for value in values] == [(job, str(desk.record(job).attempt)) for job in line.jobs]
    assert len({value[0] for value in values}) == 1


def test_a_ride_costs_a_few_calls_of_the_queue(desk: Desk, hire: Hire) -> None:
    line = Line(desk, int)
    hire(slots=1)
    line.states()
    before = calls_made(desk)
    line.jobs = [line.submit(number) for number in range(400)]
    submitted = calls_made(desk)

    assert line.states() == {"succeeded"}
    assert submitted - before >= 400
    assert calls_made(desk) - submitted < 200


def test_each_keeps_its_own_output_and_results_files(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> list[str]:
        here = sorted(os.listdir(".")) + sorted(os.listdir("outputs"))
        if n % 3 == 0:
            print(f"words of {n}")
        if n % 5 == 0:
            Path("outputs", f"{n}.txt").write_text(str(n))
        return here

    line = Line(desk, work)
    hire(slots=1)

    assert line.values() == [["outputs"]] * COUNT
    for number, job in enumerate(line.jobs):
        assert desk.whole_log(job) == (f"words of {number}\n".encode() if number % 3 == 0 else b"")
        if number % 5 == 0:
            assert desk.output(job, f"outputs/{number}.txt") == str(number).encode()
        else:
            assert not desk.record(job).outputs


def test_a_call_that_only_wrote_is_not_given_the_files_of_the_next(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> None:
        fork_server = Path(f"/proc/{os.getppid()}/stat").read_text()
        worker = int(fork_server.rpartition(") ")[2].split()[1])
        if n == 0:
            os.kill(worker, signal.SIGSTOP)  # it hears of this call's end together with the next one's
            print("words")
        if n == 1:
            Path("outputs", "file.txt").write_text("1")
            os.kill(worker, signal.SIGCONT)

    line = Line(desk, work)
    hire(slots=1)
    line.states()

    assert desk.whole_log(line.jobs[0]) == b"words\n"
    assert not desk.record(line.jobs[0]).outputs
    assert desk.output(line.jobs[1], "outputs/file.txt") == b"1"


def test_what_a_call_does_to_its_process_does_not_reach_the_next(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> tuple[str, str | None]:
        seen = (os.path.basename(os.getcwd()), os.environ.get("LEFT"))
        os.environ["LEFT"] = str(n)
        os.chdir("/")
        return seen

    line = Line(desk, work)
    hire(slots=1)

    assert line.values() == [("work", None)] * COUNT


def test_an_error_and_a_crash_are_those_of_one_call(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> int:
        if n == 3:
            raise KeyError("no such thing")
        if n == 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        if n == 6:
            os._exit(7)
        return n

    line = Line(desk, work)
    hire(slots=1)

    ends = [(desk.final(job).state, desk.record(job).end_reason) for job in line.jobs]
    bad = {3: ("failed", "user_error"), 5: ("failed", "signal"), 6: ("failed", "user_error")}
    assert ends == [bad.get(number, ("succeeded", "")) for number in range(COUNT)]
    assert desk.error(line.jobs[3])["type"] == "KeyError"
    assert desk.error(line.jobs[6])["exit_code"] == 7
    assert {desk.record(job).losses for job in line.jobs} == {0}


def test_what_a_call_started_is_gone_before_the_next_begins(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> int:
        if n != 4:
            return os.getpid()
        import subprocess

        return subprocess.Popen(["sleep", "1000"]).pid

    line = Line(desk, work)
    hire(slots=1)

    values = line.values()
    assert is_gone(values[4])
    assert values[3] != values[5]


def test_threads_that_a_fresh_process_waits_for_are_waited_for(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> None:
        if n == 4:
            threading.Thread(target=time.sleep, args=(0.2,)).start()

    line = Line(desk, work)
    hire(slots=1)

    assert line.states() == {"succeeded"}


def test_a_slow_call_keeps_nobody_behind_it(desk: Desk, hire: Hire, tmp_path: Path) -> None:
    gate, ran = tmp_path / "gate", tmp_path / "ran"

    def work(n: int) -> int:
        with open(ran, "a") as file:
            file.write(f"{n} ")
        if n == 2:
            print("waiting", flush=True)
            while not gate.exists():
                time.sleep(0.01)
        return n

    line = Line(desk, work)
    hire(slots=2)

    others = [job for number, job in enumerate(line.jobs) if number != 2]
    assert {desk.final(job).state for job in others} == {"succeeded"}
    assert desk.record(line.jobs[2]).state == "running"
    attempt = desk.record(line.jobs[2]).attempt
    wait_until(lambda: desk.tail(line.jobs[2], attempt) == b"waiting\n", PATIENCE_S, "its output is shipped")
    gate.touch()
    assert line.values() == list(range(COUNT))
    assert sorted(map(int, ran.read_text().split())) == list(range(COUNT))


@pytest.mark.parametrize("number", [2, 5])
def test_one_of_a_ride_is_cancelled_and_the_others_run(
    desk: Desk, hire: Hire, tmp_path: Path, number: int
) -> None:
    gate = tmp_path / "gate"

    def work(n: int) -> int:
        if n == 2:
            while not gate.exists():
                time.sleep(0.01)
        return n

    line = Line(desk, work)
    hire(slots=1)
    desk.reaches(line.jobs[1], "succeeded")
    desk.queue.run(functions.cancel(line.jobs[number]))
    if number != 2:
        desk.reaches(line.jobs[number], "cancelled")
        gate.touch()

    ends = [desk.final(job).state for job in line.jobs]
    assert ends == ["cancelled" if n == number else "succeeded" for n in range(COUNT)]


def test_each_call_has_its_own_time(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> int:
        if n == 3:
            time.sleep(1000)
        return n

    line = Line(desk, work, timeout_s=0.5)
    hire(slots=1)

    ends = [desk.final(job).state for job in line.jobs]
    assert ends == ["timed_out" if n == 3 else "succeeded" for n in range(COUNT)]


def test_a_killed_worker_loses_no_call_and_ends_none_twice(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> int:
        time.sleep(0.005)
        return n

    line = Line(desk, work)
    first = hire(slots=2)
    desk.reaches(line.jobs[3], "succeeded")
    first.kill()
    hire(slots=2)

    assert line.values() == list(range(COUNT))
    assert {desk.record(job).losses for job in line.jobs} <= {0, 1}
    root = desk.queue.keys.root
    wait_until(lambda: not desk.link.call("EXISTS", root + "rides"), PATIENCE_S, "no ride is left")


def test_a_worker_that_is_stopped_finishes_its_ride(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> int:
        time.sleep(0.002)
        return n

    line = Line(desk, work)
    first = hire(slots=1)
    desk.reaches(line.jobs[0], "succeeded")
    assert first.stop() == 0
    hire(slots=1)

    assert line.values() == list(range(COUNT))
    assert {desk.record(job).losses for job in line.jobs} == {0}


@pytest.mark.parametrize("function", [int, print], ids=["quiet", "loud"])
def test_single_calls_tell_what_their_lane_takes(
    desk: Desk, hire: Hire, function: Callable[[int], Any]
) -> None:
    line = Line(desk, function)
    desk.link.call("DEL", line.key)
    for job in line.jobs[1:]:
        desk.queue.run(functions.cancel(job))
    hire(slots=1)

    assert desk.final(line.jobs[0]).state == "succeeded"
    known = desk.link.call("GET", line.key)
    assert known == b"-" if function is print else float(known) < 60e6


def test_a_call_that_pauses_while_the_queue_is_away_mixes_up_no_results(
    desk: Desk, hire: Hire, tmp_path: Path
) -> None:
    mark, path = tmp_path / "once", desk.endpoint.path

    def work(n: int) -> int:
        if n == 0 and not mark.exists():
            mark.touch()
            with socket.socket(
                socket.AF_UNIX
            ) as link:  # at once: the worker gives the others back after 50 ms
                link.connect(path)
                link.sendall(b"CLIENT PAUSE 8000 ALL\r\n")
                link.recv(16)
            time.sleep(10)  # longer than the worker asks the queue to take them
        return n

    line = Line(desk, work)

    hire(slots=1)

    assert line.values() == list(range(COUNT))


def test_an_exception_whose_pickle_is_gone_is_told_without_it(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> int:
        if n != 2:
            return n

        class Large(Exception):
            def __init__(self) -> None:
                self.data = os.urandom(8 << 20)

        def removing() -> None:
            while True:
                for file in Path.cwd().parent.glob("result*"):
                    file.unlink(missing_ok=True)

        threading.Thread(target=removing, daemon=True).start()
        raise Large

    line = Line(desk, work)

    hire(slots=1)

    records = [desk.final(job) for job in line.jobs]
    assert [r.id for r in records if r.state != "succeeded"] == [line.jobs[2]]
    assert records[2].end_reason == "user_error"
    assert [desk.value(job) for n, job in enumerate(line.jobs) if n != 2] == [
        n for n in range(COUNT) if n != 2
    ]
