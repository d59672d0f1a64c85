"""Jobs that are lined up in the fork server: one after another, and nobody is asked between two.

The first of a line runs until the file `go` is there. What is asked of the fork server after a request is answered
after it: by then the line is as it was asked for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gpulayer_worker.processes.fork_server import ForkServer
from gpulayer_worker.processes.job import JobHandle
from gpulayer_worker.runner import proctree
from tests.support import PATIENCE_S, wait_until

from .bench import Bench, is_gone, stand_in, value, wait_gone

UNTIL_GO = "until [ -e go ]; do sleep 0.02; done"
# What stays until `go` whatever it is told, and a main process that does not.
STAYS = f"sh -c 'trap \"\" TERM; echo $$ > left; {UNTIL_GO}' &"
LEAVES_ONE = STAYS + " sleep 1000"
IS_LEFT = 'kill -0 "$(cat left)" 2>/dev/null && echo beside || echo alone'


class Line(Bench):
    """Jobs of one fork server, of which the first holds up the others."""

    server: ForkServer

    def first(self, script: str = UNTIL_GO, **options: Any) -> JobHandle:
        """Starts it; it runs when this returns."""
        handle = self.shell(script, **options)
        handle.started.result(PATIENCE_S)
        return handle

    def go(self) -> None:
        """Lets the first one end."""
        (self.folder / "go").touch()

    def begins(self, name: str, after: JobHandle, **options: Any) -> JobHandle:
        """Lines one up that makes a file of this name; it fails where the first one cannot have ended yet."""
        return self.shell(f"touch {name}; [ -e go ]", after=after.id, **options)

    @contextmanager
    def ending_meanwhile(self, handle: JobHandle) -> Iterator[None]:
        """What is asked for in here, the fork server hears at the moment at which it hears of this job's end."""
        os.kill(self.server.pid, signal.SIGSTOP)
        try:
            os.kill(handle.started.result(0), signal.SIGKILL)
            wait_gone(handle.started.result(0))
            yield
        finally:
            os.kill(self.server.pid, signal.SIGCONT)

    def running(self) -> set[str]:
        """What has begun and is not gone."""
        return set(self.server.stats()["jobs"])

    def open_files(self) -> list[int]:
        """How many are open here, and in the fork server."""
        self.server.stats()
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), self.server.pid)]


@pytest.fixture
def line(tmp_path: Path, server: ForkServer) -> Line:
    return Line(tmp_path, server)


def code_of(handle: JobHandle) -> int | None:
    end = handle.wait(PATIENCE_S)
    assert end.exit is not None, end
    return end.exit.code


# --- whose turn it is ---


def test_what_is_open_for_one_that_waits_is_open_in_no_other_process(line: Line) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = value(line.run(open_files))
    waiting = line.begins("later", line.first(), on_progress=lambda _: None)
    line.server.stats()

    assert value(line.run(open_files)) == before
    line.go()
    assert waiting.wait(PATIENCE_S).exit is not None


def test_one_that_is_lined_up_begins_when_the_other_is_gone(line: Line) -> None:
    first = line.first()
    second = line.begins("second", first)

    assert line.running() == {first.id}
    assert not second.started.done()
    line.go()

    assert code_of(second) == 0
    assert first.gone.done()
    assert (line.folder / "second").exists()


def test_it_waits_for_what_outlives_the_others_main_process(line: Line) -> None:
    first = line.first(LEAVES_ONE)
    line.number_in("left")
    second = line.shell(IS_LEFT, after=first.id)

    first.end(grace_s=PATIENCE_S)
    first.exited.result(PATIENCE_S)
    assert line.running() == {first.id}
    line.go()

    assert code_of(second) == 0
    assert line.out(second) == "alone\n"
    assert first.wait(0).strays == ()


def test_what_the_other_leaves_behind_is_ended_before(line: Line) -> None:
    first = line.shell("setsid sleep 1000 & echo $! > left; until [ -e go ]; do sleep 0.02; done")
    left = line.number_in("left")
    second = line.shell(IS_LEFT, after=first.id)
    line.go()

    assert code_of(second) == 0
    assert line.out(second) == "alone\n"
    assert [stray.split()[0] for stray in first.wait(0).strays] == [str(left)]


