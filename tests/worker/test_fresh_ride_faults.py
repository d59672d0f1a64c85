"""What goes wrong in the middle of a ride of calls with a process each: it is one call's affair, or nobody's."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk

from .conftest import Hire
from .lines import COUNT, NUMBERS, RIDE, Line, Stop, ask, attempt, losses, note, own_worker
from .test_agent_troubles import small_disk


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
    assert {n for n, job in enumerate(line.jobs) if desk.record(job).losses} == {0}
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


def test_on_a_full_disk_those_that_have_not_begun_go_back(desk: Desk, stop: Stop, tmp_path: Path) -> None:
    full = tmp_path / "full"

    def work(n: int) -> int:
        if n == 0 and not full.exists():
            with suppress(OSError), open(ballast, "wb", buffering=0) as file:
                while file.write(bytes(1 << 14)):
                    continue
            full.touch()
        return n

    with small_disk(tmp_path / "state", 6) as state:
        ballast = state / "ballast"
        line = stop.line(work, worker={"environment": {"GPULAYER_STATE_DIR": str(state)}})
        wait_until(full.exists, PATIENCE_S, "the disk is full")
        wait_until(lambda: held(desk) == 0, PATIENCE_S, "nothing is held")
        waiting = [job for job in line.jobs if desk.record(job).state == "queued"]
        ballast.unlink()

        assert len(waiting) > COUNT - RIDE
        assert line.values() == NUMBERS
        assert losses(line) == {0}
        stop.worker.end()


def held(desk: Desk) -> int:
    return int(desk.link.call("HLEN", desk.queue.keys.root + "rides"))


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
