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

from . import call, report, warm
from .call import call_forked
from .cgroups import enter_alone
from .forks import take_up
from .jobs import MARK
from .proctree import die_with_parent
from .signals import begin_anew, open_all

NOT_EXECUTABLE = 126
NOT_FOUND = 127
# High enough that no shell script's own `exec 3>` meets it.
PROGRESS_DESCRIPTOR_FROM = 200
MORE_THAN_STANDARD = 10
JOBS_OOM_SCORE = b"500"
PROGRESS = "GPULAYER_PROGRESS_FD"
AS_FILE_NAMES = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())

if TYPE_CHECKING:
    # Names that are gone, variables that are new or other, all as bytes; whether the time zone is another.
    Change = tuple[list[bytes], list[tuple[bytes, bytes]], bool]

# In a child each page that is touched is copied, and to look a name up in another module touches several: what all
# children use has names here.
_setsid, _getppid, _open, _write, _close = os.setsid, os.getppid, os.open, os.write, os.close
_dup2, _umask, _chdir, _exit = os.dup2, os.umask, os.chdir, os._exit
_putenv, _unsetenv = os.putenv, os.unsetenv
_TO_WRITE = os.O_WRONLY

# The environment that a child inherits, and where Python keeps it.
_worn: dict[str, str] = {}
_told: dict[bytes, bytes] = {}


def prepare(message: dict[str, Any]) -> None:
    """Does, before the fork, what costs less there: what the fork server has just touched, it need not copy."""
    environment = message["env"]
    environment[MARK] = message["id"]
    if "progress" in message["pipes"]:
        environment[PROGRESS] = str(PROGRESS_DESCRIPTOR_FROM)
    if message["kind"] == "command":
        return
    try:
        message["change"] = differing(environment)
    except UnicodeError:
        message["change"] = None  # which is the job's own failure: it tries again
    if message["kind"] == "function":
        spec = message["call"]
        spec.update(zip(spec["inline"], message.get("blobs", ())))  # noqa: B905 - strict= came with 3.10
        call.prepare_fork(spec, environment)


def become_job(message: dict[str, Any], pipes: dict[str, int], server: int, private: Sequence[int]) -> None:
    """Turns this forked child into the job; never returns."""
    code = NOT_EXECUTABLE
    try:
        _setsid()
        _die_with(server)
        begin_anew(message["kind"] == "command")
        for descriptor in private:
            _close(descriptor)
        _connect(message, pipes)
        if "cgroups" in message:
            enter_alone(message["cgroups"])
        open_all()
        code = _run(message, pipes)
    except BaseException as error:  # noqa: BLE001 - nothing may unwind into the fork server's loop
        _explain(pipes, type(error).__name__, f"cannot start: {error}")
    finally:
        _exit(code)


def _run(message: dict[str, Any], pipes: dict[str, int]) -> int:
    _umask(message["umask"])
    try:
        _chdir(message["cwd"])
    except OSError as error:
        return _explain(
            pipes, "CannotStart", "cannot enter the folder {}: {}".format(message["cwd"], error.strerror)
        )
    if message["kind"] == "command":
        return _execute(message["argv"], message["env"], pipes)
    take_up()
    _wear(message["change"] or differing(message["env"]))
    if message["kind"] == "warm":
        warm.serve(pipes["requests"], pipes["replies"])
    return call_forked(message["call"], pipes)


def _die_with(server: int) -> None:
    """A kill -9 of the fork server takes this process along."""
    die_with_parent()
    if _getppid() != server:
        _exit(NOT_EXECUTABLE)
    # The kernel, out of memory, is to pick the job and not what watches over it.
    try:
        descriptor = _open("/proc/self/oom_score_adj", _TO_WRITE)
        _write(descriptor, JOBS_OOM_SCORE)
        _close(descriptor)
    except OSError:
        pass  # where the kernel does not let it be told, it picks by size


def _connect(message: dict[str, Any], pipes: dict[str, int]) -> None:
    """Puts the pipes where the job expects them."""
    _dup2(pipes["stdout"], 1)
    _close(pipes["stdout"])
    _dup2(pipes["stderr"], 2)
    _close(pipes["stderr"])
    if "progress" in pipes:
        _connect_progress(message, pipes)


def _connect_progress(message: dict[str, Any], pipes: dict[str, int]) -> None:
    """Open in what the job executes too: `gpulayer.progress` works in a command."""
    try:
        if max(pipes.values()) < PROGRESS_DESCRIPTOR_FROM:
            # Nothing of this job's is open there.
            _dup2(pipes["progress"], PROGRESS_DESCRIPTOR_FROM)
        else:
            _progress_elsewhere(message, pipes, PROGRESS_DESCRIPTOR_FROM)
    except OSError:
        # As many files may not be open here.
        _progress_elsewhere(message, pipes, MORE_THAN_STANDARD)
    _close(pipes["progress"])


def _progress_elsewhere(message: dict[str, Any], pipes: dict[str, int], least: int) -> None:
    message["env"][PROGRESS] = str(fcntl.fcntl(pipes["progress"], fcntl.F_DUPFD, least))
    message["change"] = None


def note_environment() -> None:
    """Called by the fork server where its own environment may have changed."""
    global _told
    _worn.clear()
    _worn.update(os.environ)
    _told = os.environ._data  # type: ignore[attr-defined]


def differing(environment: dict[str, str]) -> Change:
    """What a job's environment has otherwise than the fork server's. Found there, it costs the child no pages."""
    gone = [name.encode(*AS_FILE_NAMES) for name in _worn if name not in environment]
    changed = [
        (name.encode(*AS_FILE_NAMES), value.encode(*AS_FILE_NAMES))
        for name, value in environment.items()
        if _worn.get(name) != value
    ]
    return gone, changed, environment.get("TZ") != _worn.get("TZ")


def _wear(change: Change) -> None:
    """Changes what differs, for C and for Python; `os.environ` itself takes several calls for each name."""
    gone, changed, is_elsewhere = change
    for name in gone:
        _unsetenv(name)
        del _told[name]
    for name, value in changed:
        _putenv(name, value)
        _told[name] = value
    if is_elsewhere:
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
        _write(2, (f"gpulayer: {text}\n").encode("utf-8", "replace"))
    if pipes.get("report") is not None:
        with contextlib.suppress(OSError):
            report.send(pipes["report"], {"ok": False, "type": kind, "module": "gpulayer", "message": text})
    sys.stderr.flush()
    return NOT_EXECUTABLE
