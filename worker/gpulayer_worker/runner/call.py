"""Calls a pickled function and reports its result or its error.

`call` serves a forked child, `call_and_exit` a process of its own. The function and its arguments are two pickles,
each of them bytes that came along, or the name of a file. Whatever happens, there is one report, unless the process
is killed or leaves by os._exit.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import io
import json
import os
import pickle
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from . import given, preload, report
from .forks import end_logging, has_threads
from .report import scalar, send

INTERRUPTED = 130
REHEARSALS = 30
VERSION = list(sys.version_info[:2])

_main = ModuleType("__main__")
# Names that only a pickle by value holds: code does not survive a change of Python's minor version.
BY_VALUE = (b"_make_function", b"_make_skeleton_class", b"CodeType")


# In a forked child each page that is touched is copied, and to look a name up in another module touches several: what
# all children use has names here.
_sys, _getcwd, _close, _loads = vars(sys), os.getcwd, os.close, pickle.loads
_run_exit_handlers: Callable[[], object] = getattr(atexit, "_run_exitfuncs", bool)
_path = sys.path
# What there is to undo or to do anew in a child.
_at_fork: list[Callable[[], None]] = []


class CannotLoad(Exception):
    """The function or its arguments cannot be unpickled here."""


def call(spec: dict[str, Any], descriptor: int | None, environment: Mapping[str, str] = os.environ) -> int:
    """Runs the function of `spec` in this process, which has this environment; the exit code."""
    prepare(spec, environment)
    header, payload, code = _outcome(spec)
    if descriptor is not None:
        _send(descriptor, header, payload)
    finish()
    return code


def call_forked(spec: dict[str, Any], pipes: dict[str, int]) -> int:
    """The same in a child of a process that has called `note_state` once, and then `prepare_fork`."""
    _sys["argv"] = spec["argv"]
    _path[:0] = [_getcwd(), *spec["path"]]
    for undo in _at_fork:
        undo()
    header, payload, code = _outcome(spec)
    if "report" in pipes:
        _send(pipes["report"], header, payload)
    finish()
    return code


def _send(descriptor: int, header: dict[str, Any], payload: bytes) -> None:
    try:
        send(descriptor, header, payload)
    except BrokenPipeError:
        return  # the worker is gone
    finally:
        _close(descriptor)


def call_and_exit(path: str, descriptor: int) -> NoReturn:
    """Runs the function whose spec is the JSON file at `path`; ends this process."""
    os.set_inheritable(descriptor, False)
    with open(path, encoding="utf-8") as file:
        spec = json.load(file)
    os._exit(call(spec, descriptor))


# --- before ---


def prepare(spec: dict[str, Any], environment: Mapping[str, str] = os.environ) -> None:
    """Makes this process look like a Python that has just been started in the job's folder."""
    note_state()
    prepare_fork(spec, environment)
    sys.argv = spec["argv"]
    sys.path[:0] = [os.getcwd(), *spec["path"]]
    _bring(spec.get("fallback_path", []))
    for undo in _at_fork:
        undo()


def note_state() -> None:
    """Called by the fork server where it has imported: does once what is the same for all jobs."""
    global _path
    # The runner's own __main__ must not be found by a user's pickle, nor be run again by multiprocessing.
    sys.modules["__main__"] = _main
    # A crash in native code leaves at least the Python stack in the log.
    if not faulthandler.is_enabled():
        faulthandler.enable()
    _path = sys.path
    _missing_of.cache_clear()
    _at_fork[:] = [
        step for step, is_needed in ((_disown_finalizers, _finalizers()), (_reseed, _seeded())) if is_needed
    ]


def rehearse() -> None:
    """Called by the fork server: what an interpreter notes at first calls, it notes here and not in each child."""
    sample = io.BytesIO()
    spec = {"python": list(sys.version_info[:3]), "protocol": pickle.HIGHEST_PROTOCOL, "payload": ""}
    try:
        _dump(spec)(lambda number: number, sample)
    except Exception:  # noqa: BLE001 - a Python without cloudpickle, or with a broken one
        return
    spec.update(function=sample.getvalue(), arguments=pickle.dumps(((1,), {})))
    for _ in range(REHEARSALS):
        _outcome(spec)


def prepare_fork(spec: dict[str, Any], environment: Mapping[str, str]) -> None:
    """What can be known before the fork of how the job's process is to look."""
    spec["argv"] = [str(spec.get("name", "function"))]
    spec["path"] = _missing_of(environment.get("PYTHONPATH", ""))


@functools.lru_cache(maxsize=1)
def _missing_of(folders: str) -> list[str]:
    """Those that `sys.path` has not yet."""
    return [entry for entry in folders.split(os.pathsep) if entry and entry not in sys.path]


def _bring(folders: list[str]) -> None:
    """What a fork server has done before its forks: the brought folders at the end of the path, cloudpickle."""
    if folders:
        sys.path.extend(folders)
        preload.bring_cloudpickle(folders)


def _finalizers() -> list[Any]:
    return list(getattr(weakref.finalize, "_registry", None) or ())


def _disown_finalizers() -> None:
    """What an import set up for the exit of the fork server (a temporary folder's removal) is not a job's to do."""
    for finalizer in _finalizers():
        finalizer.atexit = False


def _seeded() -> bool:
    return any(name in sys.modules for name in ("numpy.random", "torch", "tempfile"))


def _reseed() -> None:
    """Two children of one fork server must not draw the same numbers. (`random` looks after itself.)"""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    if "tempfile" in sys.modules:
        vars(sys.modules["tempfile"])["tempdir"] = None


