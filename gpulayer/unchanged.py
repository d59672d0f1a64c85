"""Whether a function would be pickled as it was the last time, so that its pickle can be kept.

That can be told only of a function of the project that uses plain values and installed modules: all parts of it are
compared, one by one. Of any other, which may hold what changes inside (a list, an object, a class, another function),
nothing is told.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from operator import is_
from types import CodeType, FunctionType, ModuleType
from typing import Any

from gpulayer.by_value import circumstances, is_local, is_registered
from gpulayer.offenders import names_in
from gpulayer.payload import ATOMS, PackedFunction
from gpulayer_broker.units import KIB

# A larger pickle is not kept in memory.
MOST_BYTES = 64 * KIB
# What cloudpickle takes along of the function's module, besides the globals that are used.
OF_THE_MODULE = ("__package__", "__name__", "__path__", "__file__")
_MISSING = object()


class Kept:
    """A function as it was before it was packed, and what it was packed to."""

    def __init__(self, function: FunctionType, pack: Callable[[], PackedFunction]) -> None:
        self._circumstances = circumstances()
        self._names = (*OF_THE_MODULE, *names_in(function.__code__))
        self._parts = _parts(function, self._names)
        told = is_local(function.__module__) and all(map(_is_constant, self._parts))
        self.packed = pack()
        self._told = told and len(self.packed.data) <= MOST_BYTES

    def holds(self, function: FunctionType) -> bool:
        """Whether it would surely be packed to the same."""
        if not self._told or self._circumstances != circumstances():
            return False
        now = _parts(function, self._names)
        return len(now) == len(self._parts) and all(map(is_, now, self._parts))


def _parts(function: FunctionType, names: tuple[str, ...]) -> list[object]:
    """Everything that goes into the pickle; the code comes first, which decides the names."""
    told, known = function.__annotations__, function.__globals__
    return [
        function.__code__,
        function.__name__,
        function.__qualname__,
        function.__module__,
        function.__doc__,
        function.__defaults__,
        # What these three hold can change inside: of them only none is constant.
        function.__kwdefaults__,
        function.__closure__,
        function.__dict__ or None,
        *[known.get(name, _MISSING) for name in names],
        *told,
        *told.values(),
    ]


def _is_constant(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return ATOMS.issuperset(map(type, value))
    if kind is type:
        return getattr(builtins, value.__name__, None) is value
    if kind is ModuleType:
        name = value.__name__
        return sys.modules.get(name) is value and not (is_local(name) or is_registered(name))
    return kind in ATOMS or kind is CodeType or value is _MISSING
