"""A fork server for each test that asks for one; no process may be left after any test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_worker.processes.fork_server import ForkServer
from gpulayer_worker.runner import proctree

from .bench import Bench


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = proctree.children(os.getpid())
    yield
    left = proctree.children(os.getpid()) - before
    assert not left, {pid: proctree.command_line(pid) for pid in left}


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(sys.executable, {})
    yield server
    server.close()


@pytest.fixture
def bench(tmp_path: Path, server: ForkServer) -> Bench:
    return Bench(tmp_path, server)
