"""The command line, run in this process or as a process, on the real queue server; real workers beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpulayer.cli import run
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.keys import Keys
from tests.queueing import Hand
from tests.sdk.benches import Bench
from tests.workers import WorkerProcess


@dataclass(frozen=True)
class Outcome:
    """What a command line came to."""

    code: int
    out: str
    err: str


Cli = Callable[..., Outcome]


@pytest.fixture
def address(valkey: Endpoint, namespace: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The queue's URL, with the environment set so that commands use this test's namespace."""
    monkeypatch.setenv("GPULAYER_NAMESPACE", namespace)
    monkeypatch.setenv("GPULAYER_REDIS_URL", valkey.url)
    return valkey.url


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the test, empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cli(here: Path, capfd: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in this process."""

    def call(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = run(arguments)
        out, err = capfd.readouterr()
        return Outcome(code, out, err)

    return call


@pytest.fixture
def bench(address: str, link: Link, root: str, namespace: str) -> Bench:
    return Bench(Hand(link, root), namespace)


@pytest.fixture
def keys(root: str) -> Keys:
    """The names of the queue's keys."""
    return Keys(root)


@pytest.fixture
def worker(valkey: Endpoint, address: str, namespace: str, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A real worker of the test's namespace, which shares nothing with its clients but the queue."""
    log = tmp_path / "worker.log"
    worker = WorkerProcess(valkey, namespace, f"{namespace}-w", log, private=False)
    try:
        yield worker.settle()
    finally:
        worker.end()
        print(worker.said())


@pytest.fixture
def spawn(here: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command line as a process of its own, in a session of its own, some code before it."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, before: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", f"{before}\nfrom gpulayer.cli import main; main()", *arguments]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