# --- the call ---


def _outcome(spec: dict[str, Any]) -> tuple[dict[str, Any], bytes, int]:
    try:
        function = _unpickle(spec, "function")
        arguments, keywords = _filled(spec, *_unpickle(spec, "arguments"))
    except CannotLoad as error:
        return failure(spec, error, 1)
    return invoke(spec, function, arguments, keywords)


def invoke(
    spec: dict[str, Any], function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any]
) -> tuple[dict[str, Any], bytes, int]:
    """Calls it; header and payload of its report, and the exit code of a process that does nothing else."""
    try:
        value = function(*arguments, **keywords)
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return _result(spec, None)
        return failure(spec, error, error.code if isinstance(error.code, int) else 1)
    except KeyboardInterrupt as error:
        return failure(spec, error, INTERRUPTED)
    except BaseException as error:  # noqa: BLE001 - every error of a user's function is its report
        return failure(spec, error, 1)
    return _result(spec, value)


def _filled(
    spec: dict[str, Any], arguments: Sequence[Any], keywords: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    if "given" not in spec:
        return arguments, keywords
    try:
        return given.fill(spec["given"], arguments, keywords)
    except BaseException as error:
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        why = f"the module {name!r} is missing here" if name else f"{type(error).__name__}: {error}"
        raise CannotLoad(f"a result of another job, which is an argument, cannot be loaded: {why}") from error


def _unpickle(spec: dict[str, Any], part: str) -> Any:
    if isinstance(spec[part], bytes):
        return load(spec, part, spec[part])
    with open(spec[part], "rb") as file:
        return load(spec, part, file.read())


def load(spec: dict[str, Any], part: str, data: bytes) -> Any:
    """What these bytes, a part of the call, hold; CannotLoad with the reason."""
    if spec["python"][:2] != VERSION and any(name in data for name in BY_VALUE):
        theirs = _dotted(spec["python"])
        raise CannotLoad(f"{_where(spec, part)}: code does not travel between these; ask for python={theirs}")
    try:
        return _loads(data)
    except ModuleNotFoundError as error:
        message = f"{_where(spec, part)}: the module {error.name!r} is missing here"
        raise CannotLoad(message) from error
    except BaseException as error:
        raise CannotLoad(f"{_where(spec, part)}: {type(error).__name__}: {error}") from error


def _where(spec: dict[str, Any], part: str) -> str:
    theirs, ours = _dotted(spec["python"]), _dotted(sys.version_info[:3])
    made = "" if theirs == ours else f", made by Python {theirs},"
    return f"the {part}{made} cannot be loaded by Python {ours} ({sys.executable})"


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _dump(spec: dict[str, Any]) -> Callable[[Any, Any], None]:
    protocol = min(pickle.HIGHEST_PROTOCOL, int(spec.get("protocol", 5)))

    def dump(value: Any, file: Any) -> None:
        try:
            import cloudpickle
        except ImportError:
            pickle.dump(value, file, protocol)
        else:
            cloudpickle.dump(value, file, protocol)

    return dump


def _result(spec: dict[str, Any], value: Any) -> tuple[dict[str, Any], bytes, int]:
    limit_bytes = spec.get("result_limit_bytes")
    data = scalar(value)
    if data is not None and (limit_bytes is None or len(data) <= limit_bytes):
        return {"ok": True, "kind": "json", "size": len(data), "file": None}, data, 0
    payload = report.Payload(spec["payload"], limit_bytes)
    try:
        kind = report.write_result(value, payload, _dump(spec))
        data = payload.close()
    except MemoryError as error:
        return failure(spec, error, 1)
    except (report.ResultTooLarge, report.ResultNotWritten) as error:
        return _refusal(type(error).__name__, str(error))
    except BaseException as error:  # noqa: BLE001 - __reduce__ is a user's code
        reason = "{}: {}".format(type(error).__name__, report.describe(error)["message"])
        return _refusal(
            "ResultNotPicklable",
            f"a result of type {type(value).__qualname__} cannot be pickled: {reason}",
        )
    return dict(payload.facts(), ok=True, kind=kind), data, 0


def _refusal(kind: str, message: str) -> tuple[dict[str, Any], bytes, int]:
    return {"ok": False, "type": kind, "module": "gpulayer", "message": message, "traceback": ""}, b"", 1


def failure(spec: dict[str, Any], error: BaseException, code: int) -> tuple[dict[str, Any], bytes, int]:
    """The report of an error."""
    header = report.describe(error)
    header["exit_code"] = code
    if isinstance(error, CannotLoad):
        cause = error.__cause__
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        return dict(header, module="gpulayer", missing_module=missing), b"", code
    payload = report.Payload(spec["payload"], spec.get("result_limit_bytes"))
    if report.pickled(error, _dump(spec), payload):
        data = payload.close()
        return dict(payload.facts(), kind="pickle", **header), data, code
    return header, b"", code


# --- after ---


def finish() -> None:
    """What a Python does at its end and os._exit leaves out: join threads, exit handlers, flush."""
    steps = [_run_exit_handlers, end_logging]
    if has_threads():
        steps.insert(0, getattr(threading, "_shutdown", bool))
    for step in steps:
        try:
            step()
        except BaseException:  # noqa: BLE001 - as at the end of any Python: told, and nothing more
            traceback.print_exc()
    for name in ("stdout", "stderr"):
        try:
            _sys[name].flush()
        except (KeyError, OSError, ValueError, AttributeError):
            continue  # closed, replaced or full
