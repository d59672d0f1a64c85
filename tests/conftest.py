"""What every test stands on: a real queue server, a namespace, an isolated environment, and checks after it.

After each test no process that it started is left, detached ones included, and while its fixtures are still
up none of its processes listens on TCP beyond loopback. A fixture wider than one test adds its processes to
`session_processes`.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from gpulayer_broker.connection import Endpoint, Link
from gpulayer_worker.processes import cgroup
from tests.leaks import leaks
from tests.moves import strange_moves
from tests.servers import QueueServer
from tests.skips import (  # hooks of this run
    pytest_collectreport,
    pytest_runtest_logreport,
    pytest_sessionfinish,
    pytest_terminal_summary,
)
from tests.support import PATIENCE_S

__all__ = [
    "pytest_collectreport",
    "pytest_runtest_logreport",
    "pytest_sessionfinish",
    "pytest_terminal_summary",
]

KEPT_NAMES = {"GPULAYER_TEST_SERVER", "GPULAYER_NO_SKIPS"}
ISOLATED_NAMES = ("GPULAYER_STATE_DIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")
# Set in the environment of all that a run starts: detached processes are known by it.
RUN_NAME = "GPULAYER_TEST_RUN"
EXIT_GRACE_S = 30.0
LOOPBACK = ("127.", "::1", "::ffff:127.")

_run_id = uuid.uuid4().hex
_session_processes: set[int] = set()
_pids_before: set[int] = set()


@pytest.fixture(scope="session", autouse=True)
def isolated_environment() -> Iterator[Path]:
    """Folders of this run for state, sockets and user configuration; no GPULAYER_ name of the caller's."""
    folder = Path(tempfile.mkdtemp(prefix="gpl-", dir="/tmp"))
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("GPULAYER_") and name not in KEPT_NAMES]:
        del os.environ[name]
    for name, part in zip(ISOLATED_NAMES, ("state", "run", "config"), strict=True):
        (folder / part).mkdir(mode=0o700)
        os.environ[name] = str(folder / part)
    os.environ[RUN_NAME] = _run_id
    yield folder
    # What workers that were killed, and not started again, would have cleared then.
    for record in folder.rglob(cgroup.RECORD):
        cgroup.clear_groups(record.parent)
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def session_processes() -> set[int]:
    """Process ids that may outlive a test: a fixture of a wider scope adds its own, and discards them."""
    return _session_processes


@pytest.fixture(scope="session")
def valkey(isolated_environment: Path) -> Iterator[Endpoint]:
    """One server for this run (and for each xdist worker), without persistence."""
    server = QueueServer().start()
    _session_processes.add(server.pid)
    yield server.endpoint
    server.remove()
    _session_processes.discard(server.pid)


@pytest.fixture
def queue_server() -> Iterator[Callable[..., QueueServer]]:
    """Starts servers of the test's own, to be killed, filled or misconfigured; they are removed after it."""
    servers: list[QueueServer] = []

    def start(*options: str, append_only: bool = False) -> QueueServer:
        servers.append(QueueServer(*options, append_only=append_only))
        return servers[-1].start()

    yield start
    for server in servers:
        server.remove()


@pytest.fixture
def link(valkey: Endpoint) -> Iterator[Link]:
    with Link(valkey, socket_timeout_s=PATIENCE_S) as link:
        yield link


@pytest.fixture
def namespace(valkey: Endpoint) -> Iterator[str]:
    """A name that no other test has. Afterwards every key of it is one that hangs on something; all are removed."""
    name = f"t{uuid.uuid4().hex[:12]}"
    yield name
    with Link(valkey, socket_timeout_s=PATIENCE_S) as link:
        found = leaks(link, f"gpulayer:{{{name}}}:")
        strange = strange_moves(link, f"gpulayer:{{{name}}}:")
        _remove_keys(link, f"gpulayer:{{{name}}}:*")
    assert not found, f"keys left behind: {found}"
    assert not strange, f"moves that are not in the table of states: {strange}"


@pytest.fixture
def root(namespace: str) -> str:
    """What every key of the namespace starts with."""
    return f"gpulayer:{{{namespace}}}:"


def _remove_keys(link: Link, pattern: str) -> None:
    cursor = b"0"
    while True:
        cursor, keys = link.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        if keys:
            link.call("UNLINK", *keys)
        if cursor == b"0":
            return


def pytest_configure() -> None:
    """What a script starts in the background ignores Ctrl-C and so do its children, which tests interrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    _pids_before.clear()
    _pids_before.update(psutil.pids())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    exposed = _listening_beyond_loopback([psutil.Process(), *_started_processes()])
    try:
        return (yield)
    finally:
        left = _left_processes()
        assert not left, f"processes left by {item.nodeid}: {left}"
        assert not exposed, f"listening beyond loopback in {item.nodeid}: {exposed}"


def _started_processes() -> list[psutil.Process]:
    """Processes of this run begun since the test's set-up: children, or detached with its environment."""
    new = set(psutil.pids()) - _pids_before - _session_processes
    children = {child.pid for child in psutil.Process().children(recursive=True)} if new else set()
    return [process for pid in new if (process := _process_of_run(pid, children))]


def _process_of_run(pid: int, children: set[int]) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        ours = pid in children or process.environ().get(RUN_NAME) == _run_id
    except psutil.Error:
        return None
    return process if ours else None


def _left_processes() -> list[str]:
    """What is there after a grace for exits under way; it is ended, not to fail the next test too."""
    end = time.monotonic() + EXIT_GRACE_S
    while (left := _started_processes()) and time.monotonic() < end:
        time.sleep(0.01)
    names = [_name(process) for process in left]
    for process in left:
        if process.is_running():
            process.kill()
    return names


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)


def _listening_beyond_loopback(processes: list[psutil.Process]) -> list[str]:
    return [
        f"{_name(process)}: {connection.laddr.ip}:{connection.laddr.port}"
        for process in processes
        for connection in _connections(process)
        if connection.status == psutil.CONN_LISTEN and not connection.laddr.ip.startswith(LOOPBACK)
    ]


def _connections(process: psutil.Process) -> list[Any]:
    try:
        return list(process.net_connections(kind="tcp"))
    except psutil.Error:
        return []
