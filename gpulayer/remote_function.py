"""`gl.remote`: a function that runs here when it is called, and where it fits when it is delayed or mapped.

Its parameters and its result keep their types: `f.delay("x")` is an error to a type checker where `f(n: int)`. A remote
method is that of its instance, which travels with it by value: what a job changes of it is changed there alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, Unpack, overload

from gpulayer.by_value import is_local
from gpulayer.client import Client, default_client
from gpulayer.edge import edge, edged
from gpulayer.handing_over import Arguments
from gpulayer.handle import Job
from gpulayer.manner import MapOptions
from gpulayer.mapping import MapResult
from gpulayer.options import KNOWN_REMOTE, Plan, RemoteOptions, plan_of, refuse_unknown
from gpulayer.payload import PackedFunction, minor_version, pack_function
from gpulayer.unchanged import Kept

if TYPE_CHECKING:
    from gpulayer.explaining import Explanation

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")


@edged
class RemoteFunction(Generic[P, R]):
    """What `gl.remote` makes of a function; of a method, what its class and its instances give."""

    __self__: Any

    def __init__(self, function: Callable[P, R], options: RemoteOptions) -> None:
        if isinstance(function, (staticmethod, classmethod)):
            kind = type(function).__name__
            raise TypeError(f"@{kind} goes above @gl.remote: write @{kind} first, @gl.remote below it")
        if not callable(function):
            raise TypeError(f"gl.remote takes a function, not {type(function).__name__}")
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                "gl.remote takes no async function: its job has no event loop, so call asyncio.run in it"
            )
        refuse_unknown("gl.remote", options, KNOWN_REMOTE)
        self._plan: Plan = plan_of(options)
        self._options = options
        self._kept: Kept | None = None
        self.__wrapped_by_remote__ = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__wrapped_by_remote__(*self._receiver, *args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type[Any], /) -> RemoteFunction[P, R]: ...

    @overload
    def __get__(
        self: RemoteFunction[Concatenate[S, Q], R], instance: S, owner: type[Any] | None = None, /
    ) -> RemoteFunction[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None, /) -> RemoteFunction[Any, R]:
        """As a method: `model.score.delay(x)` sends `model` along."""
        if instance is None or self._receiver or not isinstance(self.__wrapped_by_remote__, FunctionType):
            return self
        return self._of(instance)

    def _of(self, instance: Any) -> RemoteFunction[Any, R]:
        bound: RemoteFunction[Any, R] = RemoteFunction.__new__(RemoteFunction)
        vars(bound).update(vars(self), __self__=instance)
        return bound

    @property
    def _receiver(self) -> tuple[Any, ...]:
        """The instance whose method it is, if it is one's."""
        return (self.__self__,) if "__self__" in vars(self) else ()

    def __repr__(self) -> str:
        return f"<gpulayer.remote {getattr(self, '__qualname__', self.__wrapped_by_remote__)!s}>"

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> Job[R]:
        """Submits one call; its handle.

        >>> train.delay(0.1).result()
        """
        return self._client.submit_call(self._packed(), (args, kwargs), self._plan)

    def explain(self) -> Explanation:
        """Which workers could run a call of it now, which ever, and of each other one why not; it submits nothing.

        >>> print(train.options(gpus=8).explain())
        """
        from gpulayer.explaining import explain

        plan = self._plan.on_python(minor_version()) if self._packed().holds_code else self._plan
        return explain(plan.needs, self._client._opened.submitter.adviser.workers())

    def options(self, **changes: Unpack[RemoteOptions]) -> RemoteFunction[P, R]:
        """The same function with some options changed.

        >>> train.options(gpus=2, timeout="1h").delay(0.1)
        """
        merged: RemoteOptions = {**self._options, **changes}
        changed = RemoteFunction(self.__wrapped_by_remote__, merged)
        changed._kept = self._kept
        return changed._of(self.__self__) if self._receiver else changed

    @overload
    def map(
        self, xs: Iterable[Any], *, return_exceptions: Literal[False] = False, **options: Unpack[MapOptions]
    ) -> MapResult[R]: ...

    @overload
    def map(
        self, xs: Iterable[Any], *, return_exceptions: bool, **options: Unpack[MapOptions]
    ) -> MapResult[R | Exception]: ...

    def map(
        self, xs: Iterable[Any], *, return_exceptions: bool = False, **options: Unpack[MapOptions]
    ) -> MapResult[R] | MapResult[R | Exception]:
        """Submits one call for each item: all of them before it returns, if `xs` has a length.

        With `return_exceptions` an error stands in its call's place. `max_parallel` is how many calls run at once, at
        most; each of them is then a job of its own. Of an `xs` without a length at most `max_in_flight` calls (1000)
        are open. A bar is drawn on a terminal or in a notebook while the results are waited for; `progress=False`
        draws none.

        >>> square.map(range(100)).results()
        """
        calls: Iterator[Arguments] = (((x,), {}) for x in xs)
        return self._mapped("map", calls, xs, return_exceptions, options)

    @overload
    def starmap(
        self,
        xs: Iterable[Iterable[Any]],
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[MapOptions],
    ) -> MapResult[R]: ...

    @overload
    def starmap(
        self, xs: Iterable[Iterable[Any]], *, return_exceptions: bool, **options: Unpack[MapOptions]
    ) -> MapResult[R | Exception]: ...

    def starmap(
        self, xs: Iterable[Iterable[Any]], *, return_exceptions: bool = False, **options: Unpack[MapOptions]
    ) -> MapResult[R] | MapResult[R | Exception]:
        """As `map`, each item being all positional arguments of its call.

        >>> power.starmap([(2, 3), (3, 2)]).results()
        """
        calls: Iterator[Arguments] = ((tuple(x), {}) for x in xs)
        return self._mapped("starmap", calls, xs, return_exceptions, options)

    def _mapped(
        self,
        what: str,
        calls: Iterator[Arguments],
        xs: Iterable[Any],
        return_exceptions: bool,
        options: MapOptions,
    ) -> MapResult[R]:
        refuse_unknown(what, options, MapOptions.__annotations__)
        total = len(xs) if isinstance(xs, Sized) else None
        return self._client.submit_map(
            self._packed(), calls, self._plan, total, return_exceptions=return_exceptions, **options
        )

    @property
    def _client(self) -> Client:
        return default_client(self._options.get("target"))

    def _packed(self) -> PackedFunction:
        """Pickled anew, unless nothing that the function refers to can have changed since."""
        function, kept = self.__wrapped_by_remote__, self._kept
        if self._receiver or not isinstance(function, FunctionType):
            return self._packed_anew()
        if kept is None or not kept.holds(function):
            kept = self._kept = Kept(function, self._packed_anew)
        return kept.packed

    def _packed_anew(self) -> PackedFunction:
        by_reference = self if self._receiver or self._is_importable() else None
        return pack_function(self.__wrapped_by_remote__, by_reference=by_reference)

    def _is_importable(self) -> bool:
        """Whether a worker that has the function's module finds this object under its name there."""
        module, qualname = getattr(self, "__module__", None), getattr(self, "__qualname__", "")
        if not isinstance(module, str) or module not in sys.modules or is_local(module):
            return False
        found: Any = sys.modules[module]
        for name in qualname.split("."):
            found = getattr(found, name, None)
        return found is self

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By its name where it can be imported, else as the function and its options; a method as its instance's.

        A stand-in for gpulayer reads all of them.
        """
        if self._receiver:
            return getattr, (self.__self__, self.__wrapped_by_remote__.__name__)
        if self._is_importable():
            return str(getattr(self, "__qualname__", ""))
        return functools.partial(remote, **self._options), (self.__wrapped_by_remote__,)


@overload
def remote(function: Callable[P, R], /) -> RemoteFunction[P, R]: ...


@overload
def remote(function: Callable[P, R], /, **options: Unpack[RemoteOptions]) -> RemoteFunction[P, R]: ...


@overload
def remote(
    function: None = None, /, **options: Unpack[RemoteOptions]
) -> Callable[[Callable[P, R]], RemoteFunction[P, R]]: ...


@edge
def remote(
    function: Callable[P, R] | None = None, /, **options: Unpack[RemoteOptions]
) -> RemoteFunction[P, R] | Callable[[Callable[P, R]], RemoteFunction[P, R]]:
    """Makes a function remote; the options say what a machine must have to run it.

    >>> @gl.remote(accelerator="cuda", gpu_memory="24GB", frameworks={"torch": ">=2.4"})
    ... def train(rate: float) -> float: ...
    >>> train.delay(0.1).result()
    """
    if function is not None:
        return RemoteFunction(function, options)
    refuse_unknown("gl.remote", options, KNOWN_REMOTE)
    plan_of(options)

    def decorate(function: Callable[P, R]) -> RemoteFunction[P, R]:
        return RemoteFunction(function, options)

    return decorate


# Pickles name it so, and the stand-in for gpulayer in a job's Python has it there too.
remote.__module__ = "gpulayer"
