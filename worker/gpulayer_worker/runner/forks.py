"""What Python's own modules do at every fork and at the end: left out where it has nothing to do, done where it has.

`threading` and `logging` make their locks anew in each child. The fork server has one thread, which holds none of
these locks while it forks: nothing is to be mended in its children. Mending took a fifth of a tiny job all the same,
as it touches many pages, each of which is then copied. What other modules ask for, such as new random numbers, is
done; and the forks of a job's own process do everything.

In the same way nobody waits for threads where there are none, nor flushes log handlers where none was made.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

LEFT_OUT = {"threading", "logging"}
MOMENTS = ("before", "after_in_child", "after_in_parent")

# This interpreter's lists of actions, and what each has in a job. Found once: what is frozen is not found any more.
_lists: list[list[Any]] = []
_whole: list[tuple[list[Any], list[Any]]] = []
_renumber: Callable[[], object] = bool


def leave_out() -> None:
    """Called by the fork server whenever it has imported: what these modules ask for at forks is done in jobs alone."""
    if not _lists and hasattr(os, "register_at_fork"):
        _lists.extend(found for moment in MOMENTS for found in _lists_of(moment))
    _put_back()
    for actions in _lists:
        kept = [action for action in actions if getattr(action, "__module__", None) not in LEFT_OUT]
        if len(kept) < len(actions):
            _whole.append((actions, actions[:]))
            actions[:] = kept


def _lists_of(moment: str) -> list[list[Any]]:
    """The list of actions at one moment of a fork; none where an interpreter keeps them otherwise."""

    def mark() -> None:
        pass

    os.register_at_fork(**{moment: mark})
    found = [holder for holder in gc.get_referrers(mark) if type(holder) is list]
    for actions in found:
        actions.remove(mark)
    return found


def _put_back() -> None:
    for actions, whole in _whole:
        actions[:] = whole
    _whole.clear()


def take_up() -> None:
    """This process is a job's."""
    _put_back()
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
