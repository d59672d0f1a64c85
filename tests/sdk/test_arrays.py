"""Maps of tiny calls as arrays: one job, whose outcomes come a page at a time and can be taken up again."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import gpulayer as gl
from gpulayer.arrays import ArrayResult
from gpulayer.client import Client
from gpulayer_broker import spec as specs
from gpulayer_broker.errors import NotAllowed
from gpulayer_broker.functions import release
from gpulayer_broker.items import ItemOutcome
from tests.sdk.benches import Bench, bad, good
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("remotely")


class OwnError(Exception):
    """An exception that only this module knows."""


@gl.remote(isolation="warm")
def double(n: int) -> int:
    return 2 * n


def doubled(n: int) -> ItemOutcome:
    return good(2 * n)


@contextmanager
def working(work: Callable[[], object]) -> Iterator[None]:
    """Within it, `work` is done again and again in another thread."""
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()
            stop.wait(0.002)

    worker = threading.Thread(target=loop)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


def test_a_warm_map_is_one_job_of_many_items(bench: Bench) -> None:
    results = double.map(range(300))
    (job,) = results.jobs

    assert len(results) == 300
    assert bench.serve_array(job.id, doubled) == list(range(300))
    assert results.results() == [2 * n for n in range(300)]
    assert results.results() == [2 * n for n in range(300)]
    assert job.record.count == 300
    assert job.wait(PATIENCE_S) == "succeeded"


def test_starmap_spreads_each_item(bench: Bench) -> None:
    @gl.remote(isolation="warm")
    def add(n: int, m: int) -> int:
        return n + m

    results = add.starmap([(1, 2), (3, 4)])
    items = bench.items(results.jobs[0].id)

    assert [pickle.loads(items[n]) for n in range(2)] == [((1, 2), {}), ((3, 4), {})]


def test_few_items_travel_in_the_record_and_many_beside_it(bench: Bench) -> None:
    few, many = double.map(range(20)).jobs[0], double.map(range(2000)).jobs[0]

    assert specs.decode(few.record.spec).call.arguments.data is not None  # type: ignore[union-attr]
    assert specs.decode(many.record.spec).call.arguments.sha256  # type: ignore[union-attr]
    assert len(many.record.spec) < 4096
    assert pickle.loads(bench.items(many.id)[1999]) == ((1999,), {})


def test_what_is_not_an_array_is_a_job_for_a_warm_process(bench: Bench) -> None:
    single, retried = double.delay(1), double.options(retries=1).map([1, 2])

    assert single.record.count == 0
    assert specs.decode(single.record.spec).isolation == "warm"
    assert [job.record.count for job in retried.jobs] == [0, 0]
    assert specs.decode(retried.jobs[0].record.spec).isolation == "warm"


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(gl.GpulayerError, match="isolation='warn': not known: did you mean 'warm'"):
        gl.remote(isolation="warn")


def test_a_map_of_nothing_has_no_job(bench: Bench) -> None:
    results = double.map([])

    assert (len(results), results.results(), results.jobs) == (0, [], [])
    assert list(results.as_completed()) == []


def test_results_come_in_order_as_they_arrive(bench: Bench) -> None:
    results = double.map(range(3))
    (job,) = results.jobs
    values = iter(results)

    for expected in (0, 2, 4):
        bench.serve_array(job.id, doubled, chunks=1, us_each=20_000)
        assert next(values) == expected
    assert next(values, None) is None


def test_as_completed_gives_items_by_their_place_in_the_input(bench: Bench) -> None:
    results = double.map([10, 11, 12])
    (job,) = results.jobs
    ended = results.as_completed()
    grants = [grant for _ in range(3) if (grant := bench.chunk(job.id))]

    for grant in reversed(grants):
        bench.end_chunk(grant, [good(grant.start)])
        item = next(ended)
        assert (item.index, item.job, item.state, item.result()) == (
            grant.start,
            job,
            "succeeded",
            grant.start,
        )
    assert next(ended, None) is None


def test_a_failed_item_raises_or_stands_in_its_place(bench: Bench) -> None:
    def answer(n: int) -> ItemOutcome:
        return bad(ZeroDivisionError("by zero")) if n == 1 else doubled(n)

    strict, tolerant = double.map(range(3)), double.map(range(3), return_exceptions=True)
    bench.serve_array(strict.jobs[0].id, answer)
    bench.serve_array(tolerant.jobs[0].id, answer)

    with pytest.raises(ZeroDivisionError, match="by zero") as told:
        strict.results()
    assert f"item 1 of job {strict.jobs[0].id}" in told.value.__notes__[0]
    assert "line 7" in told.value.__notes__[0]
    first, second, third = tolerant.results()
    assert (first, third) == (0, 4)
    assert isinstance(second, ZeroDivisionError)
    assert [item.state for item in tolerant.as_completed()] == ["succeeded", "failed", "succeeded"]
    assert strict.jobs[0].state == "failed"


def test_a_trusted_worker_gives_original_exceptions_and_pickles(
    client: Client, trusting: Client, bench: Bench
) -> None:
    results = double.map(range(2), return_exceptions=True)
    (job,) = results.jobs
    answers = iter([bad(OwnError("broken")), ItemOutcome(True, "pickle", pickle.dumps({1, 2}))])
    bench.serve_array(job.id, lambda _: next(answers))

    elsewhere = results.results()
    assert isinstance(elsewhere[0], gl.RemoteError)
    assert isinstance(elsewhere[1], NotAllowed)
    here = trusting.map_result(job.id, return_exceptions=True).results()
    assert isinstance(here[0], OwnError)
    assert here[1] == {1, 2}


def test_an_item_that_took_its_workers_along_is_told_so(bench: Bench) -> None:
    results = double.map(range(2))
    (job,) = results.jobs
    for _ in range(3):
        grant = bench.chunk(job.id)
        assert grant is not None
        bench.hand.run(release(grant.id, grant.token, "lost"))
    bench.serve_array(job.id, doubled)

    with pytest.raises(gl.WorkerLost, match="item 0 of job"):
        results.results()


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"type": "JobTimedOut", "message": "it ran longer"}, gl.JobTimedOut),
        ({"type": "ResultTooLarge", "message": "1 GB"}, gl.GpulayerError),
        ({"type": "CannotStart", "message": "no such module"}, gl.JobFailed),
        ({"type": "Signalled", "message": "ended by signal 11", "signal": 11}, gl.JobFailed),
        ({"type": "JobTimedOut", "module": "theirs", "message": "x", "traceback": "line 1"}, gl.RemoteError),
    ],
)
def test_an_item_that_came_to_no_end_of_its_own_has_a_typed_error(
    bench: Bench, told: dict[str, Any], kind: type[Exception]
) -> None:
    results = double.map(range(1))
    bench.serve_array(results.jobs[0].id, lambda _: ItemOutcome(False, "error", json.dumps(told).encode()))

    with pytest.raises(kind, match=told["message"]):
        results.results()


def test_a_page_that_is_too_large_to_be_told_is_read_from_the_queue(bench: Bench) -> None:
    results = double.map(range(3))
    bench.serve_array(results.jobs[0].id, lambda n: good("x" * 20_000 + str(n)))

    assert [str(value)[-1] for value in results] == ["0", "1", "2"]


def test_a_result_in_the_store_is_read_when_it_is_asked_for(client: Client, bench: Bench) -> None:
    data = json.dumps("y" * 100_000).encode()
    sha = client._session.store.put_bytes(data)
    named = json.dumps({"sha256": sha, "size": len(data), "kind": "json"}).encode()
    results = double.map(range(1))
    bench.serve_array(results.jobs[0].id, lambda _: ItemOutcome(True, "blob", named))

    assert [str(value) for value in results] == ["y" * 100_000]


def test_cancelling_a_warm_map_is_one_call_and_keeps_what_there_is(bench: Bench) -> None:
    results = double.map(range(10), return_exceptions=True)
    (job,) = results.jobs
    bench.serve_array(job.id, doubled, chunks=1)
    values = iter(results)
    assert next(values) == 0

    assert results.cancel() == 9
    assert job.wait(PATIENCE_S) == "cancelled"
    rest = list(values)
    assert len(rest) == 9
    assert all(isinstance(value, gl.JobCancelled) for value in rest)
    assert results.cancel() == 0


def test_an_item_that_a_signal_ended_has_its_exit_code(bench: Bench) -> None:
    results = double.map(range(1))
    told = json.dumps({"type": "Signalled", "message": "", "signal": 11}).encode()
    bench.serve_array(results.jobs[0].id, lambda _: ItemOutcome(False, "error", told))

    with pytest.raises(gl.JobFailed, match="SIGSEGV") as error:
        results.results()
    assert (error.value.exit_code, error.value.end_reason) == (139, "signal")


def test_an_endless_input_goes_out_as_arrays_one_after_another(bench: Bench) -> None:
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            yield taken
            taken += 1

    results = double.map(endless(), max_in_flight=10)
    assert isinstance(results, ArrayResult)

    with working(lambda: bench_serve(bench)):
        first = list(itertools.islice(results, 23))
    assert first == [2 * n for n in range(23)]
    assert taken <= 23 + 10 + 1
    with pytest.raises(TypeError, match="no length"):
        len(results)
    results.cancel()


def test_as_completed_of_an_input_without_a_length_gives_every_item(bench: Bench) -> None:
    results = double.map(iter(range(23)), max_in_flight=10)

    with working(lambda: bench_serve(bench)):
        seen = {item.index: item.result() for item in results.as_completed()}
    assert seen == {n: 2 * n for n in range(23)}


def bench_serve(bench: Bench) -> None:
    """Runs what there is of whichever array comes first."""
    for grant in bench.hand.claim(bench.machine, most=1):
        array_id = grant.id.partition("/")[0]
        items = bench.items(array_id)
        arguments = [pickle.loads(items[number])[0][0] for number in range(grant.start, grant.stop)]
        bench.end_chunk(grant, [doubled(argument) for argument in arguments])


def test_large_inputs_are_spread_over_several_arrays(
    bench: Bench, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer.submitting.ARRAY_BYTES", 1000)
    monkeypatch.setattr("gpulayer.submitting.PACKED_AT_ONCE", 4)

    @gl.remote(isolation="warm")
    def length(text: str) -> int:
        return len(text)

    results = length.map(["x" * 100] * 30)

    assert len(results) == 30
    assert sum(job.record.count for job in results.jobs) == 30
    assert len(results.jobs) >= 3
    for job in results.jobs:
        bench.serve_array(job.id, lambda _: good(100))
    assert results.results() == [100] * 30
    assert sorted(item.index for item in results.as_completed()) == list(range(30))
    assert client.map_result(*(job.id for job in results.jobs)).results() == [100] * 30


@pytest.mark.parametrize("isolation", ["warm", "fresh"])
def test_an_argument_that_cannot_travel_is_named_with_its_item(bench: Bench, isolation: str) -> None:
    with pytest.raises(gl.NotPicklable, match=r"item 2000, argument number 1 of 'double' \(lock\) cannot"):
        double.options(isolation=isolation).map([*range(2000), threading.Lock()])


def test_ten_thousand_items_cost_little(bench: Bench) -> None:
    results = double.map(range(10))
    bench.serve_array(results.jobs[0].id, doubled)
    results.results()

    with counted_calls() as submitting:
        results = double.map(range(10_000))
    (job,) = results.jobs
    bench.serve_array(job.id, doubled, us_each=100)
    with counted_calls() as reading:
        values = results.results()

    assert values == [2 * n for n in range(10_000)]
    # Calls of Python functions, which are the same on every machine.
    assert submitting["calls"] + reading["calls"] < 10_000 * 20, (submitting, reading)


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How many functions this thread calls meanwhile."""
    counts: Counter[str] = Counter(calls=0)

    def count(_frame: object, event: str, _argument: object) -> None:
        if event == "call":
            counts["calls"] += 1

    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("isolation", ["warm", "fresh"])
def test_a_map_can_be_awaited(bench: Bench, isolation: str) -> None:
    async def both() -> list[list[int]]:
        maps = [double.options(isolation=isolation).map([1, 2]) for _ in range(2)]
        waiting = [asyncio.ensure_future(_values(each)) for each in maps]
        await asyncio.sleep(0)
        for job in [job for each in maps for job in each.jobs]:
            if job.record.is_array:
                await asyncio.to_thread(bench.serve_array, job.id, doubled)
            else:
                await asyncio.to_thread(bench.give, job.id, 7)
        return await asyncio.gather(*waiting)

    expected = [2, 4] if isolation == "warm" else [7, 7]
    assert asyncio.run(both()) == [expected, expected]


async def _values(results: gl.MapResult[int]) -> list[int]:
    return await results
