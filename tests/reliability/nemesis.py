"""Faults, as things that a test does for a while: processes stopped and killed, a server away or out of memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from gpulayer_broker.connection import Link
from tests.servers import QueueServer
from tests.support import wait_until


def kill(pid: int) -> bool:
    """SIGKILL; False where there was nothing to kill."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def is_gone(pid: int) -> bool:
    """Whether the process has ended; one that only waits to be reaped has."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def standing_still(*pids: int) -> Iterator[None]:
    """SIGSTOP for the while, then SIGCONT."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def outage(server: QueueServer) -> Iterator[None]:
    """The server is killed, and started again on the same socket and folder."""
    server.kill()
    try:
        yield
    finally:
        server.start()


@contextmanager
def out_of_memory(link: Link) -> Iterator[None]:
    """The server is over its limit and evicts nothing."""
    link.call("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        link.call("CONFIG", "SET", "maxmemory", 0)


def fork_servers(worker: int) -> list[int]:
    """The fork servers of a worker: its children that serve."""
    with suppress(psutil.Error):
        children = psutil.Process(worker).children()
        return [child.pid for child in children if "serve" in _words(child)]
    return []


def job_processes(worker: int) -> list[int]:
    """The main processes of a worker's jobs: the children of its fork servers."""
    found: list[int] = []
    for pid in fork_servers(worker):
        with suppress(psutil.Error):
            found += [child.pid for child in psutil.Process(pid).children()]
    return found


def processes_of(scratch: str) -> list[int]:
    """Every process that carries a scratch folder below the given one in its environment."""
    return [process.pid for process in psutil.process_iter() if _scratch_of(process).startswith(scratch)]


def all_gone(pids: list[int], timeout_s: float = 10) -> None:
    wait_until(lambda: all(map(is_gone, pids)), timeout_s, f"processes {pids} are gone")


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _scratch_of(process: psutil.Process) -> str:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return str(process.environ().get("GPULAYER_SCRATCH", ""))
    except psutil.Error:
        return ""
