"""A function and its arguments as bytes that a worker can load, and where they travel.

A small function travels in the job's record, any other as one blob that all its jobs share; arguments travel in the
record up to `argument_inline_bytes`, as a blob up to `argument_blob_bytes`, and are refused beyond. What cannot be
pickled is a NotPicklable that names the object.
"""

from __future__ import annotations

import io
import pickle
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from hashlib import sha256
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from gpulayer.by_value import is_installed, is_local, local_modules_by_value
from gpulayer.offenders import names_in, offender
from gpulayer.session import Session
from gpulayer_broker.errors import NotPicklable, UsageError
from gpulayer_broker.spec import FunctionCall, Payload
from gpulayer_broker.units import KIB, format_size

FUNCTION_INLINE_BYTES = KIB
# An array's record goes out with each of its ranges: its items stay small in it, or are a blob.
ITEMS_INLINE_BYTES = 2 * KIB
# A store forgets what nobody uses: a blob that was sent so long ago is offered again.
RENEWED_S = 600.0
REMEMBERED = 10_000
# What the plain pickler writes exactly as any other would; everything else may hold a class of __main__.
ATOMS = frozenset({int, float, str, bytes, bool, complex, type(None)})
# Looking at more elements than that costs as much as what it saves.
LOOKED_AT = 1000
# Names that only a pickle by value holds: code does not survive a change of Python's minor version.
BY_VALUE = (b"_make_function", b"_make_skeleton_class", b"CodeType")


class PackedFunction(NamedTuple):
    """A pickled function: what travels, and what a worker should import beforehand."""

    data: bytes
    module: str
    qualname: str
    modules: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.qualname or "function"

    @property
    def holds_code(self) -> bool:
        """Whether only a Python of the same minor version can load it."""
        return holds_code(self.data)


def pack_function(function: Callable[..., Any], *, by_reference: Any = None) -> PackedFunction:
    """The function as bytes; `by_reference` is the object that its module's name leads to, if that can be imported."""
    module = str(getattr(function, "__module__", "") or "")
    qualname = str(getattr(function, "__qualname__", "") or type(function).__qualname__)
    data = dumps(function if by_reference is None else by_reference, f"function '{qualname}'")
    return PackedFunction(data, module, qualname, preloads(function))


def dumps(value: Any, label: str) -> bytes:
    """The pickle of a value; NotPicklable names what is in the way."""
    try:
        return _cloudpickled(value)
    except Exception as error:  # noqa: BLE001 - a value's own __reduce__ may raise anything
        if _is_too_deep(error):
            raise NotPicklable(f"{label} cannot travel: it is nested too deep to be pickled") from None
        where, what, why = offender(value, label, _cloudpickled)
        kind = type(what).__qualname__
        raise NotPicklable(
            f"{where} ({kind}) cannot travel: {why or error}; make it inside the function, or leave it out",
            value=where,
        ) from None


def _is_too_deep(error: Exception) -> bool:
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def _cloudpickled(value: Any) -> bytes:
    import cloudpickle

    buffer = io.BytesIO()
    with local_modules_by_value():
        cloudpickle.dump(value, buffer)
    return buffer.getvalue()


def holds_code(pickled: bytes) -> bool:
    """Whether a pickle holds code, which only a Python of the same minor version can load."""
    return any(name in pickled for name in BY_VALUE)


