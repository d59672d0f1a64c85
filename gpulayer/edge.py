"""The edge of the SDK: an error of ours comes from the line of the user's that called for it, and one line of ours.

What lies between the two says nothing about the user's code. A traceback with a line that is not ours (an iterator that
a map reads, a `__reduce__`) stays whole, and so does every other exception; GPULAYER_DEBUG=1 leaves all of them whole.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import ParamSpec, TypeVar

from gpulayer.by_value import OWN_PACKAGES
from gpulayer_broker.errors import GpulayerError

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def edge(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose errors of ours come from here."""

    @functools.wraps(function)
    def at_the_edge(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except GpulayerError as error:
            if os.environ.get("GPULAYER_DEBUG") or not _all_ours(error.__traceback__):
                raise
            raise error.with_traceback(None)  # noqa: B904 - what it has come from stays as it was told

    return at_the_edge


def edged(kind: C) -> C:
    """The class with all its public methods at the edge."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType) and not name.startswith("_"):
            setattr(kind, name, edge(member))
    return kind


def _all_ours(traceback: TracebackType | None) -> bool:
    """Whether no line is anybody's but ours, or of Python's own library in between."""
    while traceback is not None:
        package = str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if package not in OWN_PACKAGES and package not in sys.stdlib_module_names:
            return False
        traceback = traceback.tb_next
    return True
