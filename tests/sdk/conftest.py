"""A client on the real queue server, and a worker by hand beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer import client as clients
from gpulayer import private
from gpulayer.client import Client
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.folders import Folders, locate_folders
from tests.queueing import Hand
from tests.sdk.benches import Bench
from tests.sdk.private_parts import worker_program
from tests.workers import WorkerProcess


@pytest.fixture
def address(valkey: Endpoint, namespace: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The queue's URL, with the environment set so that clients use this test's namespace."""
    monkeypatch.setenv("GPULAYER_NAMESPACE", namespace)
    monkeypatch.setenv("GPULAYER_REDIS_URL", valkey.url)
    return valkey.url


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(redis=address) as client:
        yield client


@pytest.fixture
def trusting(address: str) -> Iterator[Client]:
    """A client that unpickles what workers send, as on the private set-up."""
    with Client(redis=address, trust_workers=True) as client:
        yield client


@pytest.fixture
def bench(link: Link, root: str, namespace: str) -> Bench:
    return Bench(Hand(link, root), namespace)


@pytest.fixture
def remotely(address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remote functions go to this test's namespace."""
    defaults: dict[str | None, Client] = {}
    monkeypatch.setattr(clients, "_defaults", defaults)
    yield
    for client in defaults.values():
        client.close()


@pytest.fixture
def worker(valkey: Endpoint, address: str, namespace: str, tmp_path: Path) -> Iterator[WorkerProcess]:
    """A real worker, which loads what it runs."""
    worker = WorkerProcess(valkey, namespace, f"{namespace}-w", tmp_path / "worker.log", private=False)
    yield worker
    worker.end()
    print(worker.said())


@pytest.fixture
def stand_in(tmp_path: Path) -> list[str]:
    """The program of a stand-in for the private worker."""
    return worker_program(tmp_path, stubborn=False)


@pytest.fixture
def folders(monkeypatch: pytest.MonkeyPatch, isolated_environment: Path, tmp_path: Path) -> Iterator[Folders]:
    """A state folder of this test alone; what runs on it is stopped afterwards."""
    monkeypatch.setenv("GPULAYER_TERM_GRACE_S", "1")
    state = isolated_environment / "state" / tmp_path.name
    monkeypatch.setenv("GPULAYER_STATE_DIR", str(state))
    yield locate_folders().create()
    private.release_private()
    private.down()
