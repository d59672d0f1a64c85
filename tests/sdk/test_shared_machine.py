"""Several workers on one machine: what one holds is not free for another; a job is not in its own way."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gpulayer.client import Client
from tests.sdk.benches import Bench


def work() -> int:
    return 1


@pytest.fixture
def beside(bench: Bench) -> Bench:
    """The bench, and a second worker on its machine, which offers as much."""
    first = bench._registration("w_bench")
    bench.queue.register(replace(first, worker="w_a", info=json.dumps({"name": "zeta"}).encode()))
    return bench


def test_what_one_worker_holds_is_not_free_for_another_of_its_machine(client: Client, beside: Bench) -> None:
    beside.take(client.submit(work, cpus=60, memory="1GiB").id)

    alpha, zeta = client.workers()
    assert (alpha.free_slots, zeta.free_slots) == (4, 4)
    assert alpha.free_memory_bytes == zeta.free_memory_bytes == (64 << 30) - (1 << 30)
    found = client.submit(work, cpus=10).explain()
    assert [each.fits for each in found.workers] == ["busy", "busy"]
    assert found.workers[1].reasons == ("needs 10 free cpus, 4 free",)


def test_workers_come_by_name(client: Client, beside: Bench) -> None:
    assert [worker.name for worker in client.workers()] == ["alpha", "zeta"]
    assert [worker.id for worker in client.workers()] == ["w_bench", "w_a"]


def test_a_job_that_runs_is_not_in_its_own_way(client: Client, beside: Bench) -> None:
    job = client.submit(work, cpus=60)
    beside.take(job.id)

    found = job.explain()
    assert found.summary == "it runs on alpha"
    assert [(each.fits, each.reasons) for each in found.workers] == [
        ("yes", ("runs it",)),
        ("busy", ("needs 60 free cpus, 4 free",)),
    ]
