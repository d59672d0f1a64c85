"""Which workers can run a job, and why the others cannot."""

from __future__ import annotations

from gpulayer.client import Client
from tests.sdk.benches import Bench


def work() -> int:
    return 1


def test_no_worker_is_told_apart_from_none_that_fits(client: Client) -> None:
    found = client.submit(work).explain()

    assert found.fits == "never"
    assert found.summary == "no worker is known yet"


def test_a_job_that_can_never_run_is_told_with_the_reason(client: Client, bench: Bench) -> None:
    found = client.submit(work, accelerator="cuda", frameworks={"jax": ""}).explain()

    assert found.fits == "never"
    assert found.workers[0].worker == "alpha"
    assert found.workers[0].reasons == (
        "accelerator 'cuda' not available (has cpu)",
        "framework 'jax' not installed",
    )
    assert found.summary.startswith("no known worker can ever run this (1 worker: 1 ")


def test_a_busy_worker_is_told_apart_from_one_that_never_fits(client: Client, bench: Bench) -> None:
    large = client.submit(work, cpus=60)
    bench.take(large.id)
    found = client.submit(work, cpus=10).explain()

    assert found.fits == "busy"
    assert found.workers[0].reasons == ("needs 10 free cpus, 4 free",)
    assert found.summary == "the only worker that fits is busy"


def test_workers_are_listed_with_what_they_hold(client: Client, bench: Bench) -> None:
    job = client.submit(work, cpus=3, memory="1GiB")
    bench.take(job.id)

    (worker,) = client.workers()
    assert (worker.name, worker.state) == ("alpha", "online")
    assert (worker.slots, worker.free_slots) == (64, 61)
    assert worker.memory_bytes - worker.free_memory_bytes == 1 << 30
    assert worker.running == (job.id,)


def test_a_worker_that_is_silent_counts_as_offline(client: Client, bench: Bench) -> None:
    bench.hand.link.call("ZADD", bench.hand.key("workers"), 1, bench.machine.id)

    assert client.workers()[0].state == "offline"
    reasons = client.submit(work).explain().workers[0].reasons
    assert reasons[0].startswith("offline for")


def test_what_a_worker_provides_is_what_is_well_known_or_asked_for(client: Client, bench: Bench) -> None:
    plain = client.submit(work).explain().workers[0].provides
    asked = client.submit(work, frameworks={"obscure": ">=1"}).explain().workers[0].provides

    assert "numpy 2.4.6" in plain
    assert "obscure" not in plain
    assert "obscure 1.0" in asked
