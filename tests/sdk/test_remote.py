"""`gl.remote`: here when called, elsewhere when delayed or mapped."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator

import pytest

import gpulayer as gl
from gpulayer_broker import spec as specs
from gpulayer_broker.answers import Grant
from gpulayer_broker.errors import BadRequirement, IdempotencyConflict, UnknownName, UsageError
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("remotely")


@gl.remote
def double(n: int) -> int:
    return 2 * n


@gl.remote
def add(n: int, m: int) -> int:
    return n + m


def argument(grant: Grant) -> int:
    """The first argument that a granted call carries."""
    call = specs.decode(grant.spec).call
    assert call is not None
    assert call.arguments.data is not None
    args, _ = pickle.loads(call.arguments.data)
    return int(args[0])


def test_a_remote_function_runs_here_when_it_is_called() -> None:
    assert double(21) == 42
    assert repr(double) == "<gpulayer.remote double>"


def test_delay_gives_what_a_worker_returned(bench: Bench) -> None:
    job = double.delay(21)
    bench.give(job.id, 42)

    assert job.result(PATIENCE_S) == 42
    assert job.state == "succeeded"


def test_a_job_carries_the_function_its_name_and_its_python(bench: Bench) -> None:
    job = double.delay(21)

    spec = specs.decode(bench.take(job.id).spec)
    assert spec.kind == "function"
    assert spec.name == "double"
    assert spec.call is not None
    assert spec.call.python.startswith("3.")


def test_options_change_a_copy(bench: Bench) -> None:
    named = double.options(name="twice", priority="high", retries=2)

    record = named.delay(1).record
    assert (record.name, record.priority) == ("twice", 1)
    assert double.delay(1).record.name == "double"
    assert b'"max_retries":2' in record.spec


@pytest.mark.parametrize("name", ["max_parallel", "gpu"])
def test_an_option_that_is_not_honoured_is_a_type_error(name: str) -> None:
    with pytest.raises(TypeError, match=f"has no option '{name}'"):
        gl.remote(**{name: "x"})  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"accelerator": "cudda"}, BadRequirement, "accelerator='cudda': not known: did you mean 'cuda'"),
        ({"gpus": -1}, BadRequirement, "gpus=-1: gpus must be 0 or more"),
        ({"memory": "lots"}, BadRequirement, "memory='lots'"),
        ({"priority": "hihg"}, BadRequirement, "priority='hihg': not known: did you mean 'high'"),
        ({"profile": "pytorch-cudda"}, UnknownName, "did you mean 'pytorch-cuda'"),
        ({"timeout": "soon"}, BadRequirement, "timeout='soon'"),
        ({"retries": -1}, BadRequirement, "retries=-1"),
        ({"env": {"A B": "x"}}, BadRequirement, "env='A B'"),
        ({"env": {"GPULAYER_JOB_ID": "x"}}, BadRequirement, "the worker's to set"),
        ({"frameworks": {"torch": "=>2"}}, BadRequirement, "=>2"),
    ],
)
def test_an_option_without_sense_is_refused_where_it_is_written(
    options: dict[str, object], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as told:
        gl.remote(**options)  # type: ignore[call-overload]
    assert "\n" not in str(told.value)


def test_an_async_function_is_refused_where_it_is_written() -> None:
    async def later() -> None: ...

    with pytest.raises(TypeError, match="async"):
        gl.remote(later)


def test_map_submits_everything_and_gives_results_in_order(bench: Bench) -> None:
    results = double.map(range(30))
    assert len(results) == 30

    bench.serve(30, lambda grant: 2 * argument(grant))
    assert results.results() == [2 * n for n in range(30)]
    assert list(results) == [2 * n for n in range(30)]


def test_starmap_spreads_each_item(bench: Bench) -> None:
    results = add.starmap([(1, 2), (3, 4)])
    bench.serve(2, argument)

    assert results.results() == [1, 3]


def test_as_completed_gives_jobs_as_they_end(bench: Bench) -> None:
    results = double.map(range(3))
    ended = results.as_completed()

    for job in reversed(results.jobs):
        bench.give(job.id, 0)
        assert next(ended).job == job
    assert next(ended, None) is None


def test_a_failed_item_raises_or_stands_in_its_place(bench: Bench) -> None:
    strict, tolerant = double.map([1]), double.map([1, 2], return_exceptions=True)
    bench.fail(strict.jobs[0].id, ValueError("no"))
    bench.fail(tolerant.jobs[0].id, ValueError("no"))
    bench.give(tolerant.jobs[1].id, 4)

    with pytest.raises(ValueError, match="no"):
        strict.results()
    first, second = tolerant.results()
    assert isinstance(first, ValueError)
    assert second == 4


def test_an_endless_input_is_submitted_as_far_as_it_is_read(bench: Bench) -> None:
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            taken += 1
            yield taken

    results = double.map(endless(), max_in_flight=4)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            for grant in bench.hand.claim(bench.machine):
                bench.give(grant.id, 2 * argument(grant))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        first = list(itertools.islice(results, 10))
    finally:
        stop.set()
        worker.join()
    assert first == [2 * n for n in range(1, 11)]
    assert taken <= 10 + 4
    with pytest.raises(TypeError, match="no length"):
        len(results)
    results.cancel()


def test_as_completed_of_an_endless_input_stays_within_its_window(bench: Bench) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for n in range(20):
            taken.append(n)
            yield n

    ended = double.map(items(), max_in_flight=2).as_completed()
    answers = []
    worker = threading.Thread(target=lambda: answers.extend(bench.serve(20, argument)))
    worker.start()
    for read, item in enumerate(ended, start=1):
        assert len(taken) <= read + 2
        assert item.state == "succeeded"
    worker.join()
    assert len(answers) == 20


def test_cancelling_a_map_ends_what_has_not_ended(bench: Bench) -> None:
    results = double.map(range(5))
    bench.give(results.jobs[0].id, 0)

    assert results.cancel() == 4
    assert [job.wait(PATIENCE_S) for job in results.jobs] == ["succeeded"] + ["cancelled"] * 4


def test_one_idempotency_key_is_one_job(bench: Bench) -> None:
    once = double.options(idempotency_key="k1")
    first, again = once.delay(1), once.delay(1)

    assert again == first
    bench.give(first.id, 2)
    assert again.result(PATIENCE_S) == 2
    with pytest.raises(IdempotencyConflict, match="k1"):
        once.delay(2)
    with pytest.raises(UsageError, match="names one job"):
        once.map([1])


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(BadRequirement, match="max_in_flight=0"):
        double.map(iter([1]), max_in_flight=0)


def test_a_remote_function_travels_inside_another() -> None:
    import cloudpickle

    back = pickle.loads(cloudpickle.dumps(double.options(name="x")))

    assert back(4) == 8
    assert back.delay(4).record.name == "x"