def test_it_begins_at_once_where_there_is_no_such_job(line: Line) -> None:
    assert code_of(line.shell("exit 3", after="nobody")) == 3


def test_it_begins_at_once_where_the_other_is_gone_already(line: Line) -> None:
    first = line.shell("exit 0")
    first.wait(PATIENCE_S)

    assert code_of(line.shell("exit 3", after=first.id)) == 3


def test_a_long_line_runs_one_by_one(line: Line) -> None:
    alone = "mkdir running || echo clash; rmdir running"
    handles = [line.first(f"{UNTIL_GO}; {alone}")]
    for _ in range(30):
        handles.append(line.shell(alone, after=handles[-1].id, is_quick=True))
    line.go()

    assert [code_of(handle) for handle in handles] == [0] * 31
    assert {line.out(handle) for handle in handles} == {""}


def test_two_that_wait_for_the_same_job_both_begin(line: Line) -> None:
    first = line.first()
    others = [line.begins(f"other{number}", first) for number in range(2)]
    line.go()

    assert [code_of(other) for other in others] == [0, 0]


def test_functions_and_their_results_come_from_a_line(line: Line) -> None:
    first = line.first()
    calls = [line.function(pow, 2, 10, after=first.id, is_quick=True)]
    calls.append(line.function(pow, 2, 11, after=calls[0].id, is_quick=True))
    line.go()

    assert [value(call.wait(PATIENCE_S)) for call in calls] == [1024, 2048]


# --- out of the line ---


def recalled(handle: JobHandle) -> None:
    handle.recall()


def ended(handle: JobHandle) -> None:
    handle.end(grace_s=PATIENCE_S)


def killed(handle: JobHandle) -> None:
    handle.kill()


@pytest.mark.parametrize("drop", [recalled, ended, killed])
def test_one_that_has_not_begun_is_dropped(line: Line, drop: Callable[[JobHandle], None]) -> None:
    first = line.first()
    second = line.begins("second", first)

    drop(second)

    end = second.wait(PATIENCE_S)
    assert (end.refused, end.exit, end.lost) == ("ended before it began", None, False)
    with pytest.raises(RuntimeError, match="ended before it began"):
        second.started.result(0)
    line.go()
    assert code_of(first) == 0
    assert line.running() == set()
    assert not (line.folder / "second").exists()


def test_one_whose_turn_has_just_come_can_still_be_dropped(line: Line) -> None:
    first = line.first("exec sleep 1000")
    second = line.begins("second", first)
    line.server.stats()

    with line.ending_meanwhile(first):
        second.recall()

    assert second.wait(PATIENCE_S).refused == "ended before it began"
    assert not (line.folder / "second").exists()


def test_whoever_comes_when_the_turn_has_come_waits(line: Line) -> None:
    first = line.first("exec sleep 1000")
    second = line.shell(UNTIL_GO, after=first.id)
    line.server.stats()

    with line.ending_meanwhile(first):
        third = line.begins("third", second)

    second.started.result(PATIENCE_S)
    assert line.running() == {second.id}
    line.go()
    assert code_of(third) == 0


def test_a_recall_does_nothing_to_one_that_runs(line: Line) -> None:
    first = line.first()
    second = line.shell("echo began > second; until [ -e on ]; do sleep 0.02; done; exit 3", after=first.id)
    line.go()
    second.started.result(PATIENCE_S)

    second.recall()
    assert line.running() >= {second.id}
    (line.folder / "on").touch()

    assert code_of(second) == 3


def test_a_recall_of_one_that_is_gone_does_nothing(line: Line) -> None:
    first = line.shell("exit 3")
    first.wait(PATIENCE_S)

    first.recall()

    assert line.running() == set()
    assert code_of(first) == 3


def test_whoever_waits_for_a_dropped_one_waits_for_what_that_waited_for(line: Line) -> None:
    first = line.first()
    second = line.begins("second", first)
    third = line.begins("third", second)

    second.recall()
    assert second.wait(PATIENCE_S).refused is not None
    assert line.running() == {first.id}
    line.go()

    assert code_of(third) == 0
    assert not (line.folder / "second").exists()


