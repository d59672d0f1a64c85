"""What Python's own modules do at every fork and at the end: left out where it has nothing to do, done where it has.

`threading` and `logging` make their locks anew in each child. The fork server has one thread, which holds none of
these locks while it forks: nothing is to be mended in its children. Mending took a fifth of a tiny job all the same,
as it touches many pages, each of which is then copied. What other modules ask for, such as new random numbers, is
done; and the forks of a job's own process do everything.

In the same way nobody waits for threads where there are none, nor flushes log handlers where none was made.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

LEFT_OUT = {"threading", "logging"}

_is_job = False
_renumber: Callable[[], object] = bool


@contextlib.contextmanager
def leaving_out() -> Iterator[None]:
    """What these modules ask for at forks, if they are imported in here, is done in jobs alone."""
    own = getattr(os, "register_at_fork", None)
    if own is None:
        yield
        return

    def register(**actions: Callable[[], Any]) -> None:
        if {getattr(action, "__module__", None) for action in actions.values()} <= LEFT_OUT:
            actions = {moment: _only_in_jobs(action) for moment, action in actions.items()}
        own(**actions)

    os.register_at_fork = register  # type: ignore[assignment]
    try:
        yield
    finally:
        os.register_at_fork = own


def _only_in_jobs(action: Callable[[], Any]) -> Callable[[], None]:
    def act() -> None:
        if _is_job:
            action()

    return act


def take_up() -> None:
    """This process is a job's."""
    global _is_job
    _is_job = True
    _renumber()


def note_threading() -> None:
    """Called by the fork server: what differs in a job is the main thread's number in the system."""
    global _renumber
    threading = sys.modules.get("threading")
    if threading is not None:
        _renumber = getattr(threading.main_thread(), "_set_native_id", bool)


def leave_logging_to_jobs() -> None:
    """Called by the fork server: `end_logging` takes the place of the exit handler that logging has set."""
    logging = sys.modules.get("logging")
    if logging is not None:
        atexit.unregister(logging.shutdown)


def end_logging() -> None:
    """What logging does at an exit, where there are more handlers than the one of last resort, which keeps nothing."""
    logging = sys.modules.get("logging")
    if logging is not None and len(getattr(logging, "_handlerList", ())) != 1:
        logging.shutdown()


def has_threads() -> bool:
    """Whether there is anything to wait for at the end: threads, or what was to be done before they are joined."""
    threading = sys.modules.get("threading")
    if threading is None:
        return False
    return threading.active_count() > 1 or bool(getattr(threading, "_threading_atexits", True))
