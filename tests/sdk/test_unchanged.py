"""A function's pickle is kept while no part of it can have changed, and made anew otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import gpulayer as gl
from gpulayer import unchanged
from gpulayer.payload import pack_function

PROJECT = """
import wsgiref
LIMIT, NAMES, STATE = 3, ("a", "b"), [1]

def helper(n):
    return n + LIMIT

def plain(n: int, step=1) -> int:
    "Says what it does."
    return min(n, LIMIT) * step * len(NAMES) + (wsgiref.util.guess_scheme(n) if n > 9 else 0)

def other(n: int, step=1) -> int:
    return n - LIMIT

def uses_a_list(n):
    return STATE[0] * n

def uses_a_helper(n):
    return helper(n)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module of the user's own project."""
    (tmp_path / "own_project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield import_module("own_project")
    del sys.modules["own_project"]


def test_the_pickle_of_a_function_of_plain_values_is_kept(project: Any) -> None:
    expected = pack_function(project.plain)
    remote = gl.remote(project.plain)

    assert remote._packed() is remote._packed()
    assert remote._packed() == expected
    assert remote.options(priority="high")._packed() is remote._packed()


def changes_its_code(project: Any) -> None:
    project.plain.__code__ = project.other.__code__


def changes_a_default(project: Any) -> None:
    project.plain.__defaults__ = (2,)


def changes_its_text(project: Any) -> None:
    project.plain.__doc__ = "Says something else."


def changes_an_annotation(project: Any) -> None:
    project.plain.__annotations__["n"] = float


def gives_it_an_attribute(project: Any) -> None:
    project.plain.kind = "new"


def changes_a_global(project: Any) -> None:
    project.LIMIT = 4


def hides_a_builtin(project: Any) -> None:
    project.min = 5


def changes_a_module(project: Any) -> None:
    project.wsgiref = os


def makes_a_global_a_list(project: Any) -> None:
    project.NAMES = ["a"]


def leaves_the_folder(_: Any) -> None:
    os.chdir("/")


def imports_a_module_below_one_that_it_uses(_: Any) -> None:
    import_module("wsgiref.util")


CHANGES = (
    changes_its_code,
    changes_a_default,
    changes_its_text,
    changes_an_annotation,
    gives_it_an_attribute,
    changes_a_global,
    hides_a_builtin,
    changes_a_module,
    makes_a_global_a_list,
    leaves_the_folder,
    imports_a_module_below_one_that_it_uses,
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_of_any_part_is_seen(project: Any, change: Callable[[Any], None]) -> None:
    sys.modules.pop("wsgiref.util", None)
    remote = gl.remote(project.plain)
    before = remote._packed()
    change(project)

    assert remote._packed() == pack_function(project.plain)
    assert remote._packed() != before


def test_a_list_that_changes_inside_is_seen(project: Any) -> None:
    remote = gl.remote(project.uses_a_list)
    before = remote._packed()
    project.STATE[0] = 2

    assert remote._packed() == pack_function(project.uses_a_list) != before


def test_a_change_behind_another_function_is_seen(project: Any) -> None:
    remote = gl.remote(project.uses_a_helper)
    before = remote._packed()
    project.LIMIT = 4

    assert remote._packed() == pack_function(project.uses_a_helper) != before


def test_a_variable_of_an_outer_function_is_seen() -> None:
    step = 1

    def adds(n: int) -> int:
        return n + step

    remote = gl.remote(adds)
    before = remote._packed()
    step = 2

    assert remote._packed() == pack_function(adds) != before


def test_an_installed_module_that_the_user_sends_by_value_is_seen_to_change(project: Any) -> None:
    import wsgiref

    import cloudpickle

    remote = gl.remote(project.plain)
    cloudpickle.register_pickle_by_value(wsgiref)
    try:
        assert remote._packed() is not remote._packed()
    finally:
        cloudpickle.unregister_pickle_by_value(wsgiref)
    assert remote._packed() is remote._packed()


def test_a_large_pickle_is_not_kept(project: Any) -> None:
    project.LIMIT = "x" * unchanged.MOST_BYTES
    remote = gl.remote(project.plain)

    assert remote._packed() is not remote._packed()


def test_an_instance_goes_along_as_it_is_now() -> None:
    class Adder:
        step = 1

        @gl.remote
        def add(self, n: int) -> int:
            return n + self.step

    adder = Adder()
    Adder.add._packed()
    before = adder.add._packed()
    adder.step = 2

    assert adder.add._packed() != before
