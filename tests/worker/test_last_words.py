"""A job that died without a traceback: its error carries the last lines of its log, on every road."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from gpulayer_broker.items import read_outcomes
from gpulayer_worker.joblog import JobLog
from tests.worker.conftest import Hire
from tests.worker.lines import Line
from tests.worker.test_agent_warm import array
from tests.workers import Desk, WorkerProcess


def dies(words: str) -> None:
    """Says something and is killed, as by the kernel when memory is over."""
    print(words, flush=True)
    print(f"then: {words}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "type_name", "tail"),
    [
        ("echo loading; echo no CUDA >&2; exit 3", "CommandFailed", "loading\nno CUDA"),
        ("echo loading; sleep 0.05; echo part 17; kill -9 $$", "Signalled", "loading\npart 17"),
        (r"printf '\033[31mred\033[0m \033]0;title\007\r 99%%\377\n'; exit 1", "CommandFailed", " 99%\ufffd"),
        (
            "for n in $(seq 100); do echo $n; done; exit 1",
            "CommandFailed",
            "\n".join(map(str, range(81, 101))),
        ),
    ],
)
def test_a_command_that_dies_tells_its_last_lines(
    desk: Desk, worker: WorkerProcess, script: str, type_name: str, tail: str
) -> None:
    job = desk.shell(script)
    assert desk.final(job).state == "failed"
    assert (desk.error(job)["type"], desk.error(job)["tail"]) == (type_name, tail)


def test_a_job_past_its_timeout_tells_what_it_said_last(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("echo waits for a lock; sleep 300", timeout_s=0.5)
    assert desk.final(job).state == "timed_out"
    assert desk.error(job)["tail"] == "waits for a lock"


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_function_whose_process_is_killed_tells_its_last_lines(
    desk: Desk, worker: WorkerProcess, isolation: str
) -> None:
    job = desk.function(dies, "batch 4", isolation=isolation)
    assert desk.final(job).end_reason == "signal"
    assert desk.error(job)["tail"] == "batch 4\nthen: batch 4"


def test_a_call_of_a_ride_tells_its_own_last_lines(desk: Desk, hire: Hire) -> None:
    def work(n: int) -> int:
        print(f"call {n}", flush=True)
        if n == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return n

    line = Line(desk, work)
    hire(slots=1)
    assert desk.final(line.jobs[5]).end_reason == "signal"
    assert desk.error(line.jobs[5])["tail"] == "call 5"
    assert desk.final(line.jobs[6]).state == "succeeded"


def test_an_item_of_a_map_tells_what_was_written_last(desk: Desk, worker: WorkerProcess) -> None:
    job = array(desk, dies, [("item 0",)])
    desk.final(job)
    found = [
        outcome for start, page in desk.queue.pages(job).items() for outcome in read_outcomes(start, page)
    ]
    assert [orjson.loads(outcome.data)["tail"] for _, outcome in found] == ["item 0\nthen: item 0"]


def test_a_function_that_raised_has_its_traceback_and_no_last_lines(
    desk: Desk, worker: WorkerProcess
) -> None:
    def fails() -> Any:
        print("loading", flush=True)
        raise KeyError("lr")

    job = desk.function(fails)
    assert desk.final(job).end_reason == "user_error"
    assert "KeyError" in desk.error(job)["traceback"]
    assert "tail" not in desk.error(job)


def test_who_wrote_nothing_has_no_last_lines(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("exit 3")
    desk.final(job)
    assert "tail" not in desk.error(job)


def test_a_log_gives_its_last_bytes_with_the_stream_of_each(tmp_path: Path) -> None:
    log = JobLog("j_1", "1.x", tmp_path / "log", 1 << 24, 2)
    for stream, data in (
        ("out", b"abc"),
        ("err", b"de"),
        ("out", b"x" * (2 << 20)),
        ("out", b"fg"),
        ("err", b"h"),
    ):
        log.write(stream, data)
    assert log.last(4) == [("out", b"xfg"), ("err", b"h")]
    assert b"".join(data for _, data in log.last(1 << 30)) == b"abcde" + b"x" * (2 << 20) + b"fgh"
    log.forget()
    assert log.last(4) == []
