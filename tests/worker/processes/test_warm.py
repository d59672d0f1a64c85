"""Warm processes: many calls one after another, as if each were alone, and never longer than they are good."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gpulayer_worker.processes.cgroup import Groups, open_groups
from gpulayer_worker.processes.pool import Pool
from gpulayer_worker.processes.warm import Answer, Batch, BatchEnd, WarmKey, WarmProcess
from gpulayer_worker.processes.warm_lane import WarmLane
from gpulayer_worker.runner.proctree import lease_clock_s
from tests.support import PATIENCE_S, wait_until

from .bench import is_gone, pickled, wait_gone

KEY = WarmKey(sys.executable, frozenset({"PATH": os.environ["PATH"]}.items()))


class Room:
    """A lane, and batches whose output goes into files of the test's folder."""

    def __init__(self, folder: Path, lane: WarmLane) -> None:
        self.folder, self.lane = folder, lane
        self.answers: list[Answer] = []

    def batch(self, function: Callable[..., Any] | bytes, *items: tuple[Any, ...], **facts: Any) -> Batch:
        data = function if isinstance(function, bytes) else pickled(function)
        options: dict[str, Any] = {
            "python": sys.version_info[:3],
            "cwd": self.folder,
            "env": {"PATH": os.environ["PATH"]},
            "payload": self.folder / "result",
            "stdout": os.open(self.folder / "out", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
            "stderr": os.open(self.folder / "err", os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        } | facts
        pickles = [pickle.dumps((item, {})) for item in items]
        return Batch(sha256=sha256(data).hexdigest(), function=lambda: data, items=pickles, **options)

    def run(
        self,
        process: WarmProcess,
        function: Callable[..., Any] | bytes,
        *items: tuple[Any, ...],
        **facts: Any,
    ) -> BatchEnd:
        self.answers = []
        batch = self.batch(function, *items, **facts)
        try:
            return process.run(batch, self.answers.append)
        finally:
            os.close(batch.stdout)
            os.close(batch.stderr)

    def call(self, function: Callable[..., Any], *arguments: Any, key: WarmKey = KEY, **facts: Any) -> Any:
        """One call of one item, on a process of the lane."""
        process = self.lane.acquire(key)
        try:
            end = self.run(process, function, arguments, **facts)
        finally:
            self.lane.release(process)
        assert end.finished, end
        return self.value()

    def value(self, index: int = 0) -> Any:
        report = self.answers[index].report
        assert report.ok, report.header
        data = report.read_payload()
        return pickle.loads(data) if report.header["kind"] == "pickle" else json.loads(data)

    def out(self) -> str:
        return (self.folder / "out").read_text()


def do_now(task: Callable[[], object]) -> None:
    task()


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    groups = open_groups(tmp_path, 4096)
    yield groups
    groups.close()


@pytest.fixture
def lane(groups: Groups) -> Iterator[WarmLane]:
    pool = Pool()
    lane = WarmLane(pool, groups, 2, do_now)
    yield lane
    lane.close()
    pool.close()


@pytest.fixture
def room(tmp_path: Path, lane: WarmLane) -> Room:
    return Room(tmp_path, lane)


@pytest.fixture
def process(lane: WarmLane) -> Iterator[WarmProcess]:
    process = lane.acquire(KEY)
    yield process
    lane.release(process)


def twice(number: int) -> int:
    return number * 2


def where() -> int:
    return os.getpid()


# --- calls ---


def test_items_are_called_in_order_and_each_is_answered(room: Room, process: WarmProcess) -> None:
    end = room.run(process, twice, *[(number,) for number in range(100)])

    assert end.finished
    assert [answer.index for answer in room.answers] == list(range(100))
    assert [room.value(index) for index in range(100)] == [2 * number for number in range(100)]


def test_calls_of_one_key_share_a_process(room: Room) -> None:
    assert room.call(where) == room.call(where)


def test_another_key_gets_another_process(room: Room) -> None:
    other = WarmKey(KEY.python, KEY.env, place="other source")

    assert room.call(where) != room.call(where, key=other)


def test_a_function_is_sent_once_and_keeps_its_globals(room: Room, process: WarmProcess) -> None:
    def count(seen: list[int] = []) -> int:  # noqa: B006 - what it keeps is what is tested
        seen.append(1)
        return len(seen)

    data = pickled(count)
    room.run(process, data, ())
    batch = room.batch(data, ())

    def refuse() -> bytes:
        raise AssertionError("the process has the function")

    process.run(replace(batch, function=refuse), room.answers.append)

    assert room.value(1) == 2


def test_many_functions_are_each_found_again_or_sent_again(room: Room, process: WarmProcess) -> None:
    def make(number: int) -> Callable[[], int]:
        return lambda: number

    for _ in range(2):
        for number in range(40):
            room.run(process, make(number), ())
            assert room.value() == number


def test_an_error_is_told_and_the_next_item_is_called(room: Room, process: WarmProcess) -> None:
    def invert(number: int) -> float:
        return 1 / number

    end = room.run(process, invert, (0,), (4,))

    assert end.finished
    assert room.answers[0].report.header["type"] == "ZeroDivisionError"
    assert "runner" not in room.answers[0].report.header["traceback"]
    assert room.value(1) == 0.25


def test_what_is_no_plain_value_travels_as_pickle_and_what_is_large_in_a_file(
    room: Room, process: WarmProcess
) -> None:
    room.run(process, lambda size: (b"x" * size,), (10,), (100_000,))

    assert room.value(0) == (b"x" * 10,)
    assert room.answers[1].report.header["file"] == str(room.folder / "result.1")
    assert room.value(1) == (b"x" * 100_000,)


def test_a_function_that_cannot_be_loaded_fails_each_item_and_not_the_process(
    room: Room, process: WarmProcess
) -> None:
    end = room.run(process, b"no pickle", (), ())

    assert end.finished
    assert [answer.report.header["type"] for answer in room.answers] == ["CannotLoad"] * 2
    assert process.usable


def test_arguments_larger_than_any_buffer_arrive(room: Room, process: WarmProcess) -> None:
    room.run(process, len, ("x" * 20_000_000,))

    assert room.value() == 20_000_000


def test_leaving_by_sys_exit_ends_the_call_alone(room: Room, process: WarmProcess) -> None:
    end = room.run(process, lambda code: sys.exit(code), (0,), (7,), (0,))

    assert end.finished
    assert [answer.report.ok for answer in room.answers] == [True, False, True]
    assert room.answers[1].report.header["exit_code"] == 7


# --- as if alone ---


def test_each_batch_has_its_own_environment_folder_and_output(room: Room, process: WarmProcess) -> None:
    def look() -> list[str | None]:
        print(os.environ["NAME"], flush=True)
        left = os.environ.get("LEFT")
        os.environ["LEFT"] = "behind"
        return [os.environ["NAME"], left, os.getcwd(), sys.path[0], sys.argv[0]]

    (room.folder / "b").mkdir()
    data = pickled(look)
    env = {"PATH": os.environ["PATH"]}
    room.run(process, data, (), env=env | {"NAME": "a"}, name="first")
    first = room.value()
    room.run(process, data, (), env=env | {"NAME": "b"}, cwd=room.folder / "b", name="second")

    assert first == ["a", None, str(room.folder), str(room.folder), "first"]
    assert room.value() == ["b", None, *[str(room.folder / "b")] * 2, "second"]
    assert room.out() == "a\nb\n"


def test_what_was_left_in_a_buffer_belongs_to_its_own_batch(room: Room, process: WarmProcess) -> None:
    def buffered(text: str) -> None:
        import ctypes

        libc = ctypes.CDLL(None)
        libc.printf(text.encode())
        sys.stdout = os.fdopen(1, "w", closefd=False)
        print(text, end="")

    room.run(process, buffered, ("one",))
    first = room.out()
    other = os.open(room.folder / "other", os.O_WRONLY | os.O_CREAT)
    room.run(process, buffered, ("two",), stdout=other)

    assert sorted((first[:3], first[3:])) == ["one", "one"]
    assert (room.folder / "other").read_text() == "twotwo"
    assert room.out() == first


def test_nothing_holds_a_batchs_output_when_it_is_done(room: Room, process: WarmProcess) -> None:
    reader, writer = os.pipe()
    batch = room.batch(lambda: print("words"), (), stdout=writer)
    process.run(batch, room.answers.append)
    os.close(writer)

    assert os.read(reader, 100) == b"words\n"
    assert os.read(reader, 100) == b""
    os.close(reader)
    os.close(batch.stderr)


def test_random_numbers_differ_between_processes_and_go_on_within_one(room: Room) -> None:
    import random

    def draw() -> float:
        return random.random()

    other = WarmKey(KEY.python, KEY.env, place="other")
    numbers = {room.call(draw), room.call(draw), room.call(draw, key=other)}

    assert len(numbers) == 3


def test_progress_goes_to_the_batch_that_made_it(room: Room, process: WarmProcess) -> None:
    def tell(done: int) -> None:
        os.write(int(os.environ["GPULAYER_PROGRESS_FD"]), b'{"done": %d, "total": 9}\n' % done)

    told: list[tuple[int, float]] = []
    for number in (1, 2):
        room.run(
            process,
            tell,
            (number,),
            on_progress=lambda progress, n=number: told.append((n, progress["done"])),
        )

    assert told == [(1, 1.0), (2, 2.0)]


def test_an_answer_does_not_wait_for_a_long_item(room: Room, process: WarmProcess) -> None:
    told = room.folder / "told"

    def linger(number: int, path: str, patience_s: float) -> None:
        """The last one ends when the answers of those before it have arrived."""
        end_s = time.monotonic() + patience_s
        while number == 20 and not os.path.exists(path):
            assert time.monotonic() < end_s, "the answers wait"
            time.sleep(0.01)

    def hear(answer: Answer) -> None:
        room.answers.append(answer)
        if answer.index == 19:
            told.touch()

    process.run(room.batch(linger, *[(n, str(told), PATIENCE_S) for n in range(21)]), hear)

    assert [answer.report.ok for answer in room.answers] == [True] * 21


# --- ends ---


def test_a_crash_is_told_with_its_item_and_all_answers_before(room: Room, process: WarmProcess) -> None:
    def crash(number: int) -> int:
        if number == 50:
            os.kill(os.getpid(), signal.SIGSEGV)
        return number

    end = room.run(process, crash, *[(number,) for number in range(100)])

    assert not end.finished
    assert end.begun
    assert end.answered == len(room.answers) == 50
    assert end.ending is not None
    assert end.ending.exit is not None
    assert end.ending.exit.signal == signal.SIGSEGV
    assert not process.usable


def test_leaving_by_os_exit_is_told_with_its_code(room: Room, process: WarmProcess) -> None:
    end = room.run(process, lambda: os._exit(9), ())

    assert (end.finished, end.answered) == (False, 0)
    assert end.ending is not None
    assert end.ending.exit is not None
    assert end.ending.exit.code == 9


def test_an_item_over_its_time_ends_the_process_and_those_before_count(
    room: Room, process: WarmProcess
) -> None:
    # Together they are over the time of one.
    shorts = [(0.2,)] * 11
    end = room.run(process, time.sleep, *shorts, (1000,), (0,), timeout_s=2, grace_s=0.1)

    assert end.timed_out
    assert end.answered == len(shorts)


def test_a_stopped_batch_ends_its_process_and_nobody_elses(room: Room, process: WarmProcess) -> None:
    batch = room.batch(time.sleep, (1000,))
    ended: list[BatchEnd] = []
    thread = threading.Thread(target=lambda: ended.append(process.run(batch, room.answers.append)))
    thread.start()
    wait_until(lambda: process._current is batch, PATIENCE_S, "the batch runs")

    process.end(room.batch(time.sleep), 0.1)
    assert thread.is_alive()
    process.end(batch, 0.1)
    thread.join(PATIENCE_S)

    assert not ended[0].finished
    assert is_gone(process.pid)


def test_a_batch_whose_lease_passes_is_killed(room: Room, process: WarmProcess) -> None:
    end = room.run(process, time.sleep, (1000,), lease_until_s=lease_clock_s() + 4)

    assert end.ending is not None
    assert end.ending.expired


def test_a_process_that_died_while_idle_is_replaced(room: Room) -> None:
    pid = room.call(where)
    os.kill(pid, signal.SIGKILL)
    wait_gone(pid)
    wait_until(lambda: not any(p.usable for p in room.lane._idle), PATIENCE_S, "the end is known")

    assert room.call(where) != pid


def test_a_background_child_ends_with_the_batch_and_its_process(room: Room) -> None:
    def leave() -> list[int]:
        import subprocess

        return [os.getpid(), subprocess.Popen(["sleep", "1000"]).pid]

    pids = room.call(leave)

    assert all(is_gone(pid) for pid in pids)


def test_threads_that_a_fresh_process_waits_for_are_waited_for(room: Room) -> None:
    def leave() -> int:
        def later() -> None:
            time.sleep(0.2)
            print("later", flush=True)

        threading.Thread(target=later).start()
        return os.getpid()

    pid = room.call(leave)

    assert room.out() == "later\n"
    assert is_gone(pid)


def test_a_process_that_has_grown_is_replaced(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulayer_worker.processes.warm.MOST_GROWTH_BYTES", 50 << 20)

    def grow(size: int, kept: list[bytes] = []) -> int:  # noqa: B006 - what it keeps is what is tested
        kept.append(b"x" * size)
        return os.getpid()

    data = pickled(grow)
    pids = [room.call(data, size) for size in (1, 1, 80 << 20, 1)]  # type: ignore[arg-type]

    assert len(set(pids[:3])) == 1
    assert pids[3] != pids[2]


def test_a_process_is_replaced_after_many_calls(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpulayer_worker.processes.warm.MOST_CALLS", 3)

    pids = [room.call(where) for _ in range(4)]

    assert len(set(pids[:3])) == 1
    assert pids[3] != pids[2]


def test_a_process_with_a_device_is_gone_when_it_is_given_back(room: Room) -> None:
    key = WarmKey(KEY.python, KEY.env, devices=("GPU-a",))

    assert is_gone(room.call(where, key=key))


def test_idle_processes_are_as_many_as_slots_and_end_after_a_while(room: Room, groups: Groups) -> None:
    keys = [WarmKey(KEY.python, KEY.env, place=str(number)) for number in range(3)]
    pids = [room.call(where, key=key) for key in keys]

    assert [is_gone(pid) for pid in pids] == [True, False, False]
    room.lane._idle_s = 0.0
    room.lane.tidy()
    assert all(is_gone(pid) for pid in pids)


def test_exit_handlers_run_when_a_process_is_let_go(room: Room, process: WarmProcess) -> None:
    def register(path: str) -> None:
        import atexit

        atexit.register(lambda: open(path, "w").close())

    room.run(process, register, (str(room.folder / "ended"),))
    process.let_go()

    assert (room.folder / "ended").exists()


def test_a_killed_fork_server_is_told_as_a_loss(room: Room, process: WarmProcess) -> None:
    def parent() -> int:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)
        return 0

    end = room.run(process, parent, ())

    assert not end.finished
    assert end.ending is not None
    assert end.ending.lost


def test_what_each_call_used_is_told(room: Room, process: WarmProcess) -> None:
    def burn(seconds: float) -> None:
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass

    end = room.run(process, burn, (0.0,), (0.2,))

    assert room.answers[0].cpu_s < 0.1 < 0.2 <= room.answers[1].cpu_s
    assert room.answers[1].wall_s >= 0.2
    assert end.max_rss_bytes > 1 << 20


def test_a_process_whose_batch_was_broken_off_serves_nobody_any_more(room: Room, lane: WarmLane) -> None:
    def slow(text: str) -> str:
        time.sleep(0.5)  # so that an answer of the broken batch would come in the middle of the next one
        return text

    def broken(answer: Answer) -> None:
        raise ConnectionError("nobody there to tell")

    process = lane.acquire(KEY)
    batch = room.batch(slow, ("first",), ("second",))
    with pytest.raises(ConnectionError):
        process.run(batch, broken)
    lane.release(process)

    assert not process.usable
    assert room.call(slow, "another's") == "another's"
