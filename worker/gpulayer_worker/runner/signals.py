"""Signals between a fork and a job: held back while it has the fork server's handlers, then as a new process has them.

The functions of `signal` turn numbers into members of enums, at each call, and for masks 64 of them. Right after a
fork, where each page that is touched is copied, that took a tenth of a tiny job: here the functions are used that
`signal` itself wraps.
"""

from __future__ import annotations

import importlib
import signal
from typing import Any

try:
    _raw: Any = importlib.import_module("_signal")
except ImportError:  # another Python may have them elsewhere
    _raw = signal

_EVERY = tuple(int(number) for number in signal.valid_signals())
_IGNORED = int(signal.SIG_IGN)
_BLOCK, _UNBLOCK = int(signal.SIG_BLOCK), int(signal.SIG_UNBLOCK)
# Those of which the fork server wants to hear.
_CAUGHT = (int(signal.SIGCHLD), int(signal.SIGTERM), int(signal.SIGUSR1))
# Ignored by each Python from its start, for itself.
_PYTHON_IGNORES = (int(signal.SIGPIPE), int(signal.SIGXFSZ))


def hold() -> None:
    """From now on every signal waits, as far as signals can."""
    _raw.pthread_sigmask(_BLOCK, _EVERY)


def let_go() -> None:
    """Those that waited come now."""
    _raw.pthread_sigmask(_UNBLOCK, _EVERY)


def begin_anew(is_command: bool) -> None:
    """What a process that has just been started does at each signal; a command is none of Python's."""
    _raw.set_wakeup_fd(-1)
    # A worker that a script or nohup started may ignore some: its jobs do not inherit that.
    for number in _EVERY:
        if number in _CAUGHT or (_raw.getsignal(number) == _IGNORED and _may_be_taken(number, is_command)):
            _raw.signal(number, _raw.SIG_DFL)
    _raw.signal(signal.SIGINT, _raw.SIG_DFL if is_command else _raw.default_int_handler)


def _may_be_taken(number: int, is_command: bool) -> bool:
    return is_command or number not in _PYTHON_IGNORES
