"""Which workers can run a job, and why the others cannot."""

from __future__ import annotations

import sys

import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer.handle import Job
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until


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


def test_of_several_workers_each_condition_is_told_with_how_many_it_leaves(
    client: Client, bench: Bench, namespace: str
) -> None:
    Bench(bench.hand, namespace, "w_second")
    found = client.submit(work, cpus=2, frameworks={"numpy": ">=2", "jax": ""}).explain()

    assert [each.leaves for each in found.conditions] == [2, 0, 0, 0, 0]
    assert "of 2 workers: accelerator cpu leaves 2, jax leaves 0, numpy >=2 leaves 0, python " in str(found)


def test_a_busy_worker_is_told_apart_from_one_that_never_fits(client: Client, bench: Bench) -> None:
    large = client.submit(work, cpus=60)
    bench.take(large.id)
    found = client.submit(work, cpus=10).explain()

    assert found.fits == "busy"
    assert found.workers[0].reasons == ("needs 10 free cpus, 4 free",)
    assert found.summary == "the only worker that fits is busy"


def kept_for_a_large_job(client: Client, bench: Bench) -> Job[object]:
    """A job that needs more than is free beside a small one, after the time that it waits for an earmark."""
    bench.hand.link.call("HSET", bench.hand.key("config"), "earmark_ms", 1)
    bench.take(client.submit(work).id)
    large = client.submit(work, cpus=64, memory="1GiB")

    def is_kept() -> bool:
        bench.hand.tick()
        return bool(bench.hand.link.call("EXISTS", bench.hand.key("earmarks")))

    wait_until(is_kept, PATIENCE_S, "the machine is kept")
    return large


def test_a_job_that_a_worker_is_kept_for_says_so(client: Client, bench: Bench) -> None:
    large = kept_for_a_large_job(client, bench)
    found = large.explain()

    assert found.fits == "busy"
    assert found.workers[0].reasons == ("needs 64 free cpus, 63 free", "kept for this job")
    assert found.summary == "the only worker that fits is busy"


def test_a_small_job_is_told_which_job_the_room_is_kept_for_and_an_important_one_is_not(
    client: Client, bench: Bench
) -> None:
    large = kept_for_a_large_job(client, bench)
    small, urgent = client.submit(work).explain(), client.submit(work, priority="high").explain()

    assert (small.fits, small.workers[0].reasons) == ("busy", (f"kept for job {large.id}",))
    assert (urgent.fits, urgent.workers[0].reasons) == ("yes", ("fits",))


def test_what_is_kept_for_another_job_is_no_reason_where_there_is_room_beside_it(
    client: Client, bench: Bench
) -> None:
    text = b"earmark j_0123456789ab c0.0.60.1024.0.x ann 2 w_bench 0 "
    bench.hand.link.call("HSET", bench.hand.key("held:w_bench"), "earmark", text)

    assert client.submit(work, cpus=4).explain().fits == "yes"
    assert client.submit(work, cpus=5).explain().workers[0].reasons == ("kept for job j_0123456789ab",)
    bench.hand.link.call("DEL", bench.hand.key("held:w_bench"))


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


OTHER = f"3.{sys.version_info.minor + 1}"
OWN = f"3.{sys.version_info.minor}"


def test_code_goes_to_a_python_that_can_load_it_and_explain_says_so(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer.submitting.minor_version", lambda: OTHER)

    found = client.submit(work).explain()

    assert f"python =={OTHER}.*" in found.needs
    assert found.fits == "never"
    assert found.workers[0].reasons[0].endswith(f"does not satisfy =={OTHER}.*")


def test_what_is_imported_by_name_and_what_the_user_asked_for_are_left_alone(
    client: Client, bench: Bench
) -> None:
    by_name = client.submit(len, args=("abc",))
    asked = client.submit(work, python=">=3.8")
    code_in_arguments = client.submit(len, args=([work],))

    assert "python" not in by_name.explain().needs
    assert asked.explain().needs == "accelerator cpu, python >=3.8, 1 cpu"
    assert f"python =={OWN}.*" in code_in_arguments.explain().needs


@pytest.mark.usefixtures("remotely")
def test_one_item_with_code_in_it_decides_for_its_array(bench: Bench) -> None:
    @gl.remote(isolation="warm")
    def size(x: object) -> int:
        return len(str(x))

    warm = size.map([1, work])
    plain = size.options(isolation="fresh").map([1, 2])

    for job in (*warm.jobs, *plain.jobs):
        assert f"python =={OWN}.*" in job.explain().needs


@pytest.mark.usefixtures("remotely")
def test_a_call_is_explained_before_it_is_submitted(client: Client, bench: Bench) -> None:
    @gl.remote(cpus=10, frameworks={"numpy": ">=2"})
    def local() -> int:
        return 1

    assert f"python =={OWN}.*" in local.explain().needs
    assert local.explain().fits == "yes"
    bench.take(client.submit(work, cpus=60).id)

    assert local.explain().workers[0].reasons == ("needs 10 free cpus, 4 free",)
    assert local.options(frameworks={"jax": ""}).explain().fits == "never"
    assert len(client.jobs()) == 1
