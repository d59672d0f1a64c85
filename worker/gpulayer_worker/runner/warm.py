"""A warm process: forked once, then it serves many calls, one at a time, with everything that it has imported.

Between two batches it looks as fresh as it can without starting anew: environment, folder, streams and arguments are
those of the batch; what functions left in modules and globals stays. It says after each batch what it has grown to, and
leaves by itself where a batch left threads behind that a fresh process would have waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from . import call, proctree
from .jobs import MARK
from .warm_wire import ABOUT_BATCH, Recent, encode_reply, receive_request

KEPT_VARIABLES = (MARK, "GPULAYER_PROGRESS_FD")


def serve(requests: int, replies: int) -> NoReturn:
    """Serves batches until the worker lets go of this process; never returns."""
    process = _Process(replies)
    with socket.socket(fileno=requests) as link:
        while process.lives:
            request = receive_request(link)
            if request is None:
                break
            process.run(*request)
    if process.lives:
        call.finish()
    os._exit(0)


class _Process:
    def __init__(self, replies: int) -> None:
        self.lives = True
        self._replies = replies
        self._functions: Recent[Any] = Recent()
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._folder = ""
        self._own = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}

    def run(self, head: dict[str, Any], parts: list[memoryview], descriptors: list[int]) -> None:
        """One batch, from its streams to the word that it is done."""
        self._tell({"begun": True})
        self._dress(head, descriptors)
        function = self._function(head, parts.pop(0) if head["has_function"] else None)
        tokens = descriptors[2:]
        done = self._call_all(head, function, parts, tokens)
        for token in tokens:
            os.close(token)
        self._undress(done)

    def _call_all(
        self, head: dict[str, Any], function: Any, parts: list[memoryview], tokens: list[int]
    ) -> int:
        """Calls the items; how many of them.

        Those of a ride are of different jobs: each begins with a token, which the worker may have taken back. One that
        leaves files, children or threads behind is the last: what follows is not to meet them.
        """
        spec, ride = dict(head), _Ride(head, self._own) if tokens else None
        for index, data in enumerate(parts):
            if tokens and not _taken(tokens[0]):
                return index
            spec["payload"] = "{}.{}".format(head["payload"], index)
            if ride is not None:
                ride.dress(index)
            if self._answer(index, spec, function, data, ride):
                return index + 1
        return len(parts)

    def _answer(
        self, index: int, spec: dict[str, Any], function: Any, data: memoryview, ride: _Ride | None = None
    ) -> bool:
        """Calls one item and tells what came of it; whether it left something behind, as far as a ride asks."""
        wall_s, cpu_s = time.perf_counter(), _cpu_s()
        header, payload, _ = _outcome(spec, function, data)
        cpu_s, wall_s = _cpu_s() - cpu_s, time.perf_counter() - wall_s
        written, marked = (0, 0), False
        if ride is not None:
            written, marked = _written(), ride.is_marked()
            if marked:
                header["marked"] = True
        plain = header.get("kind") == "json" and header.get("ok") and header["file"] is None and not marked
        self._write(encode_reply(index, b"" if plain else _text(header), payload, cpu_s, wall_s, written))
        return marked

    def _function(self, head: dict[str, Any], data: memoryview | None) -> Any:
        """The batch's function, or the error that every item of it has."""
        if data is None:
            return self._functions.find(head["function"])
        try:
            function: Any = call.load(head, "function", bytes(data))
        except call.CannotLoad as error:
            function = error
        self._functions.keep(head["function"], function)
        return function

    # --- around a batch ---

    def _dress(self, head: dict[str, Any], descriptors: list[int]) -> None:
        for descriptor, target in zip(descriptors[:2], (1, 2)):  # noqa: B905 - strict= came with 3.10
            os.dup2(descriptor, target)
            os.close(descriptor)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        _wear(dict(head["env"], **self._own))
        os.chdir(head["cwd"])
        folder = os.getcwd()
        if not self._folder:
            call.prepare(head)
        else:
            sys.argv = [head["name"]]
            sys.path[:] = [folder if entry == self._folder else entry for entry in sys.path]
        self._folder = folder

    def _undress(self, count: int) -> None:
        """Ends the batch's hold on streams and folder, then says that it is done and what is left of it."""
        if _left_threads():
            # What a fresh process does at its end: it waits for them.
            self.lives = False
            call.finish()
        _flush()
        for target in (1, 2):
            os.dup2(self._null, target)
        os.chdir("/")
        self._tell(
            {
                "done": count,
                "ending": not self.lives,
                "children": len(proctree.children(os.getpid())),
                "rss_bytes": _rss_bytes(),
                "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )

    def _tell(self, facts: dict[str, Any]) -> None:
        self._write(encode_reply(ABOUT_BATCH, _text(facts), b""))

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._replies, data) :]


class _Ride:
    """What calls of a ride share, a folder and an environment, and what tells them apart: `each` has their own."""

    def __init__(self, head: dict[str, Any], own: dict[str, str]) -> None:
        self._env, self._cwd, self._each = dict(head["env"], **own), head["cwd"], head["each"]
        self._folders = [
            (path, os.stat(path).st_mode, set(inside)) for path, inside in head["folders"].items()
        ]
        self._worn: dict[Any, Any] = {}

    def dress(self, index: int) -> None:
        os.chdir(self._cwd)
        mine = self._each[index]
        # Looking at each variable by itself would cost more than a small call does.
        if not self._worn or _raw_environment() != self._worn:
            _wear(dict(self._env, **mine))
        else:
            os.environ.update(mine)
        self._worn = dict(_raw_environment())

    def is_marked(self) -> bool:
        """Whether the last call left something that a call of its own would not have left to another."""
        try:
            as_given = all(
                os.stat(path).st_mode == mode and set(os.listdir(path)) == inside
                for path, mode, inside in self._folders
            )
        except OSError:
            return True
        return not as_given or _left_threads() or _has_children()


def _raw_environment() -> Any:
    return getattr(os.environ, "_data", os.environ)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    except AttributeError:  # a system without waitid
        return bool(proctree.children(os.getpid()))
    return True


def _taken(tokens: int) -> bool:
    """Takes one token; False where none is left."""
    try:
        return bool(os.read(tokens, 1))
    except BlockingIOError:
        return False


def _written() -> tuple[int, int]:
    """How much is in the files that stdout and stderr are."""
    _flush()
    return os.fstat(1).st_size, os.fstat(2).st_size


def _outcome(spec: dict[str, Any], function: Any, data: memoryview) -> tuple[dict[str, Any], bytes, int]:
    if isinstance(function, call.CannotLoad):
        return call.failure(spec, function, 1)
    try:
        arguments, keywords = call.load(spec, "arguments", bytes(data))
    except call.CannotLoad as error:
        return call.failure(spec, error, 1)
    return call.invoke(spec, function, arguments, keywords)


def _wear(wanted: dict[str, str]) -> None:
    """Changes only what differs: each change is a call into the C library."""
    zone = os.environ.get("TZ")
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    if os.environ.get("TZ") != zone:
        time.tzset()


def _flush() -> None:
    """Python's buffers and those of C libraries: what a batch wrote belongs into its own log."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
    proctree.flush_c_streams()


def _left_threads() -> bool:
    return any(
        not thread.daemon and thread is not threading.main_thread() for thread in threading.enumerate()
    )


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _rss_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _text(header: dict[str, Any]) -> bytes:
    return json.dumps(header, ensure_ascii=False).encode("utf-8", "backslashreplace")