def test_nothing_of_a_dropped_one_stays_open(line: Line) -> None:
    first = line.first()
    before = line.open_files()
    waiting = [line.begins(f"other{number}", first, on_progress=print) for number in range(5)]
    assert line.open_files() > before

    for handle in waiting:
        handle.recall()
    for handle in waiting:
        handle.wait(PATIENCE_S)

    assert line.open_files() == before
    line.go()
    first.wait(PATIENCE_S)


def test_nothing_of_a_line_that_is_over_stays_open(line: Line) -> None:
    line.first("exit 0").wait(PATIENCE_S)
    before = line.open_files()
    handles = [line.first()]
    for number in range(10):
        handles.append(line.begins(f"other{number}", handles[-1], is_quick=True, on_progress=print))
    line.go()
    for handle in handles:
        handle.wait(PATIENCE_S)

    assert line.open_files() == before


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_asked_of_lines_all_are_told_and_nothing_is_left(line: Line, seed: int) -> None:
    line.first("exit 0").wait(PATIENCE_S)
    before, random = line.open_files(), Random(seed)
    handles: list[JobHandle] = []
    asked: list[Callable[[JobHandle], object]] = [recalled, ended, killed, str, str, str]
    for _ in range(50):
        handles.append(
            line.shell(
                random.choice(["exit 0", "sleep 0.02", "sleep 0.02 & exit 0"]),
                after=random.choice(handles[-5:]).id if handles and random.random() < 0.8 else "",
                is_quick=random.random() < 0.5,
                lease_until_s=proctree.lease_clock_s() + random.choice([0.05, 10 * PATIENCE_S]),
                on_progress=print,
            )
        )
        random.choice(asked)(random.choice(handles[-8:]))

    for handle in handles:
        end = handle.wait(PATIENCE_S)
        assert not end.lost
        assert (end.exit is None) == (end.refused is not None)
        assert handle.started.done()
    assert line.running() == set()
    assert line.open_files() == before


# --- leases ---


def test_a_lease_is_looked_at_when_the_turn_comes(line: Line) -> None:
    first = line.first()
    until_s = proctree.lease_clock_s() + 0.05
    second = line.begins("second", first, lease_until_s=until_s)
    wait_until(lambda: proctree.lease_clock_s() > until_s, PATIENCE_S, "the lease is over")
    assert line.running() == {first.id}
    assert not second.gone.done()
    line.go()

    end = second.wait(PATIENCE_S)
    assert (end.refused, end.expired) == ("its lease was over before it began", True)
    assert not (line.folder / "second").exists()


def test_a_lease_that_is_extended_in_the_line_counts(line: Line) -> None:
    first = line.first()
    until_s = proctree.lease_clock_s() + 0.05
    second = line.begins("second", first, lease_until_s=until_s)
    second.extend_lease(proctree.lease_clock_s() + 10 * PATIENCE_S)
    wait_until(lambda: proctree.lease_clock_s() > until_s, PATIENCE_S, "the first lease is over")
    line.go()

    assert code_of(second) == 0


def test_a_lease_that_was_extended_in_the_line_ends_the_job_that_runs(line: Line) -> None:
    first = line.first()
    second = line.shell(
        "sleep 1000", after=first.id, lease_until_s=proctree.lease_clock_s() + 10 * PATIENCE_S
    )
    second.extend_lease(proctree.lease_clock_s() + 1)
    line.go()

    assert second.wait(PATIENCE_S).expired


def test_those_behind_one_that_may_not_begin_do_begin(tmp_path: Path) -> None:
    """And are told of without being asked, here by a fork server that nobody asks for life meanwhile."""
    server = ForkServer(sys.executable, {}, look_every_s=10 * PATIENCE_S)
    try:
        line = Line(tmp_path, server)
        first = line.first()
        until_s = proctree.lease_clock_s() + 0.05
        second = line.begins("second", first, lease_until_s=until_s)
        third = line.begins("third", second)
        last = line.begins("last", third, lease_until_s=until_s)
        wait_until(lambda: proctree.lease_clock_s() > until_s, PATIENCE_S, "the lease is over")
        line.go()

        assert second.wait(PATIENCE_S).expired
        assert code_of(third) == 0
        assert last.wait(PATIENCE_S).expired
    finally:
        server.close()


# --- ends of others ---


