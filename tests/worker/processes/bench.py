"""What the tests of job processes share: starts jobs on a fork server and reads what they wrote and returned."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import cloudpickle
import numpy

from gpulayer_worker.processes.job import Ending, FunctionCall, JobHandle, JobProcess
from gpulayer_worker.runner import proctree
from tests.support import PATIENCE_S, wait_until

_numbers = itertools.count(1)


def pickled(function: Callable[..., Any]) -> bytes:
    """A function by value, as a submitter's `__main__` would send it."""
    module = sys.modules[function.__module__]
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(function))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def value(ending: Ending) -> Any:
    """What the function returned."""
    assert ending.report is not None, ending
    assert ending.report.ok, ending.report.header
    data = ending.report.read_payload()
    if ending.report.header["kind"] == "json":
        return json.loads(data)
    if ending.report.header["kind"] == "numpy":
        return numpy.load(io.BytesIO(data), allow_pickle=False)
    return pickle.loads(data)


def error(ending: Ending) -> Mapping[str, Any]:
    """How the job says that it failed."""
    assert ending.report is not None, ending
    assert not ending.report.ok, ending.report.header
    return ending.report.header


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    status = proctree.status(pid)
    return status is None or status.state == "Z"


def wait_gone(*pids: int) -> None:
    """Waits for processes to end."""
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), PATIENCE_S, f"process {pid} ends")  # type: ignore[misc]


class Starter(Protocol):
    """A fork server, a pool, or a starter without one."""

    def start(self, job: JobProcess) -> JobHandle: ...

    def close(self) -> None: ...


class Bench:
    """Jobs in one folder on one fork server."""

    def __init__(self, folder: Path, server: Starter) -> None:
        self.folder = folder
        self.server = server
        self.env: dict[str, str] = {"PATH": os.environ["PATH"]}

    def start(self, work: tuple[str, ...] | FunctionCall, name: str = "", **options: Any) -> JobHandle:
        """Starts a job whose stdout and stderr are the files `<id>.out` and `<id>.err` of the folder."""
        name = name or f"j{next(_numbers)}-{os.getpid()}"
        facts: dict[str, Any] = {"cwd": self.folder, "env": self.env} | options
        with open(self.folder / f"{name}.out", "wb") as out, open(self.folder / f"{name}.err", "wb") as err:
            return self.server.start(
                JobProcess(id=name, work=work, stdout=out.fileno(), stderr=err.fileno(), **facts)
            )

    def command(self, *argv: str, **options: Any) -> JobHandle:
        """Starts a command."""
        return self.start(argv, **options)

    def shell(self, script: str, **options: Any) -> JobHandle:
        """Starts a shell script."""
        return self.start(("sh", "-c", script), **options)

    def function(self, function: Callable[..., Any] | bytes, *args: Any, **options: Any) -> JobHandle:
        """Starts a function by value."""
        data = function if isinstance(function, bytes) else pickled(function)
        return self.start(self.call(data, pickle.dumps((args, {}))), **options)

    def call(self, function: bytes, arguments: bytes, **facts: Any) -> FunctionCall:
        """A call of pickled parts."""
        stem = self.folder / f"call{next(_numbers)}"
        python = {"python": sys.version_info[:3]} | facts
        return FunctionCall(function, arguments, payload=stem.with_suffix(".payload"), **python)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Ending:
        """Calls a function and waits for its end."""
        return self.function(function, *args, **options).wait(PATIENCE_S)

    def out(self, handle: JobHandle) -> str:
        """What a job wrote to stdout."""
        return (self.folder / f"{handle.id}.out").read_text()

    def err(self, handle: JobHandle) -> str:
        """What a job wrote to stderr."""
        return (self.folder / f"{handle.id}.err").read_text()

    def number_in(self, file: str) -> int:
        """The number that a job writes into a file of its folder, once it is there whole."""
        return self.number_in_folder(self.folder, file)

    @staticmethod
    def number_in_folder(folder: Path, file: str) -> int:
        """The same for any folder."""
        path = folder / file
        wait_until(
            lambda: path.exists() and path.read_text().endswith("\n"), PATIENCE_S, f"{file} is written"
        )
        return int(path.read_text())


@contextmanager
def stand_in(
    folder: Path, script: str, *options: str, lease_s: float = 600.0
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A worker in a process of its own, with one job; yields it and the pid of its fork server."""
    program = Path(__file__).with_name("worker_stand_in.py")
    command = [sys.executable, str(program), str(folder), str(lease_s), script, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        try:
            yield worker, int(worker.stdout.readline())
        finally:
            worker.kill()
