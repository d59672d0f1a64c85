"""A person at a map: a bar on a terminal and nowhere else, and Ctrl-C once and twice."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulayer.client import Client
from tests.sdk.benches import Bench, good
from tests.support import PATIENCE_S, wait_until

# Of the server's set-up nothing is said.
SCRIPT = """
import logging, sys
import gpulayer as gl
import gpulayer.watching

logging.getLogger("gpulayer").setLevel(logging.ERROR)
if "patient" in sys.argv:
    gpulayer.watching.SECOND_CHANCE_S = 600

@gl.remote(isolation=sys.argv[1])
def square(n): return n * n

results = square.map(range(int(sys.argv[2])), progress=sys.argv[3] == "bar")
print(results.jobs[0].id, flush=True)
print(sum(results), flush=True)
"""

# Once its main thread does nothing but wait, Ctrl-C reaches another thread: the system may choose any.
INTERRUPTED = """
import itertools, signal, sys, threading, time, traceback
import gpulayer as gl

WAITS = {
    "one call": lambda: work.delay(1).result(),
    "jobs": lambda: work.map(range(3)).results(),
    "jobs as they end": lambda: list(work.map(range(3)).as_completed()),
    "items": lambda: work.options(isolation="warm").map(range(3)).results(),
    "items as they end": lambda: list(work.options(isolation="warm").map(range(3)).as_completed()),
}

@gl.remote
def work(n): ...

def interrupt():
    names = []
    while not ("attentive" in names and names[-1] in ("wait", "take")):
        frame = sys._current_frames()[threading.main_thread().ident]
        names = [each.name for each in traceback.extract_stack(frame)]
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
WAITS[sys.argv[1]]()
"""

Start = Callable[..., "Script"]


class Script:
    """A script whose stderr is a terminal of ours, or a pipe."""

    def __init__(self, folder: Path, *arguments: str, terminal: bool, text: str = SCRIPT) -> None:
        path = folder / "script.py"
        path.write_text(text)
        self._master, slave = pty.openpty() if terminal else os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=slave,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
        )
        os.close(slave)
        os.set_blocking(self._master, False)
        self.seen = ""

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def shows(self, pattern: str) -> bool:
        """Whether that has appeared on stderr by now."""
        try:
            while data := os.read(self._master, 65536):
                self.seen += data.decode(errors="replace")
        except OSError:  # nothing more now, or the other end is closed
            pass
        return re.search(pattern, self.seen) is not None

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        os.close(self._master)


@pytest.fixture
def start(tmp_path: Path, address: str) -> Iterator[Start]:
    scripts: list[Script] = []

    def begin(*arguments: str, terminal: bool = True, text: str = SCRIPT) -> Script:
        scripts.append(Script(tmp_path, *arguments, terminal=terminal, text=text))
        return scripts[-1]

    yield begin
    for script in scripts:
        script.close()


def squared(n: int) -> object:
    return n * n


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_bar_counts_the_calls_that_have_ended(start: Start, bench: Bench, isolation: str) -> None:
    script = start(isolation, "4", "bar")
    job_id = script.line()
    wait_until(lambda: script.shows(r"(?s)square.*0/4"), PATIENCE_S, "the bar is there")

    finish(bench, isolation, job_id, 2)
    wait_until(lambda: script.shows(r"2/4"), PATIENCE_S, "the bar has moved")
    finish(bench, isolation, job_id, 2)
    script.line()
    assert script.process.wait(PATIENCE_S) == 0


def finish(bench: Bench, isolation: str, array_id: str, count: int) -> None:
    if isolation == "fresh":
        for _ in range(count):
            (grant,) = bench.hand.claim(bench.machine, most=1)
            bench.give(grant.id, 0)
    else:
        bench.serve_array(array_id, lambda n: good(squared(n)), chunks=count, us_each=20_000)


@pytest.mark.parametrize(("how", "terminal"), [("bar", False), ("none", True)])
def test_there_is_no_bar_in_a_pipe_or_where_it_is_not_wanted(
    start: Start, bench: Bench, how: str, terminal: bool
) -> None:
    script = start("warm", "2", how, terminal=terminal)
    job_id = script.line()
    bench.serve_array(job_id, lambda n: good(squared(n)), chunks=1, us_each=20_000)
    # A second call that is slow to end: a bar would have come by then.
    with pytest.raises(subprocess.TimeoutExpired):
        script.process.wait(1.2)
    bench.serve_array(job_id, lambda n: good(squared(n)))

    assert script.line() == "1"
    assert script.process.wait(PATIENCE_S) == 0
    assert not script.shows(".")


def test_one_interrupt_leaves_the_jobs_alone_and_says_how_to_come_back(
    start: Start, bench: Bench, client: Client
) -> None:
    script = start("warm", "10", "bar")
    job_id = script.line()
    wait_until(lambda: script.shows("0/10"), PATIENCE_S, "it waits")
    script.interrupt()

    assert script.process.wait(PATIENCE_S) == -signal.SIGINT
    assert script.shows(rf"detached: 10 calls of square go on; gl\.Client\(\)\.map_result\('{job_id}'\)")
    bench.serve_array(job_id, lambda n: good(squared(n)))
    assert sum(client.map_result(job_id)) == 285


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_second_interrupt_cancels(start: Start, bench: Bench, client: Client, isolation: str) -> None:
    script = start(isolation, "10", "bar", "patient")
    job_id = script.line()
    wait_until(lambda: script.shows("0/10"), PATIENCE_S, "it waits")
    script.interrupt()
    wait_until(lambda: script.shows("detached"), PATIENCE_S, "it has detached")
    script.interrupt()

    assert script.process.wait(PATIENCE_S) == -signal.SIGINT
    assert script.shows("cancelled: 10 calls of square")
    assert client.get(job_id).state == "cancelled"


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("one call", r"detached: job (\w+) goes on; gpulayer cancel \1 ends it"),
        ("jobs", "detached: 3 calls of work go on"),
        ("jobs as they end", "detached: 3 calls of work go on"),
        ("items", "detached: 3 calls of work go on"),
        ("items as they end", "detached: 3 calls of work go on"),
    ],
)
def test_ctrl_c_ends_a_wait_whichever_thread_it_reaches_and_leaves_the_jobs(
    start: Start, bench: Bench, client: Client, what: str, says: str
) -> None:
    script = start(what, text=INTERRUPTED, terminal=False)

    assert script.process.wait(PATIENCE_S) == -signal.SIGINT
    assert script.shows(says)
    assert not script.shows("attentive|waiter")  # where it waited is no matter of the script's
    assert {record.state for record in client.jobs()} == {"queued"}
