"""How functions and arguments travel: by value what only this project has, named what cannot."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpulayer.client import Client
from gpulayer.payload import (
    PackedFunction,
    _cloudpickled,
    are_plain,
    pack_arguments,
    pack_function,
    preloads,
)
from gpulayer_broker import spec as specs
from gpulayer_broker.errors import NotPicklable, UsageError
from tests.support import PATIENCE_S, in_background, wait_until

LOCK = threading.Lock()


def locked() -> bool:
    return LOCK.locked()


def means(numbers: list[float]) -> float:
    return float(np.mean(numbers))


def mean_of_means(rows: list[list[float]]) -> float:
    return means([means(row) for row in rows])


def closes_over(value: Any) -> Callable[[], Any]:
    def inner() -> Any:
        return value

    return inner


def with_default(lock: Any = LOCK) -> Any:
    return lock


def imports_inside() -> str:
    import orjson

    return orjson.dumps(1).decode()


def test_an_unpicklable_global_is_named() -> None:
    with pytest.raises(NotPicklable, match=r"'locked', its global 'LOCK' \(lock\) cannot travel") as told:
        pack_function(locked)
    assert "\n" not in str(told.value)


def test_an_unpicklable_variable_of_a_closure_is_named() -> None:
    with pytest.raises(NotPicklable, match=r"its variable 'value'\['key'\]\[1\] \(lock\) cannot travel"):
        pack_function(closes_over({"key": [0, LOCK]}))


def test_an_unpicklable_default_is_named() -> None:
    with pytest.raises(NotPicklable, match="its default number 1"):
        pack_function(with_default)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((1, LOCK), {}, "argument number 2 of 'f'"),
        ((), {"lock": [LOCK]}, r"argument 'lock' of 'f'\[0\]"),
    ],
)
def test_an_unpicklable_argument_is_named(args: tuple[Any, ...], kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(NotPicklable, match=text):
        pack_arguments("f", args, kwargs)


def test_too_deep_a_value_is_refused_in_one_line() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    try:
        with pytest.raises(NotPicklable, match="too deep"):
            pack_arguments("f", (deep,), {})
    finally:
        while deep:
            deep = deep.pop()


class Number(int):
    """Of the test's own module, which no worker has."""


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        ([1, 2.5, "é", None], True),
        ({"a": 1, 2: b"b"}, True),
        ((True, 1j), True),
        ([], True),
        (list(range(2000)), False),
        ([[1]], False),
        ({"a": Number(1)}, False),
        ({Number(1): 1}, False),
        (Number(1), False),
        ([Number(1)], False),
        ({1}, False),
    ],
    ids=repr,
)
def test_plain_values_are_pickled_as_any_others(value: Any, plain: bool) -> None:
    assert are_plain((value, 1)) is plain
    assert pack_arguments("f", (value, 1), {"more": value}) == _cloudpickled(((value, 1), {"more": value}))


def test_a_function_of_an_installed_module_travels_by_its_name() -> None:
    packed = pack_function(np.linalg.norm)

    assert len(packed.data) < 200
    assert pickle.loads(packed.data) is np.linalg.norm


def test_installed_modules_that_a_function_uses_are_preloaded() -> None:
    assert preloads(means) == ("numpy",)
    assert preloads(mean_of_means) == ("numpy",)
    assert preloads(imports_inside) == ("orjson",)
    assert preloads(locked) == ()
    assert preloads(np.linalg.norm) == ("numpy",)


SCRIPT = """
import sys
import helpers
from package.inner import Thing
from gpulayer.payload import pack_function, pack_arguments

def task(thing):
    return helpers.twice(thing.value) + helpers.OFFSET

with open(sys.argv[1], "wb") as file:
    file.write(pack_function(task).data)
with open(sys.argv[2], "wb") as file:
    file.write(pack_arguments("task", (Thing(20),), {}))
import cloudpickle
assert not cloudpickle.list_registry_pickle_by_value()
"""
LOADER = """
import pickle, sys
function, (args, kwargs) = (pickle.load(open(path, "rb")) for path in sys.argv[1:3])
print(function(*args, **kwargs))
"""


