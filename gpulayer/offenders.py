"""Finds what cannot be pickled: the global, variable, argument or element that a `NotPicklable` names.

Only called after pickling has failed, so it may be slow; it looks no deeper than a person would read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

DEPTH = 6
MOST_ITEMS = 200

Dumps = Callable[[Any], bytes]


def offender(value: Any, label: str, dumps: Dumps) -> tuple[str, Any, str]:
    """(where, the innermost value that cannot be pickled, why)."""
    found = _failure(value, dumps) or "it cannot be pickled"
    seen = {id(value)}
    for _ in range(DEPTH):
        for part, inner in _parts(value):
            if id(inner) in seen:
                continue
            seen.add(id(inner))
            why = _failure(inner, dumps)
            if why is not None:
                label, value, found = f"{label}{part}", inner, why
                break
        else:
            break
    return label, value, found


def _failure(value: Any, dumps: Dumps) -> str | None:
    try:
        dumps(value)
    except RecursionError:
        return "it is nested too deep"
    except Exception as error:  # noqa: BLE001 - a value's own __reduce__ may raise anything
        return " ".join(str(error).split()) or type(error).__name__
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The values inside a value, each with the words that lead to it."""
    if isinstance(value, FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:MOST_ITEMS]:
            yield f"[{key!r:.60}]", item
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, item in enumerate(list(value)[:MOST_ITEMS]):
            yield f"[{index}]", item
    elif not isinstance(getattr(value, "__self__", None), ModuleType | None):
        yield ", its self", value.__self__
    else:
        for name, item in list(getattr(value, "__dict__", {}).items())[:MOST_ITEMS]:
            yield f".{name}", item


def _function_parts(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f", its variable '{name}'", cell.cell_contents
        except ValueError:
            continue
    for name in sorted(names_in(function.__code__)):
        if name in function.__globals__:
            yield f", its global '{name}'", function.__globals__[name]
    for index, default in enumerate(function.__defaults__ or ()):
        yield f", its default number {index + 1}", default
    for name, default in (function.__kwdefaults__ or {}).items():
        yield f", its default of '{name}'", default


def names_in(code: CodeType) -> set[str]:
    """The global names that a function's code, or a function made inside it, may use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= names_in(constant)
    return names
