"""What a job waits for beside a worker: other jobs, its turn under a key, a rate."""

from __future__ import annotations

import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer.options import plan_of
from gpulayer_broker.errors import BadRequirement, JobNotFound
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("remotely")


@gl.remote
def double(n: int) -> int:
    return 2 * n


def test_a_job_begins_when_those_before_it_have_succeeded(bench: Bench) -> None:
    first = double.delay(1)
    both = double.map([2, 3])
    last = double.options(after=[first, both.jobs[0].id]).delay(4)
    after_map = double.options(after=both).delay(5)

    assert (last.record.phase, after_map.record.phase) == ("blocked", "blocked")
    bench.give(first.id, 0)
    bench.give(both.jobs[0].id, 0)
    assert (last.record.phase, after_map.record.phase) == ("ready", "blocked")
    bench.give(both.jobs[1].id, 0)
    bench.give(last.id, 8)
    bench.give(after_map.id, 10)
    assert (last.result(PATIENCE_S), after_map.result(PATIENCE_S)) == (8, 10)


def test_a_failed_predecessor_is_told_to_who_waits_behind_it(bench: Bench) -> None:
    first = double.delay(1)
    strict = double.options(after=first).delay(2)
    tolerant = double.options(after=first, after_policy="ended").delay(3)
    bench.fail(first.id, ValueError("no"))

    with pytest.raises(gl.JobCancelled, match="a job that it was to run after did not succeed") as told:
        strict.result(PATIENCE_S)
    assert told.value.end_reason == strict.end_reason == "predecessor_failed"
    bench.give(tolerant.id, 6)
    assert tolerant.result(PATIENCE_S) == 6


def test_an_unknown_predecessor_is_refused(bench: Bench) -> None:
    with pytest.raises(JobNotFound, match="j_nothing"):
        double.options(after="j_nothing").delay(1)


def test_jobs_of_one_key_take_turns(client: Client, bench: Bench) -> None:
    jobs = [double.options(concurrency_key="disk").delay(n) for n in range(3)]
    assert [job.record.phase for job in jobs] == ["ready", "limited", "limited"]

    for job in jobs:
        bench.give(job.id, 0)
    assert [job.result(PATIENCE_S) for job in jobs] == [0, 0, 0]
    pair = [double.options(concurrency_key="two", concurrency=2).delay(n) for n in range(3)]
    assert [job.record.phase for job in pair] == ["ready", "ready", "limited"]


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_of_a_map_so_many_run_at_once_as_it_says(bench: Bench, isolation: str) -> None:
    results = double.options(isolation=isolation).map(range(5), max_parallel=2)
    others = double.map(range(2), max_parallel=1)

    assert [job.record.phase for job in results.jobs] == ["ready"] * 2 + ["limited"] * 3
    assert [job.record.phase for job in others.jobs] == ["ready", "limited"]
    for job in results.jobs:
        bench.give(job.id, 0)
    assert results.results() == [0] * 5
    with pytest.raises(BadRequirement, match="max_parallel=0"):
        double.map([1], max_parallel=0)
    with pytest.raises(BadRequirement, match="concurrency_key already says"):
        double.options(concurrency_key="k").map([1], max_parallel=2)


def test_a_rate_lets_so_many_begin_within_its_time(bench: Bench) -> None:
    rated = double.options(concurrency_key="api", rate_limit="2/1h")

    assert [rated.delay(n).record.phase for n in range(3)] == ["ready", "ready", "limited"]


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_each_call_of_a_map_counts_for_its_key_and_its_rate(bench: Bench, isolation: str) -> None:
    some = double.options(isolation=isolation)
    keyed = some.options(concurrency_key="disk").map(range(3))
    rated = some.options(concurrency_key="api", rate_limit="2/1h").map(range(3))

    assert [job.record.phase for job in keyed.jobs] == ["ready", "limited", "limited"]
    assert [job.record.phase for job in rated.jobs] == ["ready", "ready", "limited"]


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100/1m", "k=100/60000"), ("3 / 500ms", "k=3/500"), ("1/s", "k=1/1000"), ("7/2h", "k=7/7200000")],
)
def test_a_rate_is_a_number_and_a_time(text: str, rate: str) -> None:
    plan = plan_of({"concurrency_key": "k", "rate_limit": text})

    assert (plan.rate, plan.permit) == (rate, "")
    assert plan_of({"concurrency_key": "k", "rate_limit": text, "concurrency": 3}).permit == "k=3"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"after": 3}, "after=3: give jobs, ids of jobs"),
        ({"after": ["j_1", "j 2"]}, "after='j 2'"),
        ({"after_policy": "whatever"}, "after_policy='whatever': not known"),
        ({"concurrency": 2}, "concurrency=2: of which jobs"),
        ({"concurrency_key": "a b"}, "concurrency_key='a b'"),
        ({"concurrency_key": "k", "concurrency": 0}, "concurrency=0"),
        ({"rate_limit": "1/s"}, "of which jobs"),
        ({"concurrency_key": "k", "rate_limit": "often"}, "write NUMBER/TIME"),
        ({"concurrency_key": "k", "rate_limit": "0/1s"}, "write NUMBER/TIME"),
        ({"concurrency_key": "k", "rate_limit": "5/0s"}, "more than nothing"),
        ({"concurrency_key": "k", "rate_limit": "5/soon"}, "rate_limit='5/soon'"),
    ],
)
def test_a_gate_without_sense_is_refused_where_it_is_written(options: dict[str, object], text: str) -> None:
    with pytest.raises(BadRequirement, match=text):
        gl.remote(**options)  # type: ignore[call-overload]
