"""Signals between a fork and a job: held back while it has the fork server's handlers, then as a new process has them.

The functions of `signal` turn numbers into members of enums, at each call and for all 64 of a mask. Right after a fork,
where each page that is touched is copied, that took a tenth of a tiny job: here the functions are used that `signal`
itself wraps, and no mask is longer than it has to be.
"""

from __future__ import annotations

import importlib
import signal
from typing import Any

try:
    _raw: Any = importlib.import_module("_signal")
except ImportError:  # another Python may have them elsewhere
    _raw = signal

# By names of their own: to look one up in its module would touch more pages than the call.
_set, _set_mask, _set_wakeup = _raw.signal, _raw.pthread_sigmask, _raw.set_wakeup_fd
_DEFAULT, _INTERRUPTS = _raw.SIG_DFL, _raw.default_int_handler

_IGNORED = int(signal.SIG_IGN)
_HOLD, _LET_GO, _SET = int(signal.SIG_BLOCK), int(signal.SIG_UNBLOCK), int(signal.SIG_SETMASK)
# Those of which the fork server wants to hear.
_CAUGHT = (int(signal.SIGCHLD), int(signal.SIGTERM), int(signal.SIGUSR1))
_INTERRUPT = int(signal.SIGINT)
# What is sent to a job, and what has a handler here: a job may meet any of these before it is one.
_HELD = (*_CAUGHT, _INTERRUPT, int(signal.SIGHUP), int(signal.SIGQUIT), int(signal.SIGUSR2))
# Ignored by each Python from its start, for itself.
_PYTHON_IGNORES = (int(signal.SIGPIPE), int(signal.SIGXFSZ))

# What this process was told to ignore by whoever started it.
_ignored: list[int] = []


def note_ignored() -> None:
    """Called by the fork server where it may ignore others than before."""
    every = (int(number) for number in signal.valid_signals())
    _ignored[:] = [
        number for number in every if number not in _PYTHON_IGNORES and _raw.getsignal(number) == _IGNORED
    ]


def hold() -> None:
    """From now on signals wait."""
    _set_mask(_HOLD, _HELD)


def let_go() -> None:
    """Those that waited come now."""
    _set_mask(_LET_GO, _HELD)


def begin_anew(is_command: bool) -> None:
    """What a process that has just been started does at each signal; a command is none of Python's."""
    _set_wakeup(-1)
    # A worker that a script or nohup started may ignore some: its jobs do not inherit that.
    for number in _CAUGHT:
        _set(number, _DEFAULT)
    for number in _ignored:
        _set(number, _DEFAULT)
    if not is_command:
        _set(_INTERRUPT, _INTERRUPTS)
        return
    for number in (*_PYTHON_IGNORES, _INTERRUPT):
        _set(number, _DEFAULT)


def open_all() -> None:
    """No signal is held back, whatever this process has inherited."""
    _set_mask(_SET, ())