def minor_version() -> str:
    """This Python's version without its last part."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def pack_many(
    label: str, calls: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]], first: int = 0
) -> list[bytes]:
    """Each (args, kwargs) as bytes; the error names the item too, counted from `first`."""
    import cloudpickle

    packed: list[bytes] = []
    with local_modules_by_value():
        for args, kwargs in calls:
            if not kwargs and are_plain(args):
                packed.append(pickle.dumps((args, {}), pickle.HIGHEST_PROTOCOL))
                continue
            try:
                packed.append(cloudpickle.dumps((args, dict(kwargs))))
            except Exception:  # noqa: BLE001 - a value's own __reduce__ may raise anything
                packed.append(pack_arguments(label, args, kwargs, first + len(packed)))
    return packed


def pack_arguments(
    label: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], item: int | None = None
) -> bytes:
    """(args, kwargs) as bytes; the error names the argument, and the item of a map."""
    pair = (args, dict(kwargs))
    if are_plain(args) and are_plain(kwargs.values()):
        return pickle.dumps(pair, pickle.HIGHEST_PROTOCOL)
    try:
        return _cloudpickled(pair)
    except Exception:
        for name, value in (*enumerate(args, 1), *kwargs.items()):
            which = f"'{name}'" if isinstance(name, str) else f"number {name}"
            where = "" if item is None else f"item {item}, "
            dumps(value, f"{where}argument {which} of '{label}'")
        raise


def are_plain(values: Collection[Any]) -> bool:
    """Whether each is an atom, or a list, a tuple or a dict of some."""
    return ATOMS.issuperset(map(type, values)) or all(map(_is_plain, values))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return len(value) <= LOOKED_AT and ATOMS.issuperset(map(type, (*value, *value.values())))
    if kind is list or kind is tuple:
        return len(value) <= LOOKED_AT and ATOMS.issuperset(map(type, value))
    return kind in ATOMS


def preloads(function: Callable[..., Any]) -> tuple[str, ...]:
    """Top-level installed modules that the function will use, so that a worker can import them before it is forked."""
    found: set[str] = set()
    _collect(function, found, set())
    return tuple(sorted(name for name in found if is_installed(name)))


def _collect(value: Any, found: set[str], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, ModuleType):
        found.add(value.__name__.partition(".")[0])
        return
    inner = getattr(value, "__wrapped__", None)
    if inner is not None:
        _collect(inner, found, seen)
    module = getattr(value, "__module__", None)
    if isinstance(value, FunctionType) and (not isinstance(module, str) or is_local(module)):
        _collect_used(value, found, seen)
    elif isinstance(module, str):
        found.add(module.partition(".")[0])


def _collect_used(function: FunctionType, found: set[str], seen: set[int]) -> None:
    """What a function that travels by value uses: its globals, its closure, and what it imports itself."""
    for name in names_in(function.__code__):
        if name in function.__globals__:
            _collect(function.__globals__[name], found, seen)
        elif name.partition(".")[0] in sys.modules:
            found.add(name.partition(".")[0])
    for cell in function.__closure__ or ():
        try:
            _collect(cell.cell_contents, found, seen)
        except ValueError:  # not filled yet
            continue


class Courier:
    """Puts payloads where they travel; a blob is sent once by a client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent: dict[str, float] = {}

    def function(self, packed: PackedFunction) -> Payload:
        """The function's payload."""
        return self._payload(packed.data, FUNCTION_INLINE_BYTES, f"function '{packed.label}'")

    def arguments(self, data: bytes, label: str) -> Payload:
        """The arguments' payload."""
        inline_bytes = self._session.settings.argument_inline_bytes
        return self._payload(data, inline_bytes, f"arguments of '{label}'")

    def items(self, data: bytes, label: str) -> Payload:
        """The payload of an array's items."""
        return self._payload(data, ITEMS_INLINE_BYTES, f"arguments of '{label}'")

    def call(self, packed: PackedFunction, function: Payload, arguments: Payload) -> FunctionCall:
        """The record of one call."""
        return FunctionCall(
            function=function,
            arguments=arguments,
            module=packed.module,
            qualname=packed.qualname,
            python=platform.python_version(),
            modules=packed.modules,
        )

    def _payload(self, data: bytes, inline_bytes: int, what: str) -> Payload:
        if len(data) <= inline_bytes:
            return Payload(data, "", len(data))
        most_bytes = self._session.settings.argument_blob_bytes
        if len(data) > most_bytes:
            raise UsageError(
                f"the {what} are {format_size(len(data))} as a pickle, over the limit of {format_size(most_bytes)}: "
                "write them to a file and ship it with source= or --input"
            )
        payload = Payload(None, sha256(data).hexdigest(), len(data))
        self.renew(payload, data)
        return payload

    def renew(self, payload: Payload, data: bytes) -> None:
        """Offers a blob to the store, where that was not done for a while."""
        sha = payload.sha256
        if sha and time.monotonic() - self._sent.get(sha, -RENEWED_S) >= RENEWED_S:
            self._session.attempt(lambda _: self._session.store.put_bytes(data))
            if len(self._sent) >= REMEMBERED:
                self._sent.clear()
            self._sent[sha] = time.monotonic()
