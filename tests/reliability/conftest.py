"""A durable server of the test's own, a desk on it, and workers, all of which may be killed and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import checker
from tests.leaks import leaks
from tests.moves import strange_moves
from tests.reliability.proxy import Proxy
from tests.servers import QueueServer
from tests.snapshot import read
from tests.workers import Desk, Hire, hiring

__all__ = ["Hire"]


@pytest.fixture
def server(queue_server: Callable[..., QueueServer]) -> QueueServer:
    """With an append-only file: what it acknowledged survives its kill."""
    return queue_server(append_only=True)


@pytest.fixture
def desk(server: QueueServer, tmp_path: Path) -> Iterator[Desk]:
    """A namespace of this test's; afterwards the queue holds no contradiction, no key too many, no odd move."""
    desk = Desk(server.endpoint, tmp_path.name.replace("_", "-")[:30].strip("-").lower())
    yield desk
    broken = checker.violations(read(desk.link, desk.queue.keys.root))
    left = leaks(desk.link, desk.queue.keys.root)
    strange = strange_moves(desk.link, desk.queue.keys.root)
    desk.close()
    assert broken + left + strange == []


@pytest.fixture
def hire(desk: Desk, tmp_path: Path) -> Iterator[Hire]:
    """Starts a worker on the desk's namespace; it is at work when it is returned."""
    with hiring(desk, tmp_path) as hire:
        yield hire


@pytest.fixture
def proxy(server: QueueServer) -> Iterator[Proxy]:
    with Proxy(server.endpoint) as proxy:
        yield proxy
