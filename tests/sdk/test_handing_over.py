"""Jobs and maps as arguments: pipelines and callbacks of maps, which need nobody who waits in between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer_broker import spec as specs
from gpulayer_broker.errors import NotPicklable, StoreError, UsageError
from gpulayer_broker.given import Given
from gpulayer_broker.spec import UndecodableSpec, request_digest
from gpulayer_worker.given import write_given
from tests.sdk.benches import Bench, bad, good
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("remotely")


@gl.remote
def double(n: int) -> int:
    return 2 * n


@gl.remote
def total(numbers: list[int], start: int = 0, *, factor: int = 1) -> int:
    return factor * sum(numbers, start)


@gl.remote
def table(n: int) -> np.ndarray:
    import numpy

    return numpy.arange(n)


@gl.remote
def big(n: int) -> list[str]:
    return ["x" * 1000] * n


@gl.remote
def shape(value: object) -> str:
    return f"{type(value).__name__} {len(value)}"  # type: ignore[arg-type]


@gl.remote
def pair(one: object, other: object = None, *, third: object = None) -> list[object]:
    return [one, other, third]


@gl.remote
def odd(n: int) -> set[int]:
    return {n, n + 1}


# On a real worker -----------------------------------------------------------------------------------------------------


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_a_pipeline_passes_each_result_on() -> None:
    last = double.delay(1).then(double).then(pair, other=5)

    assert last.result(PATIENCE_S) == [4, 5, None]


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_map_calls_back_with_the_list_of_its_results(isolation: str) -> None:
    results = double.options(isolation=isolation).map(range(5))

    assert results.then(total, 1, factor=10).result(PATIENCE_S) == 210


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_results_of_every_kind_are_handed_over_in_their_place() -> None:
    jobs = (pair.delay(odd.delay(1)), pair.delay(None, None, third=double.delay(4)))
    shapes = [table.delay(3).then(shape), big.delay(2000).then(shape), odd.delay(3).then(shape)]

    assert jobs[1].result(PATIENCE_S) == [None, None, 8]
    assert [job.result(PATIENCE_S) for job in shapes] == ["ndarray 3", "list 2000", "set 2"]
    with Client(trust_workers=True) as trusting:
        assert trusting.get(jobs[0].id).result(PATIENCE_S) == [{1, 2}, None, None]


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_a_result_that_is_gone_is_named_and_the_call_not_begun() -> None:
    first = double.delay(1)
    first.wait(PATIENCE_S)
    queue = first._opened.session.queue
    queue.link.call("HDEL", queue.keys.job(first.id), "result")

    with pytest.raises(gl.JobFailed, match=f"its argument number 1 is what job {first.id} returned"):
        first.then(double).result(PATIENCE_S)


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
@pytest.mark.parametrize("count", [1, 3])
def test_the_job_of_a_warm_map_hands_over_a_list_as_its_result_is_one(count: int) -> None:
    (job,) = double.options(isolation="warm").map(range(count)).jobs

    assert pair.delay(job).result(PATIENCE_S) == [job.result(PATIENCE_S), None, None]


def test_results_over_the_limit_are_refused_before_they_are_written(
    client: Client, bench: Bench, tmp_path: Path
) -> None:
    results = double.map(range(3))
    for job in results.jobs:
        bench.give(job.id, "x" * 1000)
    given = Given(0, results.ids[0], many=True, size=3)

    assert write_given([given], bench.queue, client._session.store, tmp_path / "given", 4000).exists()
    with pytest.raises(StoreError, match=r"over the limit of 2\.0 kB"):
        write_given([given], bench.queue, client._session.store, tmp_path / "more", 2048)
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize("size", [-1, 10**12])
def test_a_group_of_no_sense_makes_the_record_undecodable(bench: Bench, size: int) -> None:
    record = double.delay(1).then(double).record
    damaged = record.spec.replace(b'"size":0', b'"size":%d' % size)

    with pytest.raises(UndecodableSpec):
        specs.decode(damaged)


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("worker")
def test_a_warm_call_takes_results_too() -> None:
    assert double.delay(2).then(double.options(isolation="warm")).result(PATIENCE_S) == 8


# In the queue ---------------------------------------------------------------------------------------------------------


def test_what_is_given_is_waited_for_and_stands_in_the_record(bench: Bench) -> None:
    first, results = double.delay(1), double.map([1, 2])
    last = pair.options(after=first).delay(first, results)

    call = specs.decode(last.record.spec).call
    assert call is not None
    assert [(each.place, each.job, each.many, each.size) for each in call.given] == [
        (0, first.id, False, 0),
        (1, results.ids[0], True, 2),
    ]
    assert last.record.after == (first.id, *(job.id for job in results.jobs))
    assert last.record.phase == "blocked"


def test_a_failed_predecessor_cancels_the_whole_pipeline(bench: Bench) -> None:
    first = double.delay(1)
    last = first.then(double).then(double)
    bench.fail(first.id, ValueError("no"))

    with pytest.raises(gl.JobCancelled) as told:
        last.result(PATIENCE_S)
    assert told.value.end_reason == "predecessor_failed"


def test_a_map_with_a_failed_item_calls_nobody_back(bench: Bench) -> None:
    results = double.options(isolation="warm").map(range(3))
    callback = results.then(total)
    bench.serve_array(results.ids[0], lambda n: bad(ValueError("no")) if n == 1 else good(n))

    assert callback.wait(PATIENCE_S) == "cancelled"


def test_calls_on_different_results_are_different_requests(bench: Bench) -> None:
    jobs = [double.delay(n).then(double) for n in (1, 2)]

    one, other = (request_digest(specs.decode(job.record.spec)) for job in jobs)
    assert one != other


def test_a_job_inside_another_value_is_refused(bench: Bench) -> None:
    job = double.delay(1)

    with pytest.raises(NotPicklable, match="handed over as an argument of its own"):
        total.delay([job])  # type: ignore[list-item]
    with pytest.raises(NotPicklable, match="nor to a warm map"):
        double.options(isolation="warm").map([job])


def test_what_cannot_be_handed_over_is_refused(address: str, bench: Bench, namespace: str) -> None:
    stream = double.map(n for n in range(3))

    with pytest.raises(UsageError, match="one map with a length"):
        stream.then(total)
    with Client("local") as other, pytest.raises(UsageError, match="is of another target"):
        double.delay(other.handle("j_elsewhere00"))  # type: ignore[arg-type]
