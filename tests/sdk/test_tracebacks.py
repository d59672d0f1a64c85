"""What a script prints when what it asked for has failed: the error, with the remote traceback and none of our own."""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer_broker.items import ItemOutcome
from tests.sdk.benches import Bench, bad
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("remotely")
OURS = Path(gl.__file__).parent


@gl.remote
def work(n: int) -> int:
    return n


@gl.remote
def lists(*parts: object) -> list[object]:
    return list(parts)


def own_lines(error: BaseException) -> list[str]:
    """The functions of ours that stand in what Python prints of an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.name for frame in frames if Path(frame.filename).is_relative_to(OURS)]


def failed(bench: Bench, job_id: str) -> None:
    bench.fail(job_id, ZeroDivisionError("by zero"), traceback="line 7")


def cancelled(bench: Bench, job_id: str) -> None:
    bench.end(job_id, "cancelled", reason="cancelled")


def timed_out(bench: Bench, job_id: str) -> None:
    bench.end(job_id, "timed_out", reason="timeout")


def lost(bench: Bench, job_id: str) -> None:
    bench.end(job_id, "failed", reason="worker_lost")


END = [
    (failed, ZeroDivisionError),
    (cancelled, gl.JobCancelled),
    (timed_out, gl.JobTimedOut),
    (lost, gl.WorkerLost),
]


@pytest.mark.parametrize(("end", "kind"), END)
def test_a_job_s_error_comes_from_the_line_that_asked_for_its_result(
    bench: Bench, end: Callable[[Bench, str], None], kind: type[Exception]
) -> None:
    job = work.delay(1)
    end(bench, job.id)

    async def awaited() -> int:
        return await job

    with pytest.raises(kind) as told:
        job.result(PATIENCE_S)
    assert own_lines(told.value) == ["result"]
    assert (told.value.__cause__, told.value.__context__) == (None, None)
    with pytest.raises(kind) as told:
        asyncio.run(awaited())
    assert own_lines(told.value) == ["_awaited"]


@pytest.mark.parametrize(("end", "kind"), END)
def test_a_map_s_error_comes_from_the_line_that_asked_for_its_results(
    bench: Bench, end: Callable[[Bench, str], None], kind: type[Exception]
) -> None:
    results = work.map([1])
    end(bench, results.jobs[0].id)

    with pytest.raises(kind) as told:
        results.results()
    assert own_lines(told.value) == ["results", "__iter__"]
    assert (told.value.__cause__, told.value.__context__) == (None, None)
    (item,) = results.as_completed()
    with pytest.raises(kind) as told:
        item.result()
    assert own_lines(told.value) == ["result"]


def test_a_map_that_another_process_cancels_ends_with_the_documented_error(
    bench: Bench, client: Client
) -> None:
    tiny = work.options(isolation="warm")
    group, array = work.map([1, 2]), tiny.map([1, 2])
    assert client.cancel(group.ids[0])
    assert client.cancel(array.ids[0])

    with pytest.raises(gl.JobCancelled, match=f"job {group.jobs[0].id} was cancelled"):
        group.results()
    with pytest.raises(gl.JobCancelled, match=f"item 0 of job {array.ids[0]} was cancelled") as told:
        array.results()
    assert own_lines(told.value) == ["results", "__iter__"]


def test_an_item_s_error_has_the_remote_traceback_and_no_line_of_ours(bench: Bench) -> None:
    results = work.options(isolation="warm").map([1])
    bench.serve_array(results.ids[0], lambda _: bad(ZeroDivisionError("by zero")))

    with pytest.raises(ZeroDivisionError) as told:
        results.results()
    assert own_lines(told.value) == ["results", "__iter__"]
    assert "line 7" in told.value.__notes__[0]


def test_a_wait_that_is_too_short_ends_at_the_line_that_waited() -> None:
    job = work.delay(1)

    for wait in (job.result, job.wait):
        with pytest.raises(gl.WaitTimeout) as told:
            wait(0)
        assert own_lines(told.value) == [wait.__name__]


def test_a_value_whose_class_is_not_here_stands_in_its_place_as_an_error(
    trusting: Client, bench: Bench
) -> None:
    results = work.options(isolation="warm").map([1])
    gone = pickle.dumps(gl.JobFailed("x")).replace(b"JobFailed", b"JobForgot")
    bench.serve_array(results.ids[0], lambda _: ItemOutcome(True, "pickle", gone))

    (error,) = trusting.map_result(*results.ids, return_exceptions=True).results()
    assert isinstance(error, AttributeError)
    assert error.__notes__ == [f"the result of job {results.ids[0]} cannot be loaded here"]


REFUSED: list[Callable[[], object]] = [
    lambda: work.delay(cast(int, threading.Lock())),
    lambda: work.map([1, threading.Lock()]),
    lambda: work.starmap([(threading.Lock(),)]),
    lambda: work.options(gpus=-1),
    lambda: work.options(idempotency_key="k").map([1]),
    lambda: work.map([1], max_in_flight=0),
    lambda: work.delay(1).then(lists, threading.Lock()),
    lambda: work.map([1]).then(lists, threading.Lock()),
    lambda: gl.Client().cancel("j_nothing"),
    lambda: gl.remote(memory="much"),
    lambda: gl.remote(len, memory="much"),
]


@pytest.mark.parametrize("call", REFUSED)
def test_a_refusal_comes_from_the_line_that_is_refused_with_one_line_of_ours(
    call: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(gl.UsageError) as refused:
        call()
    assert own_lines(refused.value) == ["at_the_edge"]
    assert "During handling" not in "".join(traceback.format_exception(refused.value))
    monkeypatch.setenv("GPULAYER_DEBUG", "1")
    with pytest.raises(gl.UsageError) as refused:
        call()
    assert len(own_lines(refused.value)) > 1


def test_a_refusal_in_the_handling_of_another_error_still_shows_that_one() -> None:
    def in_the_middle() -> None:
        try:
            raise KeyError("first")
        except KeyError:
            work.options(gpus=-1)

    with pytest.raises(gl.BadRequirement) as refused:
        in_the_middle()
    assert "KeyError: 'first'" in "".join(traceback.format_exception(refused.value))


def test_an_error_that_the_caller_s_own_input_raises_keeps_its_lines(bench: Bench) -> None:
    class Given(list[int]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise gl.GpulayerError("no more")

    with pytest.raises(gl.GpulayerError, match="no more") as told:
        work.map(Given([1, 2]))
    frames = traceback.extract_tb(told.value.__traceback__)
    assert (frames[-1].filename, frames[-1].name) == (__file__, "__iter__")
