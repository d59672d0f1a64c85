"""The pool: jobs that may share a fork server do, others get their own, dead ones are replaced."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpulayer_worker.processes.fork_server import ForkServerGone
from gpulayer_worker.processes.job import JobProcess
from gpulayer_worker.processes.pool import KEPT_SERVERS, CannotFollow, Pool
from gpulayer_worker.runner import proctree
from tests.support import PATIENCE_S

from .bench import Bench, value


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(scratch_root=str(tmp_path), idle_s=0.0)
    yield pool
    pool.close()


@pytest.fixture
def bench(tmp_path: Path, pool: Pool) -> Bench:
    return Bench(tmp_path, pool)


def parent_of(bench: Bench, **options: Any) -> int:
    """The fork server that a function of these options runs under."""
    call = bench.call(pickle.dumps(os.getppid), pickle.dumps(((), {})))
    return int(value(bench.start(call, **options).wait(PATIENCE_S)))


def servers() -> set[int]:
    return {pid for pid in proctree.children(os.getpid()) if "main.py serve" in proctree.command_line(pid)}


def test_functions_that_differ_only_in_what_is_theirs_share_a_server(bench: Bench) -> None:
    first = parent_of(bench, env=bench.env | {"HOME": "/a", "GPULAYER_JOB_ID": "j_1"})
    second = parent_of(bench, env=bench.env | {"HOME": "/b", "GPULAYER_JOB_ID": "j_2"})

    assert first == second


def whole_environment() -> dict[str, str]:
    return dict(os.environ)


def test_nothing_of_the_first_jobs_environment_reaches_the_next(bench: Bench) -> None:
    first = bench.env | {"HF_HOME": "/first", "OMP_NUM_THREADS": "7", "GPULAYER_GPUS": "0"}
    second = bench.env | {"OMP_NUM_THREADS": "1"}

    seen = [value(bench.run(whole_environment, env=env)) for env in (first, second)]

    for environment in seen:
        del environment["GPULAYER_PROCESS"]
    assert seen == [first, second]


def test_another_library_path_gets_another_server(bench: Bench) -> None:
    first = parent_of(bench)
    second = parent_of(bench, env=bench.env | {"LD_LIBRARY_PATH": "/nowhere"})

    assert first != second


def test_other_imports_get_another_server(bench: Bench) -> None:
    assert parent_of(bench) != parent_of(bench, preload=frozenset({"json"}))


def test_a_killed_server_is_replaced(bench: Bench) -> None:
    first = parent_of(bench)
    handle = bench.shell("exec sleep 1000")
    handle.started.result(PATIENCE_S)
    os.kill(first, signal.SIGKILL)
    assert handle.wait(PATIENCE_S).lost

    assert parent_of(bench) != first


def test_a_job_does_not_begin_beside_one_of_another_server_that_it_is_to_follow(
    bench: Bench, pool: Pool
) -> None:
    first = bench.shell("until [ -e go ]; do sleep 0.02; done")
    first.started.result(PATIENCE_S)

    def follower(**options: Any) -> JobProcess:
        call = bench.call(pickle.dumps(os.getppid), pickle.dumps(((), {})))
        facts: dict[str, Any] = {
            "cwd": bench.folder,
            "env": bench.env,
            "stdout": null,
            "stderr": null,
            "after": first.id,
        }
        return JobProcess(id="follower", work=call, **facts | options)

    with open(os.devnull, "wb") as file:
        null = file.fileno()
        with pytest.raises(CannotFollow):
            pool.start(follower(env=bench.env | {"LD_LIBRARY_PATH": "/nowhere"}), first)
        (bench.folder / "go").touch()
        first.wait(PATIENCE_S)

        assert pool.start(follower(), first).wait(PATIENCE_S).exit is not None


def test_idle_servers_end_and_busy_ones_stay(bench: Bench, pool: Pool) -> None:
    handle = bench.shell("sleep 1000")
    handle.started.result(PATIENCE_S)
    idle = parent_of(bench, env=bench.env | {"LD_X": "1"})

    pool.tidy()

    assert idle not in servers()
    assert not handle.gone.done()
    handle.kill()
    handle.wait(PATIENCE_S)


def test_only_a_few_idle_servers_are_kept(tmp_path: Path) -> None:
    pool = Pool()
    bench = Bench(tmp_path, pool)
    used = [parent_of(bench, env=bench.env | {"LD_X": str(number)}) for number in range(KEPT_SERVERS + 1)]

    pool.tidy()

    assert servers() == set(used[1:])
    pool.close()


def test_a_closed_pool_starts_nothing(bench: Bench, pool: Pool) -> None:
    pool.close()

    with pytest.raises(ForkServerGone):
        bench.command("true")
