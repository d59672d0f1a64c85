"""Starting directly, as on macOS: the same handles and endings without a fork server."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer_worker.processes.ending import lease_clock_s
from gpulayer_worker.processes.spawn import SpawnStarter
from tests.support import PATIENCE_S

from .bench import Bench, error, is_gone, value


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    starter = SpawnStarter(sys.executable)
    yield Bench(tmp_path, starter)
    starter.close()


def test_a_command_runs_and_its_end_is_told(bench: Bench) -> None:
    handle = bench.shell("echo words; exit 3")
    end = handle.wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.code == 3
    assert bench.out(handle) == "words\n"


def test_a_function_runs_in_a_python_of_its_own(bench: Bench) -> None:
    seen: list[Any] = []

    def work(x: int) -> list[Any]:
        import os

        os.write(int(os.environ["GPULAYER_PROGRESS_FD"]), b'{"done": 1, "total": 2}\n')
        return [x * 2, sys.argv, __name__]

    assert value(bench.run(work, 4, on_progress=seen.append))[:2] == [8, ["function"]]
    assert seen == [{"done": 1.0, "total": 2.0}]


def test_an_error_is_told_without_the_runners_frames(bench: Bench) -> None:
    told = error(bench.run(lambda: 1 // 0))

    assert told["type"] == "ZeroDivisionError"
    assert "runner" not in told["traceback"]


def test_an_unknown_command_ends_with_127_and_one_line(bench: Bench) -> None:
    handle = bench.command("no-such-program")
    end = handle.wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.code == 127
    assert bench.err(handle) == "gpulayer: no-such-program: command not found\n"


def test_a_background_child_is_told_and_ended(bench: Bench) -> None:
    end = bench.shell("sleep 1000 & echo $! > child").wait(PATIENCE_S)

    assert is_gone(bench.number_in("child"))
    assert len(end.strays) == 1


def test_what_ignores_term_is_killed_after_the_grace(bench: Bench) -> None:
    handle = bench.shell("trap '' TERM; echo 1 > child; while :; do sleep 0.05; done")
    bench.number_in("child")

    handle.end(grace_s=0.2)
    end = handle.wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.signal == signal.SIGKILL


def test_a_job_is_killed_when_its_lease_passes(bench: Bench) -> None:
    end = bench.shell("sleep 1000", lease_until_s=lease_clock_s() + 4).wait(PATIENCE_S)

    assert end.expired


def test_closing_ends_every_job(bench: Bench) -> None:
    handle = bench.shell("echo $$ > main; exec sleep 1000")
    main = bench.number_in("main")

    bench.server.close()

    assert is_gone(main)
    assert handle.wait(PATIENCE_S).exit is not None
