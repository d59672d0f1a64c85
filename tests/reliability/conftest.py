"""A durable server of the test's own, a desk on it, and workers, all of which may be killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import checker
from tests.leaks import leaks
from tests.reliability.proxy import Proxy
from tests.servers import QueueServer
from tests.snapshot import read
from tests.workers import Desk, WorkerProcess

Hire = Callable[..., WorkerProcess]


@pytest.fixture
def server(queue_server: Callable[..., QueueServer]) -> QueueServer:
    """With an append-only file: what it acknowledged survives its kill."""
    return queue_server(append_only=True)


@pytest.fixture
def desk(server: QueueServer, tmp_path: Path) -> Iterator[Desk]:
    """A namespace of this test's; afterwards the queue holds no contradiction and no key too many."""
    desk = Desk(server.endpoint, tmp_path.name.replace("_", "-")[:30].strip("-").lower())
    yield desk
    broken = checker.violations(read(desk.link, desk.queue.keys.root))
    left = leaks(desk.link, desk.queue.keys.root)
    desk.close()
    assert broken + left == []


@pytest.fixture
def hire(desk: Desk, tmp_path: Path) -> Iterator[Hire]:
    """Starts a worker on the desk's namespace."""
    hired: list[WorkerProcess] = []

    def hire(name: str = "", *options: str, **facts: Any) -> WorkerProcess:
        name = name or f"{tmp_path.name}-{len(hired)}"
        log = tmp_path / f"worker-{len(hired)}.log"
        endpoint = facts.pop("endpoint", desk.endpoint)
        hired.append(WorkerProcess(endpoint, desk.namespace, name, log, *options, **facts))
        return hired[-1]

    yield hire
    for worker in hired:
        worker.end()
    for worker in hired:
        print(f"--- {worker.name}\n{worker.said()}")


@pytest.fixture
def proxy(server: QueueServer) -> Iterator[Proxy]:
    with Proxy(server.endpoint) as proxy:
        yield proxy
