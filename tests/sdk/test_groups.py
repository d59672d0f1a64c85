"""Groups: jobs of one map or array under one id, taken up, cancelled and run again by it."""

from __future__ import annotations

import pytest

import gpulayer as gl
from gpulayer import groups
from gpulayer.client import Client
from gpulayer.submitting import GROUPS_KEPT
from gpulayer_broker.errors import BlobMissing, JobNotFound, UsageError
from tests.sdk.benches import Bench, bad, good
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("remotely")


@gl.remote
def double(n: int) -> int:
    return 2 * n


tiny = double.options(isolation="warm")


def test_a_map_is_taken_up_by_one_id(client: Client, bench: Bench) -> None:
    results = double.map(range(3))
    (group,) = results.ids
    bench.serve(3, lambda grant: int(grant.id.rpartition("-")[2]))

    assert [job.id for job in results.jobs] == [f"{group}-{n}" for n in (1, 2, 3)]
    assert client.map_result(group).results() == [1, 2, 3]
    assert client.map_result(group).ids == [group]
    assert double.map([]).ids == []


def test_a_map_shows_what_it_is_and_its_id(client: Client, bench: Bench) -> None:
    result = double.map(range(3))

    assert repr(result) == f"<gpulayer.MapResult {result.ids[0]}: 3 calls of double>"
    assert repr(double.map([])) == "<gpulayer.MapResult: 0 calls of double>"


def test_a_map_of_tiny_calls_is_taken_up_by_its_array(client: Client, bench: Bench) -> None:
    results = tiny.map(range(3))
    bench.serve_array(results.ids[0], lambda n: good(2 * n))

    assert results.ids == [results.jobs[0].id]
    assert client.map_result(*results.ids).results() == [0, 2, 4]


def test_a_group_is_found_while_any_member_is_kept(client: Client, bench: Bench) -> None:
    (group,) = double.map(range(3)).ids
    for number in (1, 2):
        bench.hand.link.call("DEL", bench.queue.keys.job(f"{group}-{number}"))
        bench.hand.link.call("ZREM", bench.queue.keys.jobs("queued"), f"{group}-{number}")

    assert groups.members(bench.queue, group) == [f"{group}-{n}" for n in (1, 2, 3)]
    with pytest.raises(JobNotFound, match="no group 'g_nothing'"):
        groups.members(bench.queue, "g_nothing")


def test_what_did_not_succeed_of_a_group_is_run_again_as_a_new_one(client: Client, bench: Bench) -> None:
    results = double.options(priority="high", concurrency_key="k", concurrency=9).map(range(4))
    (group,) = results.ids
    first, second, third, fourth = results.jobs
    bench.give(first.id, 0)
    bench.fail(second.id, ValueError("no"))
    third.cancel()

    again = client.retry_map(group, failed=True)

    assert len(again) == 2
    assert again.ids != [group]
    records = [job.record for job in again.jobs]
    assert [record.priority for record in records] == [1, 1]
    assert [record.permit for record in records] == ["k=9", "k=9"]
    bench.give(fourth.id, 6)
    for job, value in zip(again.jobs, (2, 4), strict=True):
        bench.give(job.id, value)
    assert again.results() == [2, 4]
    assert len(client.retry_map(again.ids[0], failed=True)) == 0
    assert len(client.retry_map(group)) == 4


def test_a_group_that_has_not_ended_is_not_run_again_as_a_whole(client: Client, bench: Bench) -> None:
    with pytest.raises(UsageError, match="only what has ended"):
        client.retry_map(double.map([1, 2]).ids[0])


def test_the_items_that_did_not_succeed_are_run_again_as_a_new_array(client: Client, bench: Bench) -> None:
    (array,) = tiny.map(range(5)).ids
    bench.serve_array(array, lambda n: bad(ValueError("no")) if n in (1, 3) else good(n))

    again = client.retry_map(array, failed=True)

    assert len(again) == 2
    assert bench.serve_array(again.ids[0], lambda n: good(2 * n)) == [1, 3]
    assert again.results() == [2, 6]
    assert len(client.retry_map(again.ids[0], failed=True)) == 0


def test_the_items_that_a_cancelled_map_left_over_are_run_again(client: Client, bench: Bench) -> None:
    results = tiny.map(range(5))
    bench.serve_array(results.ids[0], good, chunks=2, us_each=20_000)
    results.cancel()

    again = client.retry_map(results.ids[0], failed=True)

    assert bench.serve_array(again.ids[0], good) == [2, 3, 4]


def test_which_items_failed_is_not_guessed(client: Client, bench: Bench) -> None:
    (array,) = tiny.options(result_ttl="1ms").map(range(3)).ids
    bench.serve_array(array, lambda n: bad(ValueError("no")))

    def has_faded() -> bool:
        bench.hand.tick()
        return not bench.queue.pages(array)

    wait_until(has_faded, PATIENCE_S, "its results have left")
    with pytest.raises(BlobMissing, match=f"which items of job {array} failed is no longer kept"):
        client.retry_map(array, failed=True)


def test_a_job_waits_for_a_whole_group(bench: Bench) -> None:
    results = double.map([1, 2])
    last = double.options(after=results.ids[0]).delay(3)

    assert last.record.after == tuple(job.id for job in results.jobs)
    bench.give(results.jobs[0].id, 2)
    assert last.record.phase == "blocked"
    bench.give(results.jobs[1].id, 4)
    assert last.record.phase == "ready"


def test_of_the_groups_that_jobs_waited_for_only_the_last_are_remembered(bench: Bench) -> None:
    before = [double.map([n]) for n in range(GROUPS_KEPT + 2)]
    after = [double.options(after=results.ids[0]).delay(3) for results in before]

    assert [job.record.after for job in after] == [(results.jobs[0].id,) for results in before]
    assert len(after[0]._opened.submitter._members) == GROUPS_KEPT


def test_a_group_is_cancelled_as_a_whole(client: Client, bench: Bench) -> None:
    results = double.map([1, 2])
    bench.give(results.jobs[0].id, 2)

    assert client.cancel(results.ids[0])
    assert [job.record.state for job in results.jobs] == ["succeeded", "cancelled"]
    assert not client.cancel(results.ids[0])


def test_where_one_job_is_meant_a_group_is_refused(client: Client, bench: Bench) -> None:
    (group,) = double.map([1, 2]).ids
    for use in (client.get, client.retry, client.explain, client.outputs):
        with pytest.raises(UsageError, match=f"{group} is a group: name one of its jobs, such as {group}-1"):
            use(group)
    with pytest.raises(UsageError, match="is no map"):
        client.retry_map(double.delay(1).id)


@pytest.mark.parametrize(
    ("text", "numbers", "most"),
    [
        ("0-3", [0, 1, 2, 3], None),
        ("1,5-7,6", [1, 5, 6, 7], None),
        ("0-8:4%2", [0, 4, 8], 2),
        ("7", [7], None),
    ],
)
def test_the_numbers_of_an_array(text: str, numbers: list[int], most: int | None) -> None:
    assert groups.parsed_array(text) == (numbers, most)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "write numbers and ranges"),
        ("a-b", "write numbers and ranges"),
        ("0-8:0", "write numbers and ranges"),
        ("9-0", "9-0 is empty"),
        ("0-9%", "after % stands how many"),
        ("0-9%0", "after % stands how many"),
        ("0-999999999999", "more than 1000000 jobs"),
    ],
)
def test_an_array_without_sense_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        groups.parsed_array(text)
