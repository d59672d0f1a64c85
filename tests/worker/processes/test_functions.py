"""Functions: results come back whole, errors come back told, and the child looks like a fresh Python."""

from __future__ import annotations

import json
import math
import os
import pickle
import resource
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from gpulayer_worker.processes.fork_server import ForkServer
from tests.support import PATIENCE_S

from .bench import Bench, error, pickled, value, wait_gone


class Point:
    """A class that travels by value."""

    def __init__(self, x: int) -> None:
        self.x = x


class NeedsTwo(Exception):
    """Its pickle can be made but not read."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Clinging:
    def __reduce__(self) -> Any:
        raise RuntimeError("holds on to its machine")


def identity(thing: Any) -> Any:
    return thing


@pytest.mark.parametrize(
    "thing",
    [None, True, 0, -(2**53), 1.5, -0.0, "", "grüß\n\0", [], {}, [1, [2.5, {"a": None}]], {"k": [True]}],
    ids=repr,
)
def test_plain_values_travel_as_json(bench: Bench, thing: Any) -> None:
    ending = bench.run(identity, thing)

    assert ending.report is not None
    assert ending.report.header["kind"] == "json"
    assert value(ending) == thing
    assert repr(value(ending)) == repr(thing)


@pytest.mark.parametrize(
    "thing",
    [
        (1, 2),
        {1: 2},
        {1, 2},
        b"bytes",
        2**53 + 1,
        math.inf,
        "\ud800",
        [(1,)],
        1 + 2j,
        numpy.float32(1),
        numpy.array([1, None], dtype=object),
    ],
    ids=repr,
)
def test_what_json_would_change_travels_as_pickle(bench: Bench, thing: Any) -> None:
    ending = bench.run(identity, thing)

    assert ending.report is not None
    assert ending.report.header["kind"] == "pickle"
    assert repr(value(ending)) == repr(thing)


def test_not_a_number_comes_back(bench: Bench) -> None:
    assert math.isnan(value(bench.run(identity, math.nan)))


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(6, dtype="i2").reshape(2, 3),
        numpy.asfortranarray(numpy.ones((2, 3))),
        numpy.array(7),
        numpy.zeros((0, 3)),
        numpy.array(["a", "bc"]),
        numpy.array(["2020-01-01"], dtype="datetime64[D]"),
        numpy.arange(100_000),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_travel_without_pickle(bench: Bench, array: Any) -> None:
    ending = bench.run(identity, array)

    assert ending.report is not None
    assert ending.report.header["kind"] == "numpy"
    back = value(ending)
    assert back.dtype == array.dtype
    assert numpy.array_equal(back, array)


def test_a_large_result_goes_to_a_file(bench: Bench) -> None:
    ending = bench.run(lambda: "x" * 1_000_000)

    assert ending.report is not None
    file = Path(ending.report.header["file"])
    assert file.parent == bench.folder
    assert file.stat().st_size == ending.report.header["size"]
    assert value(ending) == "x" * 1_000_000


def test_an_instance_of_a_class_sent_by_value_comes_back_as_that_class(bench: Bench) -> None:
    assert value(bench.run(lambda: Point(3))).x == 3


def test_a_result_that_cannot_be_pickled_fails_the_job_and_nothing_else(bench: Bench) -> None:
    told = error(bench.run(lambda: Clinging()))

    assert told["type"] == "ResultNotPicklable"
    assert "Clinging" in told["message"]
    assert "holds on to its machine" in told["message"]
    assert value(bench.run(identity, 1)) == 1


def test_a_result_over_its_limit_fails_the_job(bench: Bench) -> None:
    call = bench.call(pickle.dumps(bytes), pickle.dumps(((100_000,), {})), result_limit_bytes=50_000)
    told = error(bench.start(call).wait(PATIENCE_S))

    assert told["type"] == "ResultTooLarge"
    assert "50000 bytes" in told["message"]


def test_a_result_that_holds_itself_comes_back(bench: Bench) -> None:
    def loop() -> list[Any]:
        ring: list[Any] = []
        ring.append(ring)
        return ring

    ring = value(bench.run(loop))
    assert ring[0] is ring


def test_a_result_nested_too_deeply_is_refused(bench: Bench) -> None:
    def nest() -> list[Any]:
        nested: list[Any] = []
        for _ in range(100_000):
            nested = [nested]
        return nested

    assert error(bench.run(nest))["type"] == "ResultNotPicklable"


# --- errors ---


def test_an_error_is_told_by_type_message_and_the_users_frames_alone(bench: Bench) -> None:
    def fail() -> None:
        raise ValueError("too much")

    ending = bench.run(fail)

    told = error(ending)
    assert (told["module"], told["type"], told["message"]) == ("builtins", "ValueError", "too much")
    assert "in fail" in told["traceback"]
    assert "runner" not in told["traceback"]
    assert ending.exit is not None
    assert ending.exit.code == 1


def test_an_error_comes_with_its_pickle(bench: Bench) -> None:
    def fail() -> None:
        raise KeyError("lost", 7)

    ending = bench.run(fail)

    assert ending.report is not None
    assert pickle.loads(ending.report.read_payload()).args == ("lost", 7)


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (lambda: NeedsTwo(1, 2), "NeedsTwo", "1 and 2"),
        (lambda: Silent(), "Silent", "<its message cannot be shown: RuntimeError>"),
        (lambda: MemoryError("full"), "MemoryError", "full"),
        (lambda: ValueError(threading.Lock()), "ValueError", "<unlocked"),
        (lambda: ValueError("x" * 1_000_000), "ValueError", "characters left out"),
        (lambda: KeyboardInterrupt(), "KeyboardInterrupt", ""),
        (lambda: GeneratorExit(), "GeneratorExit", ""),
        (lambda: ValueError("\ud800"), "ValueError", "\ud800"),
    ],
)
def test_every_error_is_told(bench: Bench, make: Any, name: str, message: str) -> None:
    def fail() -> None:
        raise make()

    told = error(bench.run(fail))

    assert told["type"].rpartition(".")[2] == name
    assert message in told["message"]
    assert len(told["message"]) < 10_000


def test_an_error_that_unpickles_into_something_else_is_told_without_pickle(bench: Bench) -> None:
    def fail() -> None:
        raise NeedsTwo(1, 2)

    told = error(bench.run(fail))

    assert "kind" not in told


def test_endless_recursion_is_an_error_like_others(bench: Bench) -> None:
    def deeper(n: int) -> int:
        return deeper(n + 1) + 1

    assert error(bench.run(deeper, 0))["type"] == "RecursionError"


def test_causes_are_part_of_the_traceback(bench: Bench) -> None:
    def fail() -> None:
        try:
            os.environ["NO_SUCH_NAME"]
        except KeyError as cause:
            raise RuntimeError("no luck") from cause

    text = error(bench.run(fail))["traceback"]
    assert "KeyError: 'NO_SUCH_NAME'" in text
    assert "direct cause" in text


def test_leaving_by_sys_exit_without_an_error_is_a_success(bench: Bench) -> None:
    assert value(bench.run(lambda: sys.exit())) is None
    assert value(bench.run(lambda: sys.exit(0))) is None


def test_leaving_by_sys_exit_with_a_code_is_a_failure_with_that_code(bench: Bench) -> None:
    ending = bench.run(lambda: sys.exit(3))

    assert (error(ending)["type"], error(ending)["exit_code"]) == ("SystemExit", 3)
    assert ending.exit is not None
    assert ending.exit.code == 3


def test_leaving_by_os_exit_is_no_report(bench: Bench) -> None:
    ending = bench.run(lambda: os._exit(5))

    assert ending.report is None
    assert ending.exit is not None
    assert ending.exit.code == 5


def test_a_killed_function_is_no_report(bench: Bench) -> None:
    ending = bench.run(lambda: os.kill(os.getpid(), signal.SIGKILL))

    assert ending.report is None
    assert ending.exit is not None
    assert ending.exit.signal == signal.SIGKILL


def test_a_crash_in_native_code_leaves_its_python_stack(bench: Bench) -> None:
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    handle = bench.function(crash)
    ending = handle.wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.signal == signal.SIGSEGV
    assert "in crash" in bench.err(handle)


# --- loading ---


def test_a_missing_module_is_told_before_anything_runs(bench: Bench) -> None:
    call = bench.call(b"cno_such_module\nwork\n.", pickle.dumps(((), {})), python=(3, 99, 1))
    told = error(bench.start(call).wait(PATIENCE_S))

    assert told["type"] == "CannotLoad"
    assert told["missing_module"] == "no_such_module"
    assert "Python 3.99.1" in told["message"]
    assert "cannot be loaded by Python {}.{}.{}".format(*sys.version_info[:3]) in told["message"]


def test_code_from_another_python_is_refused(bench: Bench) -> None:
    def write() -> None:
        Path("ran").touch()

    from .bench import pickled

    call = bench.call(pickled(write), pickle.dumps(((), {})), python=(3, 99, 1))
    told = error(bench.start(call).wait(PATIENCE_S))

    assert told["type"] == "CannotLoad"
    assert told["message"].startswith("the function, made by Python 3.99.1, cannot be loaded by Python ")
    assert "python=3.99" in told["message"]
    assert not (bench.folder / "ran").exists()


def test_a_function_by_reference_from_another_python_runs(bench: Bench) -> None:
    call = bench.call(pickle.dumps(math.sqrt), pickle.dumps(((9.0,), {})), python=(3, 99, 1))

    assert value(bench.start(call).wait(PATIENCE_S)) == 3.0


def test_bytes_that_are_no_pickle_are_told(bench: Bench) -> None:
    told = error(bench.function(b"nonsense").wait(PATIENCE_S))

    assert told["type"] == "CannotLoad"
    assert told["message"].startswith("the function cannot be loaded by Python ")


def test_a_module_of_the_jobs_folder_is_found(bench: Bench) -> None:
    (bench.folder / "server.py").write_text("def work():\n    return __file__\n")

    ending = bench.function(b"cserver\nwork\n.").wait(PATIENCE_S)

    assert value(ending) == str(bench.folder / "server.py")


# --- what the function sees ---


def test_a_function_sees_its_own_environment_folder_and_arguments(bench: Bench) -> None:
    def look() -> list[Any]:
        return [dict(os.environ), os.getcwd(), sys.argv, sys.stdin.read(), os.getsid(0) == os.getpid()]

    handle = bench.function(look, env={"ONLY": "this"})
    environment, folder, argv, read, leads = value(handle.wait(PATIENCE_S))

    assert environment == {"ONLY": "this", "GPULAYER_PROCESS": handle.id}
    assert (folder, argv, read, leads) == (str(bench.folder), ["function"], "", True)


def test_a_function_holds_nothing_open_but_streams_and_report(bench: Bench) -> None:
    def look() -> list[str]:
        folder = "/proc/self/fd"
        found = []
        for name in os.listdir(folder):
            try:
                found.append(os.readlink(f"{folder}/{name}"))
            except FileNotFoundError:
                continue  # the listing's own
        return found

    handle = bench.function(look)
    links = sorted(value(handle.wait(PATIENCE_S)))

    pipes = [link for link in links if link.startswith("pipe:")]
    files = [link for link in links if not link.startswith("pipe:")]
    assert len(pipes) == 1
    assert files == sorted(
        ["/dev/null", *(str(bench.folder / f"{handle.id}.{end}") for end in ("out", "err"))]
    )


def test_a_function_begins_with_pythons_own_signal_handling(bench: Bench) -> None:
    def look() -> list[bool]:
        return [
            signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,
            signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(),
        ]

    assert value(bench.run(look)) == [True] * 4


def test_prints_arrive_in_order_and_whole(bench: Bench) -> None:
    def talk() -> None:
        for number in range(1000):
            print(number)
        sys.stderr.write("done")

    handle = bench.function(talk)
    handle.wait(PATIENCE_S)

    assert bench.out(handle).split() == [str(number) for number in range(1000)]
    assert bench.err(handle) == "done"


def test_threads_are_joined_and_exit_handlers_run(bench: Bench) -> None:
    def start() -> str:
        import atexit
        import threading

        atexit.register(print, "handler")
        threading.Timer(0.2, print, ["thread"]).start()
        return "returned"

    handle = bench.function(start)

    assert value(handle.wait(PATIENCE_S)) == "returned"
    assert bench.out(handle) == "thread\nhandler\n"


def test_a_log_handler_keeps_nothing_back_at_the_end(bench: Bench) -> None:
    def say(path: str) -> None:
        import logging
        import logging.handlers

        logger = logging.getLogger("job")
        logger.addHandler(logging.handlers.MemoryHandler(100, target=logging.FileHandler(path)))
        logger.warning("the last words")

    path = bench.folder / "words"
    bench.run(say, str(path))

    assert path.read_text() == "the last words\n"


def test_tasks_of_a_thread_pool_that_nobody_closed_are_finished(bench: Bench) -> None:
    def start(path: str) -> None:
        from concurrent.futures import ThreadPoolExecutor
        from pathlib import Path

        pool = ThreadPoolExecutor(1)
        for task in (lambda: math.factorial(20_000), Path(path).touch):
            pool.submit(task)

    bench.run(start, str(bench.folder / "touched"))

    assert (bench.folder / "touched").exists()


def test_multiprocessing_works_inside_a_function(bench: Bench) -> None:
    def spread(method: str) -> list[int]:
        import math
        import multiprocessing

        with multiprocessing.get_context(method).Pool(2) as pool:
            return pool.map(math.factorial, range(5))

    for method in ("fork", "spawn"):
        assert value(bench.run(spread, method)) == [1, 1, 2, 6, 24]


def threads_after_a_fork() -> tuple[int, int]:
    """How many threads a job with two of them sees in itself, and in its own child."""
    held = threading.Event()
    threading.Thread(target=held.wait, daemon=True).start()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, bytes([threading.active_count()]))
        os._exit(0)
    os.waitpid(child, 0)
    seen = threading.active_count()
    held.set()
    return seen, os.read(reader, 1)[0]


def test_a_jobs_own_forks_mend_what_a_fork_breaks(bench: Bench) -> None:
    assert value(bench.run(threads_after_a_fork)) == (2, 1)


def told_at_own_forks() -> list[bytes]:
    """What an action that a job has registered before its first fork says at two forks."""
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.register_at_fork(before=lambda: os.write(writer, b"b"), after_in_child=lambda: os.write(writer, b"c"))
    said = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        said.append(os.read(reader, 10))
    return said


def test_what_a_job_asks_for_at_its_forks_is_done_at_each(bench: Bench) -> None:
    assert value(bench.run(told_at_own_forks)) == [b"bc", b"bc"]


def test_a_jobs_forks_open_no_lock_that_they_have_not_closed(bench: Bench) -> None:
    handle = bench.function(told_at_own_forks)

    assert value(handle.wait(PATIENCE_S))
    assert bench.err(handle) == ""


def main_thread_in_the_system() -> bool:
    return threading.main_thread().native_id == threading.get_native_id()


def test_a_functions_main_thread_knows_its_number_in_the_system(bench: Bench) -> None:
    assert value(bench.run(main_thread_in_the_system))


def test_a_call_whose_parts_are_files_is_made_too(bench: Bench) -> None:
    call = bench.call(pickled(identity), pickle.dumps((("x" * 1000,), {})))
    function, arguments = bench.folder / "function", bench.folder / "arguments"
    for path, data in zip((function, arguments), call.blobs, strict=True):
        path.write_bytes(data)

    ending = bench.start(replace(call, function=function, arguments=arguments)).wait(PATIENCE_S)

    assert value(ending) == "x" * 1000


def test_parts_larger_than_the_link_takes_at_once_arrive_whole(bench: Bench) -> None:
    text = "0123456789" * 100_000

    endings = [bench.function(identity, text) for _ in range(3)]

    assert [value(ending.wait(PATIENCE_S)) for ending in endings] == [text] * 3


def test_two_functions_draw_different_numbers(bench: Bench) -> None:
    def draw() -> list[float]:
        import random

        import numpy

        return [random.random(), float(numpy.random.rand())]

    first, second = value(bench.run(draw)), value(bench.run(draw))

    assert first[0] != second[0]
    assert first[1] != second[1]


def test_progress_arrives(bench: Bench) -> None:
    seen: list[dict[str, Any]] = []

    def work() -> None:
        os.write(int(os.environ["GPULAYER_PROGRESS_FD"]), b'nonsense\n{"done": 3, "total": 4}\n')

    bench.function(work, on_progress=seen.append).wait(PATIENCE_S)

    assert seen == [{"done": 3.0, "total": 4.0}]


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process: Linux only")
def test_progress_arrives_where_few_files_may_be_open(bench: Bench, server: ForkServer) -> None:
    def work() -> None:
        with os.fdopen(int(os.environ["GPULAYER_PROGRESS_FD"]), "w") as file:
            file.write(json.dumps({"done": 1, "total": 4}) + "\n")

    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (100, 100))
    seen: list[dict[str, float]] = []
    ending = bench.function(work, on_progress=seen.append).wait(PATIENCE_S)

    assert value(ending) is None
    assert seen == [{"done": 1, "total": 4}]


def test_progress_that_nobody_reads_does_not_hold_up_the_job(bench: Bench) -> None:
    def work() -> str:
        descriptor = int(os.environ["GPULAYER_PROGRESS_FD"])
        for _ in range(100_000):
            try:
                os.write(descriptor, b'{"done": 1, "total": 4}\n')
            except BlockingIOError:
                return "full"
        return "never full"

    release = threading.Event()
    handle = bench.function(work, on_progress=lambda _: release.wait(PATIENCE_S) and None)
    try:
        wait_gone(handle.started.result(PATIENCE_S))
    finally:
        release.set()
    assert value(handle.wait(PATIENCE_S)) == "full"


def test_a_result_that_cannot_be_written_fails_the_job(bench: Bench) -> None:
    call = bench.call(pickle.dumps(bytes), pickle.dumps(((100_000,), {})))
    Path(call.payload).mkdir()
    told = error(bench.start(call).wait(PATIENCE_S))
    assert told["type"] == "ResultNotWritten"
    assert "Is a directory" in told["message"]


def test_a_callback_that_fails_does_not_stop_the_watch_over_other_jobs(bench: Bench) -> None:
    def work() -> None:
        os.write(int(os.environ["GPULAYER_PROGRESS_FD"]), b'{"done": 3, "total": 4}\n')

    def fail(_: dict[str, float]) -> None:
        raise RuntimeError("callback")

    bench.function(work, on_progress=fail).wait(PATIENCE_S)

    assert value(bench.run(identity, 1)) == 1


@pytest.mark.parametrize(("name", "text"), [("X", "\ud800"), ("A=B", "c"), ("N", "a\0b")])
def test_an_environment_that_no_system_takes_fails_its_job_alone(bench: Bench, name: str, text: str) -> None:
    bench.env[name] = text

    refused = bench.run(identity, 1)

    assert "cannot start" in error(refused)["message"]
    del bench.env[name]
    assert value(bench.run(identity, 2)) == 2


def test_a_function_has_the_time_of_its_own_zone(bench: Bench) -> None:
    def offset() -> str:
        import time

        return time.strftime("%z", time.localtime(0))

    bench.env["TZ"] = "<+03>-3"

    assert value(bench.run(offset)) == "+0300"


def test_a_function_does_not_see_the_locale_that_its_fork_server_chose(bench: Bench) -> None:
    def names() -> list[str]:
        import os

        return sorted(os.environ)

    assert not [name for name in value(bench.run(names)) if name.startswith("LC_")]


def test_a_variable_of_any_bytes_arrives_as_it_was(bench: Bench) -> None:
    def raw() -> str:
        import os

        return os.environb[b"X"].hex()

    bench.env["X"] = os.fsdecode(b"\xff\xfe grin")

    assert value(bench.run(raw)) == b"\xff\xfe grin".hex()


def test_the_one_handler_of_a_function_that_sets_up_logging_anew_is_closed(
    bench: Bench, tmp_path: Path
) -> None:
    def work(path: str) -> None:
        import logging
        import logging.config

        class Tells(logging.Handler):
            def close(self) -> None:
                Path(path).write_text("closed")
                super().close()

        logging.config.dictConfig({"version": 1})
        logging.getLogger().addHandler(Tells())

    ending = bench.run(work, str(tmp_path / "told"))

    assert value(ending) is None
    assert (tmp_path / "told").read_text() == "closed"
