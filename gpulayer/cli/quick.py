"""Values of a command line that are what they are to be already: given to the command as they stand.

Typer converts every value, default or given, by an adapter of pydantic. To load that and to make an adapter for each of
forty options takes longer than all else that a command does. What needs no adapter is decided here, by what an option's
annotation says; whatever has to be checked, or is wrong, goes to Typer. A refusal shows the value that was given.
"""

from __future__ import annotations

import typing
from functools import partial
from pathlib import Path
from typing import Any

import typer

PLAIN = (str, bool, int, Path)


class Quick:
    """A command, or a group of them, whose plain values are not converted."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All its parameters, the one of --help too.

        Older releases of Typer convert by click, at no price: there nothing is to be done.
        """
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]  # mixed into commands of Typer
        for parameter in found:
            slowly = getattr(parameter, "get_runtime_param", None)
            if slowly is not None and not isinstance(slowly, partial):
                parameter.get_runtime_param = partial(_Quick, parameter, slowly)
        return found


class Command(Quick, typer.core.TyperCommand):
    """A command."""


class _Quick:
    """Stands for Typer's converter of one parameter until that is needed."""

    def __init__(self, parameter: Any, slowly: Any) -> None:
        self._parameter, self._slowly = parameter, slowly

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        many = param.multiple or param.nargs == -1
        if value is None:
            return () if many else None
        annotation = self._parameter.type_descriptor.annotation
        if annotation is Path and value == "":
            # It would mean the current folder: an unset variable of a script.
            raise typer.BadParameter("it is empty", ctx=ctx, param=param)
        if many and isinstance(value, (list, tuple)):
            (annotation,) = typing.get_args(annotation) or (None,)
            if annotation is str and all(type(each) is str for each in value):
                return list(value)
        elif annotation in PLAIN and not many:
            found = _plain(annotation, value, param)
            if found is not None:
                return found
        try:
            return self._slowly().coerce(value, param=param, ctx=ctx)
        except typer.BadParameter as error:
            raise typer.BadParameter(
                _refusal(annotation, value, param, error), ctx=ctx, param=param
            ) from None


def _plain(annotation: type, value: Any, param: Any) -> Any:
    """The value as it is to be; None where that takes a closer look."""
    if type(value) is annotation and annotation is not int:
        return value
    if annotation is Path and type(value) is str:
        return Path(value)
    if annotation is int:
        return _number(value, param.type_descriptor.parameter_info)
    return None


def _number(value: Any, bounds: Any) -> int | None:
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 10:
        value = int(value)
    if type(value) is not int or bounds.max is not None:
        return None
    return value if bounds.min is None or value >= bounds.min else None


def _refusal(annotation: Any, value: Any, param: Any, error: typer.BadParameter) -> str:
    """The value, and what it is not."""
    if annotation is not int:
        return f"{value!r}: {error.message}"
    bounds = param.type_descriptor.parameter_info
    within = "" if bounds.min is None else f" of {bounds.min} or more"
    if bounds.max is not None:
        within = f" up to {bounds.max}" if bounds.min is None else f" from {bounds.min} to {bounds.max}"
    return f"{value!r} is not a whole number{within}"
