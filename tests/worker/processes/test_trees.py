"""A job's process tree: it ends with its main process, with its lease, with its worker, whatever it tries."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_worker.processes import ending
from gpulayer_worker.processes.fork_server import ForkServer, ForkServerGone
from gpulayer_worker.processes.watchdog import LOOKS
from gpulayer_worker.runner import proctree
from tests.support import PATIENCE_S, wait_until

from .bench import Bench, is_gone, stand_in, wait_gone

WATCH_EVERY_S = 0.2
BACKGROUND = "sleep 1000 & echo $! > child; "
SESSION = "setsid sh -c 'echo $$ > child; exec sleep 1000' & "
UNTIL_CHILD = "until [ -s child ]; do sleep 0.01; done; "
# A daemon by the book: two forks, a session, another folder, no pipe of the job, an environment that tells nothing.
DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(null, descriptor)
        os.closerange(3, 300)
        os.execve("/bin/sh", ["sh", "-c", "echo $$ > $0; cd /; exec sleep 1000", sys.argv[1]], {})
    os._exit(0)
os.wait()
"""


@pytest.fixture
def daemon(tmp_path: Path) -> str:
    """A shell command that leaves a daemon behind, whose pid is in the file `child` once it runs."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    return f"{sys.executable} {tmp_path}/daemon.py {tmp_path}/child; "


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Bench]:
    """On a fork server that is looked after so often that its patience is over soon."""
    server = ForkServer(sys.executable, {}, look_every_s=WATCH_EVERY_S)
    yield Bench(tmp_path, server)
    server.close()


# --- the job ends with its main process ---


def test_a_background_child_that_holds_stdout_is_told_and_ended(bench: Bench) -> None:
    handle = bench.shell(BACKGROUND + "exit 0")
    end = handle.wait(PATIENCE_S)

    child = bench.number_in("child")
    assert is_gone(child)
    assert end.exit is not None
    assert end.exit.code == 0
    assert [stray.split()[0] for stray in end.strays] == [str(child)]


def test_a_grandchild_in_a_session_of_its_own_is_ended(bench: Bench) -> None:
    end = bench.shell(SESSION + UNTIL_CHILD).wait(PATIENCE_S)

    assert is_gone(bench.number_in("child"))
    assert len(end.strays) == 1


def test_a_daemon_that_hides_is_ended_with_the_only_job(bench: Bench, daemon: str) -> None:
    end = bench.shell(daemon + UNTIL_CHILD).wait(PATIENCE_S)

    child = bench.number_in("child")
    assert is_gone(child)
    assert str(child) in [stray.split()[0] for stray in end.strays]


def test_a_daemon_lives_while_its_job_does_and_others_come_and_go(bench: Bench, daemon: str) -> None:
    handle = bench.shell(daemon + "sleep 1000")
    child = bench.number_in("child")

    bench.command("true").wait(PATIENCE_S)

    assert not is_gone(child)
    handle.kill()
    handle.wait(PATIENCE_S)
    assert is_gone(child)


def test_a_stray_of_one_job_is_ended_while_another_runs(bench: Bench) -> None:
    other = bench.shell("sleep 1000")
    other.started.result(PATIENCE_S)

    bench.shell(SESSION + UNTIL_CHILD).wait(PATIENCE_S)

    assert is_gone(bench.number_in("child"))
    assert not other.gone.done()
    other.kill()


def test_a_hidden_daemon_goes_with_the_last_job_that_may_have_made_it(bench: Bench, daemon: str) -> None:
    other = bench.shell("sleep 1000")
    other.started.result(PATIENCE_S)
    bench.shell(daemon + UNTIL_CHILD).wait(PATIENCE_S)

    other.kill()
    other.wait(PATIENCE_S)

    assert is_gone(bench.number_in("child"))


def test_the_death_of_the_main_process_ends_its_children(bench: Bench) -> None:
    handle = bench.shell(SESSION + BACKGROUND.replace("child", "second") + "wait")
    children = [bench.number_in("child"), bench.number_in("second")]

    os.kill(handle.started.result(PATIENCE_S), signal.SIGKILL)
    end = handle.wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.signal == signal.SIGKILL
    assert all(is_gone(child) for child in children)


# --- ending a job ---


def test_end_sends_term_to_the_whole_tree(bench: Bench) -> None:
    script = "sh -c 'trap \"echo child; exit\" TERM; echo $$ > child; while :; do sleep 0.05; done' & "
    # It does not end by itself when the child does: its own signal comes a moment later.
    handle = bench.shell("trap 'wait; echo main; exit 7' TERM; " + script + "while :; do sleep 0.05; done")
    bench.number_in("child")

    handle.end(grace_s=PATIENCE_S)
    end = handle.wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.code == 7
    assert bench.out(handle) == "child\nmain\n"


def test_what_ignores_term_is_killed_after_the_grace(bench: Bench) -> None:
    handle = bench.shell("trap '' TERM; echo 1 > child; while :; do sleep 0.05; done")
    bench.number_in("child")

    handle.end(grace_s=0.2)
    end = handle.wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.signal == signal.SIGKILL


def test_children_keep_the_grace_when_the_main_process_obeys_at_once(bench: Bench) -> None:
    script = (
        "sh -c 'trap \"sleep 0.3; echo saved; exit\" TERM; echo $$ > child; while :; do sleep 0.05; done' & "
    )
    handle = bench.shell(script + "wait")
    bench.number_in("child")

    handle.end(grace_s=PATIENCE_S)
    end = handle.wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.signal == signal.SIGTERM
    assert bench.out(handle) == "saved\n"


def test_kill_ends_a_tree_that_forks_without_end(bench: Bench) -> None:
    handle = bench.shell(
        "echo 1 > child; f() { sleep 1000 & sleep 1000 & }; while :; do f; sleep 0.001; done"
    )
    bench.number_in("child")

    handle.kill()
    handle.wait(PATIENCE_S)

    assert isinstance(bench.server, ForkServer)
    assert bench.server.stats()["children"] == []


def test_a_handle_of_a_job_that_is_gone_does_nothing(bench: Bench) -> None:
    handle = bench.command("true")
    handle.wait(PATIENCE_S)

    handle.kill()
    handle.end(1.0)
    handle.extend_lease(0.0)

    assert bench.command("true").wait(PATIENCE_S).exit is not None


# --- leases ---


def test_a_job_is_killed_when_its_lease_passes(bench: Bench) -> None:
    handle = bench.shell(SESSION + "sleep 1000", lease_until_s=ending.lease_clock_s() + 4)
    child = bench.number_in("child")

    end = handle.wait(PATIENCE_S)

    assert end.expired
    assert end.exit is not None
    assert end.exit.signal == signal.SIGKILL
    assert is_gone(child)


def test_a_renewed_lease_lets_the_job_finish(bench: Bench) -> None:
    first_s = ending.lease_clock_s() + 3
    handle = bench.shell("while [ ! -e gate ]; do sleep 0.05; done", lease_until_s=first_s)

    handle.extend_lease(first_s + 10 * PATIENCE_S)
    wait_until(lambda: ending.lease_clock_s() > first_s + 0.3, PATIENCE_S, "the first lease is over")
    (bench.folder / "gate").touch()
    end = handle.wait(PATIENCE_S)

    assert not end.expired
    assert end.exit is not None
    assert end.exit.code == 0


def test_a_job_whose_lease_is_over_does_not_begin(bench: Bench) -> None:
    end = bench.shell("touch ran", lease_until_s=ending.lease_clock_s() - 1).wait(PATIENCE_S)

    assert end.refused == "its lease was over before it began"
    assert not (bench.folder / "ran").exists()


def test_a_lease_ends_its_job_while_the_worker_is_stopped(tmp_path: Path) -> None:
    with stand_in(tmp_path, "echo $$ > child; exec sleep 1000", lease_s=4.0) as (worker, _):
        worker.send_signal(signal.SIGSTOP)

        wait_gone(int(Bench.number_in_folder(tmp_path, "child")))

        status = proctree.status(worker.pid)
        assert status is not None
        assert status.state == "T"


# --- the worker or its fork server is killed ---


def test_the_end_of_the_worker_ends_its_jobs_and_its_fork_server(tmp_path: Path, daemon: str) -> None:
    with stand_in(tmp_path, daemon + "echo $$ > main; exec sleep 1000") as (worker, server):
        pids = [Bench.number_in_folder(tmp_path, name) for name in ("child", "main")]

        worker.kill()

        wait_gone(*pids, server)


def test_the_end_of_the_worker_is_noticed_although_something_else_holds_its_socket(tmp_path: Path) -> None:
    with stand_in(tmp_path, "echo $$ > main; exec sleep 1000", "hold") as (worker, server):
        main, holder = (Bench.number_in_folder(tmp_path, name) for name in ("main", "holder"))

        worker.kill()

        try:
            wait_gone(main, server)
            assert not is_gone(holder)
        finally:
            os.kill(holder, signal.SIGKILL)


def test_the_end_of_the_fork_server_loses_its_jobs_and_leaves_nothing(bench: Bench) -> None:
    script = SESSION + "trap '' TERM; echo $$ > main; while :; do sleep 0.05; done"
    handle = bench.shell(script)
    pids = [bench.number_in(name) for name in ("child", "main")]
    assert isinstance(bench.server, ForkServer)

    os.kill(bench.server.pid, signal.SIGKILL)
    end = handle.wait(PATIENCE_S)

    assert end.lost
    assert all(is_gone(pid) for pid in pids)
    assert not bench.server.alive
    with pytest.raises(ForkServerGone):
        bench.command("true")


def test_a_job_that_stops_its_fork_server_runs_on_to_its_end(watched: Bench) -> None:
    end = watched.shell("kill -STOP $PPID; echo ran > child").wait(PATIENCE_S)

    assert end.exit is not None
    assert end.exit.code == 0
    assert not end.lost


def test_a_fork_server_that_is_stopped_again_and_again_is_given_up(watched: Bench) -> None:
    end = watched.shell("echo $$ > main; while :; do kill -STOP $PPID; done").wait(PATIENCE_S)

    assert end.lost
    assert is_gone(watched.number_in("main"))


def test_a_stopped_fork_server_does_not_hold_up_the_end_of_its_worker(bench: Bench) -> None:
    handle = bench.shell("echo $$ > main; exec sleep 1000")
    main = bench.number_in("main")
    assert isinstance(bench.server, ForkServer)
    os.kill(bench.server.pid, signal.SIGSTOP)

    bench.server.close(patience_s=1)

    assert handle.wait(PATIENCE_S)
    assert is_gone(main)


def test_a_busy_fork_server_that_answers_is_left_alone(watched: Bench) -> None:
    handle = watched.shell(f"sleep {LOOKS * WATCH_EVERY_S * 3}")

    end = handle.wait(PATIENCE_S)

    assert not end.lost
    assert end.exit is not None
    assert end.exit.code == 0


def test_what_was_left_by_a_killed_worker_and_fork_server_is_cleared(tmp_path: Path) -> None:
    with stand_in(tmp_path, SESSION + "sleep 1000") as (worker, server):
        child = Bench.number_in_folder(tmp_path, "child")
        worker.send_signal(signal.SIGSTOP)
        os.kill(server, signal.SIGKILL)
        worker.kill()
        worker.wait()
        assert not is_gone(child)

        assert ending.clear_leftovers(str(tmp_path)) >= 1

        assert is_gone(child)


def test_a_subreaper_ends_even_the_daemon_of_a_killed_fork_server(tmp_path: Path) -> None:
    program = Path(__file__).with_name("subreaper_stand_in.py")
    (tmp_path / "daemon.py").write_text(DAEMON)

    subprocess.run([sys.executable, str(program), str(tmp_path)], check=True, timeout=PATIENCE_S)

    assert is_gone(Bench.number_in_folder(tmp_path, "child"))