def test_the_project_s_own_modules_travel_by_value(tmp_path: Path) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    (project / "package").mkdir(parents=True)
    elsewhere.mkdir()
    (project / "helpers.py").write_text("OFFSET = 2\ndef twice(n):\n    return 2 * n\n")
    (project / "package" / "__init__.py").write_text("")
    (project / "package" / "inner.py").write_text(
        "class Thing:\n    def __init__(self, value):\n        self.value = value\n"
    )
    (project / "script.py").write_text(SCRIPT)
    files = [str(tmp_path / "function"), str(tmp_path / "arguments")]

    subprocess.run([sys.executable, str(project / "script.py"), *files], cwd=elsewhere, check=True)
    loaded = subprocess.run(
        [sys.executable, "-c", LOADER, *files], cwd=elsewhere, check=True, capture_output=True, text=True
    )
    assert loaded.stdout == "42\n"


def spec_of(client: Client, job_id: str) -> specs.Spec:
    return specs.decode(client.get(job_id).record.spec)


def test_a_small_function_travels_in_the_record_and_a_large_one_once_as_a_blob(client: Client) -> None:
    small = pack_function(np.linalg.norm)
    large = pack_function(closes_over("x" * 5000))
    first, second, third = (
        client.submit_call(packed, ((1,), {}), _plan()) for packed in (small, large, large)
    )

    calls = [spec_of(client, job.id).call for job in (first, second, third)]
    assert [bool(call and call.function.data) for call in calls] == [True, False, False]
    assert calls[1] is not None
    assert calls[2] is not None
    assert calls[1].function.sha256 == calls[2].function.sha256
    assert client._session.store.read_bytes(calls[1].function.sha256, 1 << 20) == large.data


def test_large_arguments_travel_as_a_blob_and_larger_ones_are_refused(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = client._session.settings.changed(argument_inline_bytes=1024, argument_blob_bytes=10_000)
    monkeypatch.setattr(client._session, "settings", settings)
    job = client.submit(means, args=([0.5] * 500,))

    call = spec_of(client, job.id).call
    assert call is not None
    assert call.arguments.data is None
    assert call.arguments.size > 1024
    with pytest.raises(UsageError, match=r"arguments of 'means' are 29\.. kB .* over the limit of 9\.8 kB"):
        client.submit(means, args=(list(range(10_000)),))


def test_a_function_is_pickled_anew_for_each_submit() -> None:
    state = {"n": 1}
    function = closes_over(state)
    before = pack_function(function)
    state["n"] = 2

    assert pickle.loads(before.data)() == {"n": 1}
    assert pickle.loads(pack_function(function).data)() == {"n": 2}


def test_other_threads_find_cloudpickle_as_it_was() -> None:
    import cloudpickle

    before = cloudpickle.list_registry_pickle_by_value()
    stop = threading.Event()
    counts = {"packed": 0}

    def pack() -> None:
        while not stop.is_set():
            pack_function(means)
            counts["packed"] += 1

    with in_background(pack, pack, pack):
        try:
            wait_until(lambda: counts["packed"] > 50, PATIENCE_S, "functions are pickled by several threads")
        finally:
            stop.set()
    assert cloudpickle.list_registry_pickle_by_value() == before


class Slow:
    """Pickled until it is told to go on."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type[int], tuple[()]]:
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        return int, ()


def test_a_child_that_is_forked_while_another_thread_pickles_can_pickle_too() -> None:
    import cloudpickle

    slow, before = Slow(), cloudpickle.list_registry_pickle_by_value()
    with in_background(lambda: pack_arguments("slow", (slow,), {})):
        assert slow.begun.wait(PATIENCE_S)
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE_S))
            pack_function(means)
            os._exit(0 if cloudpickle.list_registry_pickle_by_value() == before else 1)
        slow.go_on.set()
        _, status = os.waitpid(child, 0)
    assert status == 0


def _plan() -> Any:
    from gpulayer.options import plan_of

    return plan_of({})


def test_a_packed_function_says_what_it_is() -> None:
    packed = pack_function(means)

    assert isinstance(packed, PackedFunction)
    assert (packed.label, packed.module) == ("means", __name__)