def test_those_that_wait_go_with_their_fork_server_and_had_not_begun(line: Line) -> None:
    before = len(os.listdir("/proc/self/fd"))
    first = line.first("echo $$ > main; " + UNTIL_GO)
    main = line.number_in("main")
    second = line.begins("second", first)
    line.server.stats()

    os.kill(line.server.pid, 9)

    assert first.wait(PATIENCE_S).lost
    end = second.wait(PATIENCE_S)
    assert (end.lost, end.exit, end.refused) == (True, None, "the fork server ended before it began")
    with pytest.raises(RuntimeError, match="ended before it began"):
        second.started.result(0)
    assert is_gone(main)
    assert not (line.folder / "second").exists()
    assert len(os.listdir("/proc/self/fd")) < before


def test_those_that_wait_never_begin_once_their_worker_is_gone(tmp_path: Path) -> None:
    with stand_in(tmp_path, "echo $$ > main; sleep 1000", "line") as (worker, server):
        main = Bench.number_in_folder(tmp_path, "main")
        worker.kill()
        worker.wait()

        wait_gone(main, server)
        assert not (tmp_path / "behind").exists()


def test_one_dropped_while_imports_keep_all_waiting_leaves_the_line_in_order(
    tmp_path: Path,
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "mine.py").write_text(f"import os\nopen({str(tmp_path / 'gate')!r}).read()\n")
    os.mkfifo(tmp_path / "gate")
    server = ForkServer(sys.executable, {}, frozenset({"mine"}), (str(packages),))
    try:
        line = Line(tmp_path, server)
        first = line.shell(UNTIL_GO)
        second = line.begins("second", first)
        third = line.begins("third", second)
        second.recall()
        assert second.wait(PATIENCE_S).refused == "ended before it began"

        (tmp_path / "gate").write_text("open")
        first.started.result(PATIENCE_S)
        assert line.running() == {first.id}
        line.go()

        assert code_of(third) == 0
    finally:
        server.close()


# --- what is told of a job ---


def test_a_quick_job_that_runs_on_is_told_and_heard_while_it_runs(line: Line) -> None:
    running = threading.Event()
    progress: list[dict[str, float]] = []

    def work(folder: str) -> None:
        import os
        import time

        os.write(int(os.environ["GPULAYER_PROGRESS_FD"]), b'{"done": 3, "total": 4}\n')
        while not os.path.exists(folder + "/go"):
            time.sleep(0.02)

    handle = line.function(
        work, str(line.folder), is_quick=True, on_running=running.set, on_progress=progress.append
    )

    assert not is_gone(handle.started.result(PATIENCE_S))
    assert running.wait(PATIENCE_S)
    wait_until(lambda: progress, PATIENCE_S, "its progress is heard")
    assert not handle.exited.done()
    line.go()
    assert code_of(handle) == 0
    assert progress == [{"done": 3, "total": 4}]


def test_one_that_ended_early_was_started_all_the_same(line: Line) -> None:
    handle = line.shell("echo $$", is_quick=True)

    assert code_of(handle) == 0
    assert handle.started.result(0) == int(line.out(handle))


def test_whoever_hears_of_an_end_has_heard_of_the_start(line: Line) -> None:
    handle = line.shell(LEAVES_ONE, is_quick=True)
    line.number_in("left")
    handle.end(grace_s=PATIENCE_S)

    handle.exited.result(PATIENCE_S)
    assert handle.started.done()
    assert not handle.gone.done()
    line.go()
    handle.wait(PATIENCE_S)


def test_its_time_is_that_of_its_process(line: Line) -> None:
    first = line.first()
    second = line.shell("sleep 0.3", after=first.id)
    line.go()

    end = second.wait(PATIENCE_S)
    assert end.exit is not None
    assert end.exit.wall_s is not None
    assert end.exit.wall_s >= 0.3


def test_a_callback_that_fails_takes_no_job_along(bench: Bench) -> None:
    def fails() -> None:
        raise OSError("no room to listen")

    handle = bench.shell("until [ -e go ]; do sleep 0.02; done; echo words", on_running=fails)
    handle.started.result(PATIENCE_S)
    (bench.folder / "go").touch()

    assert handle.wait(PATIENCE_S).exit is not None
    assert bench.out(handle) == "words\n"
