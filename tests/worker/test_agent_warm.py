"""Warm calls through real workers: the outcome of a fresh call, a process that stays, arrays in ranges."""

from __future__ import annotations

import os
import platform
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cloudpickle
import orjson

from gpulayer_broker import functions
from gpulayer_broker.items import ItemOutcome, pack_items, read_outcomes
from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.spec import FunctionCall, Payload, Spec
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, WorkerProcess, by_value

from .conftest import Hire
from .processes.bench import is_gone


def warm(desk: Desk, function: Callable[..., Any], *arguments: Any, **fields: Any) -> str:
    return desk.function(function, *arguments, isolation="warm", **fields)


def array(desk: Desk, function: Callable[..., Any], items: list[tuple[Any, ...]], **fields: Any) -> str:
    packed = pack_items([cloudpickle.dumps((item, {})) for item in items])
    call = FunctionCall(
        Payload(by_value(function)), Payload(packed), qualname="f", python=platform.python_version()
    )
    needs = desk.needs.canonical()
    spec = Spec("function", call=call, requirements=needs, isolation="warm", **fields)
    return desk.submit(spec, count=len(items))


def outcomes(desk: Desk, job_id: str) -> dict[int, ItemOutcome]:
    found: dict[int, ItemOutcome] = {}
    for start, page in desk.queue.pages(job_id).items():
        found.update(read_outcomes(start, page))
    return found


def test_warm_calls_share_a_process_and_end_as_fresh_ones_do(desk: Desk, hire: Hire) -> None:
    hire(slots=1)
    pids = []
    for number in range(3):
        job = warm(desk, lambda n: [os.getpid(), n, os.environ["GPULAYER_JOB_ID"]], number)
        assert desk.final(job).state == "succeeded"
        pids.append(desk.value(job)[0])
        assert desk.value(job)[1:] == [number, job]

    assert len(set(pids)) == 1


def test_a_warm_calls_output_is_its_own(desk: Desk, worker: WorkerProcess) -> None:
    jobs = [warm(desk, print, f"words of {number}") for number in range(5)]

    for number, job in enumerate(jobs):
        desk.final(job)
        assert desk.whole_log(job) == f"words of {number}\n".encode()


def test_a_warm_calls_error_is_told_as_a_fresh_ones(desk: Desk, worker: WorkerProcess) -> None:
    def fail() -> None:
        raise KeyError("no such thing")

    job = warm(desk, fail)

    assert desk.final(job).end_reason == "user_error"
    assert desk.error(job)["type"] == "KeyError"


def test_a_crash_of_a_warm_call_fails_it_alone(desk: Desk, worker: WorkerProcess) -> None:
    job = warm(desk, lambda: os.kill(os.getpid(), signal.SIGSEGV))

    assert desk.final(job).end_reason == "signal"
    assert desk.final(warm(desk, int)).state == "succeeded"


def test_a_warm_call_over_its_memory_is_told(desk: Desk, worker: WorkerProcess) -> None:
    needs = build_requirements(memory="64MiB")
    spec = desk.function_spec(lambda: len(bytearray(300 << 20)), isolation="warm")
    job = desk.submit(replace(spec, requirements=needs.canonical()), needs=needs)

    assert desk.final(job).end_reason == "oom"


def test_a_warm_call_is_cancelled_and_its_process_with_it(desk: Desk, worker: WorkerProcess) -> None:
    def hang() -> None:
        print(os.getpid(), flush=True)
        time.sleep(1000)

    job = warm(desk, hang)
    wait_until(lambda: desk.tail(job).endswith(b"\n"), PATIENCE_S, "it has begun")
    pid = int(desk.tail(job))
    desk.queue.run(functions.cancel(job))

    assert desk.final(job).state == "cancelled"
    assert is_gone(pid)


def test_a_warm_call_past_its_timeout_is_ended(desk: Desk, worker: WorkerProcess) -> None:
    job = warm(desk, time.sleep, 1000, timeout_s=0.3)

    assert desk.final(job).state == "timed_out"


def test_a_warm_calls_use_is_told(desk: Desk, worker: WorkerProcess) -> None:
    job = warm(desk, time.sleep, 0.2)

    desk.final(job)
    used = orjson.loads(desk.record(job).usage)
    assert 0.2 <= used["wall_s"] < PATIENCE_S
    assert used["max_rss_bytes"] > 1 << 20


def test_calls_of_two_owners_never_share_a_process(desk: Desk, hire: Hire) -> None:
    hire(slots=1)
    jobs = [
        desk.submit(desk.function_spec(os.getpid, isolation="warm"), owner=owner) for owner in ("ann", "bob")
    ]

    pids = [desk.value(desk.final(job).id) for job in jobs]

    assert pids[0] != pids[1]


# --- arrays ---


def test_an_arrays_items_all_have_their_results(desk: Desk, worker: WorkerProcess) -> None:
    job = array(desk, lambda n: n * n, [(number,) for number in range(500)])

    assert desk.final(job).state == "succeeded"
    found = outcomes(desk, job)
    assert [orjson.loads(found[number].data) for number in range(500)] == [n * n for n in range(500)]


def test_one_items_failure_is_its_own(desk: Desk, worker: WorkerProcess) -> None:
    job = array(desk, lambda n: 1 // n, [(1,), (0,), (1,)])

    assert desk.final(job).state == "failed"
    found = outcomes(desk, job)
    assert [found[number].ok for number in range(3)] == [True, False, True]
    assert orjson.loads(found[1].data)["type"] == "ZeroDivisionError"


def test_an_item_that_kills_its_process_fails_alone(desk: Desk, worker: WorkerProcess) -> None:
    def crash(number: int) -> int:
        if number == 150:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    job = array(desk, crash, [(number,) for number in range(200)])

    assert desk.final(job).state == "failed"
    found = outcomes(desk, job)
    assert [number for number in range(200) if not found[number].ok] == [150]
    assert orjson.loads(found[150].data)["type"] == "Signalled"


def test_a_cancelled_array_stops_in_the_middle_and_keeps_what_is_done(
    desk: Desk, worker: WorkerProcess
) -> None:
    job = array(desk, time.sleep, [(0.05,)] * 1000)
    wait_until(lambda: outcomes(desk, job), PATIENCE_S, "an item has ended")

    desk.queue.run(functions.cancel(job))

    assert desk.final(job).state == "cancelled"
    found = outcomes(desk, job)
    assert 0 < len(found) < 1000
    assert all(outcome.ok for outcome in found.values())
