"""Awaits that are cancelled at random moments, over a slow connection: nobody gets what was another's."""

from __future__ import annotations

import asyncio
import random

import pytest

import gpulayer as gl
from gpulayer.client import Client
from tests.reliability.conftest import Hire
from tests.reliability.proxy import Proxy
from tests.support import PATIENCE_S
from tests.workers import Desk

COUNT = 40
DELAY_S = 0.02


def its_own(n: int) -> str:
    import time

    time.sleep(0.01 * (n % 5))
    return f"result {n}"


async def value(job: gl.Job[str]) -> str:
    return await job


async def awaited_or_cancelled(job: gl.Job[str], dice: random.Random) -> str:
    """Cancelled at a random moment, as often as not, and awaited again; the result."""
    while dice.random() < 0.6:
        task = asyncio.create_task(value(job))
        await asyncio.sleep(dice.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return await job


def test_each_await_gets_its_own_result_however_many_others_are_cancelled(
    desk: Desk, hire: Hire, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAYER_NAMESPACE", desk.namespace)
    hire(private=False, slots=4)
    dice = random.Random(12)
    proxy.delay_s = DELAY_S
    with Client(redis=proxy.endpoint.url) as client:
        jobs = [client.submit(its_own, args=[n]) for n in range(COUNT)]

        async def all_of_them() -> list[str]:
            each = (awaited_or_cancelled(job, dice) for job in jobs)
            return await asyncio.wait_for(asyncio.gather(*each), 2 * PATIENCE_S)

        assert asyncio.run(all_of_them()) == [f"result {n}" for n in range(COUNT)]
        assert [client.get(job.id).result(PATIENCE_S) for job in jobs] == [
            f"result {n}" for n in range(COUNT)
        ]
