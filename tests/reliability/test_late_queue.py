"""The queue goes away between a worker's first look at it and its registration: the worker waits, and then works."""

from __future__ import annotations

from pathlib import Path

from gpulayer_broker.folders import locate_folders
from gpulayer_broker.locks import is_held
from tests.reliability.proxy import Proxy
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, WorkerProcess


def start_and_lose_the_queue(desk: Desk, proxy: Proxy, folder: Path) -> WorkerProcess:
    """The worker's lock comes after its first look at the server and before its registration."""
    name = f"{desk.namespace}-late"
    lock = locate_folders().create().worker_lock(name)
    worker = WorkerProcess(proxy.endpoint, desk.namespace, name, folder / "late.log")
    wait_until(lambda: is_held(lock), PATIENCE_S, "the worker has looked at the server")
    proxy.shut()
    wait_until(lambda: "waits for its queue" in worker.said(), PATIENCE_S, "the worker says that it waits")
    return worker


def test_a_worker_that_loses_its_queue_before_it_registers_works_when_it_is_back(
    desk: Desk, tmp_path: Path
) -> None:
    with Proxy(desk.endpoint) as proxy:
        worker = start_and_lose_the_queue(desk, proxy, tmp_path)
        try:
            proxy.reopen()

            assert desk.final(desk.command("true")).state == "succeeded"
        finally:
            worker.end()


def test_a_worker_that_waits_for_its_queue_can_be_stopped(desk: Desk, tmp_path: Path) -> None:
    with Proxy(desk.endpoint) as proxy:
        worker = start_and_lose_the_queue(desk, proxy, tmp_path)

        assert worker.stop() == 0
