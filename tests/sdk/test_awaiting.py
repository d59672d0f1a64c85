"""`await job`: what is cancelled leaves nothing behind, and harms nobody else who waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer.handing_over import Arguments
from gpulayer.options import plan_of
from gpulayer.payload import pack_function
from gpulayer.slots import Slot
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until


def work() -> int:
    return 1


async def value(job: gl.Job[int]) -> int:
    return await job


async def all_of(results: gl.MapResult[int]) -> list[int]:
    return await results


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_of_several_awaits_one_is_cancelled_and_the_others_still_end(client: Client, bench: Bench) -> None:
    jobs = [client.submit(work) for _ in range(3)]

    async def all_but_one() -> list[int]:
        tasks = [asyncio.create_task(value(job)) for job in jobs]
        await asyncio.to_thread(
            wait_until, lambda: all(job._slot.callbacks for job in jobs), PATIENCE_S, "all are waited for"
        )
        await cancel(tasks.pop(1))
        for job in jobs:
            await asyncio.to_thread(bench.give, job.id, 7)
        return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)

    assert asyncio.run(all_but_one()) == [7, 7]
    assert jobs[1].result(PATIENCE_S) == 7


def test_an_await_that_is_cancelled_while_it_begins_is_taken_back(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = client.submit(work), client.submit(work)
    begun, cancelled = threading.Event(), threading.Event()
    listen = client._opened.waiter.listen

    def late(slot: Slot, callback: Callable[[Slot], None]) -> None:
        begun.set()
        assert cancelled.wait(PATIENCE_S)
        listen(slot, callback)

    async def one_that_is_cancelled() -> None:
        task = asyncio.create_task(value(first))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        await cancel(task)
        cancelled.set()

    with monkeypatch.context() as patched:
        patched.setattr(client._opened.waiter, "listen", late)
        asyncio.run(one_that_is_cancelled())
    assert not first._slot.callbacks

    bench.give(first.id, 1)
    bench.give(second.id, 2)
    assert second.result(PATIENCE_S) == 2


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_an_await_of_a_map_without_a_length_that_is_cancelled_is_read_by_nobody(
    client: Client, isolation: str
) -> None:
    given: list[int] = []
    waiter = client._opened.waiter

    def endless() -> Iterator[Arguments]:
        for n in count():
            given.append(n)
            yield (n,), {}

    plan, packed = plan_of({"isolation": isolation}), pack_function(abs)
    results: gl.MapResult[int] = client.submit_map(packed, endless(), plan, None, max_in_flight=2)

    async def cancelled() -> None:
        task = asyncio.create_task(all_of(results))
        try:
            await asyncio.to_thread(
                wait_until, lambda: waiter._wanted, PATIENCE_S, "the first call is waited for"
            )
            await cancel(task)
            await asyncio.to_thread(
                wait_until, lambda: not waiter._wanted, PATIENCE_S, "the reading has ended"
            )
        finally:
            client.close()  # else a reader that is left would keep the event loop from its end

    asyncio.run(cancelled())
    assert given == [0, 1]
