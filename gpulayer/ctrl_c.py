"""What Ctrl-C does to the command line, from its first moment to its last.

While it loads and once it has ended, it leaves at once: there is nothing to be tidied up, and nothing to be said; and
where Python imports, KeyboardInterrupt may be swallowed, or printed. In between that is raised. Where somebody has
other plans for the signal (a shell that ignores it), it is left alone. Imports nothing but `signal`.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130

# The exit code with which it leaves at once; None where it raises.
_leaving: list[int | None] = [None]


def begin() -> None:
    """From now on Ctrl-C is heard here, and leaves at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        leave_at_once()
        signal.signal(signal.SIGINT, _heard)


def leave_at_once(exit_code: int = INTERRUPTED) -> None:
    """From now on Ctrl-C ends the process with this exit code."""
    _leaving[0] = exit_code


def raise_it() -> None:
    """From now on Ctrl-C is KeyboardInterrupt."""
    _leaving[0] = None


def _heard(number: int, frame: object) -> None:
    if (code := _leaving[0]) is not None:
        os._exit(code)
    raise KeyboardInterrupt
