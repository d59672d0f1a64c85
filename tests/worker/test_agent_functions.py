"""Functions through a real worker: results of each kind, errors of each kind, and processes that vanish."""

from __future__ import annotations

import base64
import datetime
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gpulayer_broker.spec import FunctionCall, Payload, Spec
from tests.workers import Desk

pytestmark = pytest.mark.usefixtures("worker")


class TooHot(Exception):
    """An error of the user's own."""


def result_of(desk: Desk, function: Any, *arguments: Any) -> tuple[str, Any]:
    job = desk.function(function, *arguments)
    assert desk.final(job).state == "succeeded", desk.error(job)
    return desk.queue.result(job)[0], desk.value(job)


def failure_of(desk: Desk, function: Any, *arguments: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    job = desk.function(function, *arguments, **fields)
    record = desk.final(job)
    assert record.state == "failed"
    return record.end_reason, desk.error(job)


def test_plain_values_travel_as_json(desk: Desk) -> None:
    assert result_of(desk, lambda x: {"twice": [x * 2, None, True]}, 21) == (
        "json",
        {"twice": [42, None, True]},
    )


def test_other_values_travel_as_pickle(desk: Desk) -> None:
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert result_of(desk, lambda x: (x, {1, 2}), moment) == ("pickle", (moment, {1, 2}))


def test_arrays_travel_without_pickle(desk: Desk) -> None:
    import numpy

    def make() -> Any:
        import numpy

        return numpy.arange(6).reshape(2, 3)

    kind, value = result_of(desk, make)
    assert kind == "numpy"
    assert numpy.array_equal(value, numpy.arange(6).reshape(2, 3))


def test_a_result_of_more_than_a_mebibyte_goes_to_the_store(desk: Desk) -> None:
    kind, value = result_of(desk, lambda n: "x" * n, 3_000_000)
    assert (kind, len(value)) == ("blob", 3_000_000)


def test_a_result_between_pipe_and_record_stays_in_the_record(desk: Desk) -> None:
    kind, value = result_of(desk, lambda n: "x" * n, 500_000)
    assert (kind, len(value)) == ("json", 500_000)


def test_arguments_may_come_from_the_store(desk: Desk) -> None:
    plain = desk.function_spec(len)
    assert plain.call is not None
    sha = desk.store.put_bytes(pickle.dumps(((b"x" * 2_000_000,), {})))
    call = FunctionCall(plain.call.function, Payload(None, sha, 2_000_000), python=plain.call.python)
    job = desk.submit(Spec("function", call=call, requirements=desk.needs.canonical()))
    desk.final(job)
    assert desk.value(job) == 2_000_000


def test_an_exception_arrives_as_text_and_as_itself(desk: Desk) -> None:
    def fail() -> NoReturn:
        raise TooHot("451 degrees")

    reason, error = failure_of(desk, fail)
    assert (reason, error["type"], error["message"]) == ("user_error", "TooHot", "451 degrees")
    assert "in fail" in error["traceback"]
    assert "gpulayer_worker" not in error["traceback"]
    again = pickle.loads(base64.b85decode(error["pickle"]))
    assert (type(again).__name__, again.args) == ("TooHot", ("451 degrees",))


def test_a_traceback_names_the_file_and_the_lines_that_functions_came_from(desk: Desk) -> None:
    def inner() -> NoReturn:
        raise KeyError("first")

    def outer() -> NoReturn:
        try:
            inner()
        except KeyError as error:
            raise TooHot("second") from error

    _, error = failure_of(desk, outer)
    told = [line.strip() for line in error["traceback"].splitlines()]
    assert "<dynamic-code>" not in error["traceback"]
    for code, text in ((inner.__code__, 'raise KeyError("first")'), (outer.__code__, "inner()")):
        where = f'File "{__file__}", line '
        (at, *_) = [
            n
            for n, line in enumerate(told)
            if line.startswith(where) and line.endswith(f", in {code.co_name}")
        ]
        assert told[at + 1] == text


def test_a_line_is_not_shown_from_a_file_that_has_another_function_there(desk: Desk, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    scope: dict[str, Any] = {"__file__": str(script), "__name__": "__main__"}
    exec(compile("def fail():\n    return 1 / 0\n", str(script), "exec"), scope)
    script.write_text("something = 1\nelse_ = 2\n")

    _, error = failure_of(desk, scope["fail"])
    assert f'File "{script}", line 2, in fail' in error["traceback"]
    assert "else_" not in error["traceback"]


def test_an_exception_that_cannot_be_pickled_arrives_as_text(desk: Desk) -> None:
    def fail() -> NoReturn:
        error = ValueError("holds a lock")
        error.lock = __import__("threading").Lock()  # type: ignore[attr-defined]
        raise error

    reason, error = failure_of(desk, fail)
    assert (reason, error["message"], error.get("pickle")) == ("user_error", "holds a lock", None)


def test_a_result_that_cannot_be_pickled_names_its_type(desk: Desk) -> None:
    reason, error = failure_of(desk, lambda: __import__("threading").Lock())
    assert reason == "result_error"
    assert "a result of type lock cannot be pickled" in error["message"]


def test_sys_exit_ends_the_function_with_its_code(desk: Desk) -> None:
    reason, error = failure_of(desk, lambda: sys.exit(3))
    assert (reason, error["type"], error["message"]) == ("user_error", "SystemExit", "3")


def test_a_function_that_leaves_by_os_exit_has_not_reported(desk: Desk) -> None:
    reason, error = failure_of(desk, lambda: os._exit(0))
    assert (reason, error["type"]) == ("user_error", "NoReport")
    reason, error = failure_of(desk, lambda: os._exit(5))
    assert (reason, error["exit_code"]) == ("user_error", 5)
    assert error["message"] == "the function's process ended with exit code 5"


def test_a_killed_function_names_the_signal(desk: Desk) -> None:
    reason, error = failure_of(desk, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert (reason, error["signal"]) == ("signal", 9)
    assert error["message"] == "the function's process ended by signal 9"


def test_a_pickle_of_another_python_is_refused_naming_both(desk: Desk) -> None:
    spec = desk.function_spec(lambda: 1)
    assert spec.call is not None
    call = FunctionCall(spec.call.function, spec.call.arguments, python="3.8.1")
    job = desk.submit(Spec("function", call=call, requirements=desk.needs.canonical()))
    record = desk.final(job)
    assert (record.state, record.end_reason) == ("failed", "cannot_start")
    text = desk.error(job)["message"]
    assert "3.8.1" in text
    assert sys.version.split()[0] in text


def test_an_argument_that_is_in_no_store_fails_by_name_and_the_worker_lives(desk: Desk) -> None:
    spec = desk.function_spec(len)
    assert spec.call is not None
    call = FunctionCall(spec.call.function, Payload(None, "0" * 64, 10), python=spec.call.python)
    job = desk.submit(Spec("function", call=call, requirements=desk.needs.canonical()))
    assert desk.final(job).end_reason == "cannot_start"
    assert result_of(desk, lambda: 1) == ("json", 1)


def test_what_a_function_prints_is_its_log(desk: Desk) -> None:
    job = desk.function(lambda: print("hello from the function"))
    desk.final(job)
    assert desk.whole_log(job) == b"hello from the function\n"
