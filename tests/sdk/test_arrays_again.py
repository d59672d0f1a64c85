"""Maps that are taken up again: by id, in another process, after a lost notice, a lost connection, a lost server."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing

import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer.handing_over import Arguments
from gpulayer.options import plan_of
from gpulayer.payload import pack_function
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import BlobMissing, UsageError
from gpulayer_broker.items import ItemOutcome
from gpulayer_broker.keys import root_of
from tests.queueing import Hand
from tests.sdk.benches import Bench, bad, good
from tests.servers import QueueServer
from tests.support import PATIENCE_S, in_background, wait_until

pytestmark = pytest.mark.usefixtures("remotely")


@gl.remote(isolation="warm")
def double(n: int) -> int:
    return 2 * n


def doubled(n: int) -> ItemOutcome:
    return good(2 * n)


def test_a_map_is_taken_up_again_by_its_jobs_id(client: Client, bench: Bench) -> None:
    job_id = double.map(range(200)).jobs[0].id
    bench.serve_array(job_id, doubled, chunks=3)

    again = client.map_result(job_id)
    values = iter(again)
    first = [next(values) for _ in range(3)]
    bench.serve_array(job_id, doubled)

    assert first + list(values) == [2 * n for n in range(200)]
    assert len(again) == 200
    assert client.get(job_id).result(PATIENCE_S) == [2 * n for n in range(200)]


def test_pages_reach_who_took_a_map_up_again_as_they_come(
    client: Client, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client._opened.waiter, "_silence_s", 10 * PATIENCE_S)  # it is told, it does not look
    results = double.map(range(2))
    (job,) = results.jobs
    values = iter(client.map_result(job.id))
    late: list[int] = []
    with in_background(lambda: late.append(next(values))):
        watchers = bench.hand.key(f"watchers:{job.id}")
        wait_until(lambda: bench.hand.link.call("SCARD", watchers) == 1, PATIENCE_S, "the array is watched")
        bench.serve_array(job.id, doubled, chunks=1)

    assert late == [0]
    bench.serve_array(job.id, doubled)


def test_the_jobs_of_a_plain_map_are_taken_up_again_too(client: Client, bench: Bench) -> None:
    plain = double.options(isolation="fresh").map([3, 4])
    for job in plain.jobs:
        bench.give(job.id, 1)

    assert client.map_result(*(job.id for job in plain.jobs)).results() == [1, 1]
    with pytest.raises(UsageError, match="take them up apart"):
        client.map_result(plain.jobs[0].id, double.map([1]).jobs[0].id)
    with pytest.raises(UsageError, match="ids"):
        client.map_result()


def test_a_failed_arrays_result_raises_the_first_error(client: Client, bench: Bench) -> None:
    job = double.map(range(3)).jobs[0]
    bench.serve_array(job.id, lambda n: bad(ValueError(f"no {n}")) if n else doubled(n))

    with pytest.raises(ValueError, match="no 1"):
        client.get(job.id).result(PATIENCE_S)


def test_results_past_their_time_are_told(client: Client, bench: Bench) -> None:
    job = double.map(range(3)).jobs[0]
    bench.serve_array(job.id, doubled)
    bench.hand.link.call("DEL", bench.hand.key(f"pages:{job.id}"))

    with pytest.raises(BlobMissing, match="item 0 of job"):
        client.get(job.id).result(PATIENCE_S)
    with pytest.raises(BlobMissing, match="item 0 of job"):
        client.map_result(job.id).results()


def test_pages_that_nobody_was_told_of_are_read_after_a_new_connection(client: Client, bench: Bench) -> None:
    results = double.map(range(3))
    (job,) = results.jobs
    values = iter(results)
    bench.serve_array(job.id, doubled, chunks=1, us_each=20_000)
    assert next(values) == 0
    link = bench.hand.link
    own = link.call("CLIENT", "ID")
    done = link.call("KEYS", bench.hand.key("done:*"))
    bench.serve_array(job.id, doubled, chunks=1, us_each=20_000)
    link.call("DEL", *done)
    link.call("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    assert link.call("CLIENT", "ID") == own
    assert next(values) == 2
    bench.serve_array(job.id, doubled)
    assert next(values) == 4


def test_a_page_whose_notice_is_lost_is_read_from_the_queue(bench: Bench) -> None:
    results = double.map(range(4))
    (job,) = results.jobs
    values = iter(results)
    bench.serve_array(job.id, doubled, chunks=1, us_each=20_000)
    assert next(values) == 0
    done = bench.hand.key(f"done:{results._opened.waiter.client}")
    grants = [grant for _ in range(3) if (grant := bench.chunk(job.id))]
    bench.end_chunk(grants[0], [good(2)])
    bench.hand.link.call("XDEL", done, "0-2")
    bench.end_chunk(grants[1], [good(4)])

    assert [next(values) for _ in range(2)] == [2, 4]
    bench.end_chunk(grants[2], [good(6)])
    assert next(values) == 6


def test_a_map_outlives_a_kill_of_the_server_and_its_restart(
    queue_server: Callable[..., QueueServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPULAYER_NAMESPACE", "default")
    server = queue_server("--appendfsync", "always", append_only=True)
    with Client(redis=server.endpoint.url) as client, Link(server.endpoint) as link:
        bench = Bench(Hand(link, root_of("default")), "default")
        calls: list[Arguments] = [((n,), {}) for n in range(6)]
        results = client.submit_map(pack_function(abs), calls, plan_of({"isolation": "warm"}), len(calls))
        (job,) = results.jobs
        values: list[int] = []
        with in_background(lambda: values.extend(results)):
            bench.serve_array(job.id, doubled, chunks=2, us_each=20_000)
            wait_until(lambda: len(values) == 2, PATIENCE_S, "two results have come")
            server.kill()
            server.start()
            bench.serve_array(job.id, doubled, us_each=20_000)

        assert values == [2 * n for n in range(6)]


def test_a_forked_child_reads_a_map_that_its_parent_submitted(bench: Bench) -> None:
    results = double.map(range(4))
    (job,) = results.jobs
    bench.serve_array(job.id, doubled, chunks=2, us_each=20_000)
    values = iter(results)
    assert next(values) == 0

    pid = os.fork()
    if pid == 0:
        try:
            ok = results.results() == [0, 2, 4, 6]
        except BaseException:  # noqa: BLE001 - the child must never return into pytest
            ok = False
        os._exit(0 if ok else 1)
    bench.serve_array(job.id, doubled)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert list(values) == [2, 4, 6]


def test_two_threads_read_one_map(bench: Bench) -> None:
    results = double.map(range(300))
    seen: list[list[int]] = []
    with in_background(*[lambda: seen.append(results.results())] * 3):
        bench.serve_array(results.jobs[0].id, doubled)

    assert seen == [[2 * n for n in range(300)]] * 3


def test_closing_the_client_ends_every_reading(address: str, bench: Bench) -> None:
    client = Client(redis=address)
    calls: list[Arguments] = [((1,), {})]
    results = client.submit_map(pack_function(abs), calls, plan_of({"isolation": "warm"}), len(calls))
    errors: list[BaseException] = []

    def read() -> None:
        try:
            results.results()
        except gl.QueueUnreachable as error:
            errors.append(error)

    slot = results.jobs[0]._slot
    with in_background(read, read), closing(client):
        wait_until(lambda: len(slot.callbacks) == 2, PATIENCE_S, "both wait")

    assert len(errors) == 2
