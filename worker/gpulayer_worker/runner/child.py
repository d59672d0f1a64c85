"""What a forked child does between the fork and the job: a session, pipes, signals, folder, environment of its own.

It ends in an exec (commands) or in the function's call, and never returns into the fork server. What goes
wrong on the way is the job's own failure: exit code 126 or 127, one line on its stderr, and the same in its
report.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import call, cgroups, forks, proctree, report, signals, warm
from .jobs import MARK

NOT_EXECUTABLE = 126
NOT_FOUND = 127
# High enough that no shell script's own `exec 3>` meets it.
PROGRESS_DESCRIPTOR_FROM = 200
JOBS_OOM_SCORE = b"500"
PROGRESS = "GPULAYER_PROGRESS_FD"
AS_FILE_NAMES = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())

if TYPE_CHECKING:
    # Names that are gone, variables that are new or other, all as bytes.
    Change = tuple[list[bytes], list[tuple[bytes, bytes]]]

# The environment that a child inherits.
_worn: dict[str, str] = {}


def prepare(message: dict[str, Any]) -> None:
    """Does, before the fork, what costs less there: what the fork server has just touched, it need not copy."""
    message["env"][MARK] = message["id"]
    if message["kind"] != "command":
        try:
            message["change"] = differing(message["env"])
        except UnicodeError:
            return  # which is the job's own failure: it tries again


def become_job(message: dict[str, Any], pipes: dict[str, int], server: int, private: Sequence[int]) -> None:
    """Turns this forked child into the job; never returns."""
    code = NOT_EXECUTABLE
    try:
        os.setsid()
        _die_with(server)
        signals.begin_anew(is_command=message["kind"] == "command")
        for descriptor in private:
            os.close(descriptor)
        change = _connect(message, pipes)
        cgroups.enter_alone(message.get("cgroups", ()))
        signals.open_all()
        code = _run(message, pipes, change)
    except BaseException as error:  # noqa: BLE001 - nothing may unwind into the fork server's loop
        _explain(pipes, type(error).__name__, f"cannot start: {error}")
    finally:
        os._exit(code)


def _run(message: dict[str, Any], pipes: dict[str, int], change: Change) -> int:
    os.umask(int(message.get("umask", 0o022)))
    try:
        os.chdir(message["cwd"])
    except OSError as error:
        return _explain(
            pipes, "CannotStart", "cannot enter the folder {}: {}".format(message["cwd"], error.strerror)
        )
    if message["kind"] == "function":
        forks.take_up()
        _wear(change)
        spec = message["call"]
        spec.update(zip(spec["inline"], message.get("blobs", ())))  # noqa: B905 - strict= came with 3.10
        return call.call(spec, pipes.get("report"), message["env"])
    if message["kind"] == "warm":
        forks.take_up()
        _wear(change)
        warm.serve(pipes["requests"], pipes["replies"])
    return _execute(message["argv"], message["env"], pipes)


def _die_with(server: int) -> None:
    """A kill -9 of the fork server takes this process along."""
    proctree.die_with_parent()
    if os.getppid() != server:
        os._exit(NOT_EXECUTABLE)
    # The kernel, out of memory, is to pick the job and not what watches over it.
    try:
        descriptor = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        os.write(descriptor, JOBS_OOM_SCORE)
        os.close(descriptor)
    except OSError:
        pass  # where the kernel does not let it be told, it picks by size


def _connect(message: dict[str, Any], pipes: dict[str, int]) -> Change:
    """Puts the pipes where the job expects them; how its environment differs from the fork server's."""
    environment: dict[str, str] = message["env"]
    change: Change = message.get("change") or differing(environment)
    for name, target in (("stdout", 1), ("stderr", 2)):
        os.dup2(pipes[name], target)
        os.close(pipes.pop(name))
    if "progress" in pipes:
        # Open in what the job executes too: `gpulayer.progress` works in a command.
        progress = fcntl.fcntl(pipes["progress"], fcntl.F_DUPFD, PROGRESS_DESCRIPTOR_FROM)
        os.close(pipes.pop("progress"))
        environment[PROGRESS] = str(progress)
        change[1].append((PROGRESS.encode(), str(progress).encode()))
    return change


def note_environment() -> None:
    """Called by the fork server where its own environment may have changed."""
    _worn.clear()
    _worn.update(os.environ)


def differing(environment: dict[str, str]) -> Change:
    """What a job's environment has otherwise than the fork server's. Found there, it costs the child no pages."""
    gone = [name.encode(*AS_FILE_NAMES) for name in _worn if name not in environment]
    changed = [
        (name.encode(*AS_FILE_NAMES), value.encode(*AS_FILE_NAMES))
        for name, value in environment.items()
        if _worn.get(name) != value
    ]
    return gone, changed


def _wear(change: Change) -> None:
    """Changes what differs, for C and for Python; `os.environ` itself takes several calls for each name."""
    told = os.environ._data  # type: ignore[attr-defined]
    zone = told.get(b"TZ")
    gone, changed = change
    for name in gone:
        os.unsetenv(name)
        del told[name]
    for name, value in changed:
        os.putenv(name, value)
        told[name] = value
    if told.get(b"TZ") != zone:
        time.tzset()


def _execute(argv: list[str], environment: dict[str, str], pipes: dict[str, int]) -> int:
    """Replaces this process by the command; returns only when that fails."""
    try:
        os.execvpe(argv[0], argv, environment)
    except (OSError, ValueError) as error:
        kind, text, code = why_not(argv[0], error)
        _explain(pipes, kind, text)
        return code


def why_not(program: str, error: Exception) -> tuple[str, str, int]:
    """Why a program could not be executed: type, text and exit code, as a shell would tell them apart."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.ENOENT and os.path.isfile(program):
        return (
            "CommandNotExecutable",
            f"{program}: the interpreter of its first line (#!) is missing",
            NOT_EXECUTABLE,
        )
    if number in (errno.ENOENT, errno.ENOTDIR):
        return "CommandNotFound", f"{program}: command not found", NOT_FOUND
    if number == errno.ENOEXEC:
        return (
            "CommandNotExecutable",
            f"{program}: not a program (a script needs a first line with #!)",
            NOT_EXECUTABLE,
        )
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return "CommandNotExecutable", f"{program}: cannot be executed: {reason}", NOT_EXECUTABLE


def _explain(pipes: dict[str, int], kind: str, text: str) -> int:
    """One line on the job's stderr and a report; the exit code for it."""
    with contextlib.suppress(OSError):
        os.write(2, (f"gpulayer: {text}\n").encode("utf-8", "replace"))
    if pipes.get("report") is not None:
        with contextlib.suppress(OSError):
            report.send(pipes["report"], {"ok": False, "type": kind, "module": "gpulayer", "message": text})
    sys.stderr.flush()
    return NOT_EXECUTABLE
