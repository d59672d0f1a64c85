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
import threading
from os import getpid as _getpid
from typing import Any

LEFT_OUT = {"threading", "logging"}
MOMENTS = ("before", "after_in_child", "after_in_parent")

# This interpreter's lists of actions, in the order of the moments, and what each has in a job with how many were
# kept. Found once: what is frozen is not found any more.
_lists: list[list[Any]] = []
_whole: list[tuple[list[Any], list[Any], int]] = []
_before: list[Any] = []
_lock = threading.Lock()
_server = 0
# What differs in a job is the main thread's number in the system.
_main_thread: dict[str, Any] = {}
_has_number = False
# As `threading` and `logging` keep them; where they do not, these say that there may be something.
_active: Any = ()
_starting: Any = ()
_at_exit: Any = True
_last_resort: object = None
_log_handlers: Any = ()


def leave_out() -> None:
    """Called by the fork server whenever it has imported: what these modules ask for at forks is done in jobs alone."""
    global _server
    _server = os.getpid()
    if not _lists and hasattr(os, "register_at_fork"):
        _lists.extend(found for moment in MOMENTS for found in _lists_of(moment))
    _put_back()
    if len(_lists) != len(MOMENTS):
        return
    for actions in _lists:
        whole = actions[:]
        actions[:] = [action for action in whole if getattr(action, "__module__", None) not in LEFT_OUT]
        if actions is _lists[0]:
            _before[:] = [action for action in whole if action not in actions]
            actions.append(_begin_own_fork)
        _whole.append((actions, whole, len(actions)))


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
    """Each list is whole, with what was added since at its end."""
    for actions, whole, kept in _whole:
        actions[:] = whole + actions[kept:]
    _whole.clear()


def _begin_own_fork() -> None:
    """The first action before any fork: a job that forks, which few do, has everything from here on."""
    if os.getpid() == _server:
        return
    with _lock:  # two threads of a job may fork at once
        _put_back()
    for action in reversed(_before):
        action()


def take_up() -> None:
    """This process is a job's."""
    if _has_number:
        _main_thread["_native_id"] = _getpid()


def note_threading() -> None:
    """Called by the fork server: what `take_up` and the end of a job look at is found once."""
    global _has_number, _main_thread, _active, _starting, _at_exit, _log_handlers, _last_resort
    _main_thread = vars(threading.main_thread())
    _has_number = "_native_id" in _main_thread
    _active, _starting = getattr(threading, "_active", ()), getattr(threading, "_limbo", ())
    _at_exit = getattr(threading, "_threading_atexits", True)
    logging = sys.modules.get("logging")
    _log_handlers = getattr(logging, "_handlerList", ())
    _last_resort = _the_one_of_last_resort(logging)


def leave_logging_to_jobs() -> None:
    """Called by the fork server: `end_logging` takes the place of the exit handler that logging has set."""
    logging = sys.modules.get("logging")
    if logging is not None:
        atexit.unregister(logging.shutdown)


def _the_one_of_last_resort(logging: Any) -> object:
    """What stands for the handler that keeps nothing in logging's list, where that is the only one; else None."""
    handlers: Any = getattr(logging, "_handlerList", ())
    return handlers[0] if len(handlers) == 1 and handlers[0]() is logging.lastResort else None


def end_logging() -> None:
    """What logging does at an exit, where there are other handlers than the one of last resort."""
    if len(_log_handlers) == 1 and _log_handlers[0] is _last_resort:
        return
    logging = sys.modules.get("logging")
    if logging is not None and _the_one_of_last_resort(logging) is None:
        logging.shutdown()


def has_threads() -> bool:
    """Whether there is anything to wait for at the end: threads, or what was to be done before they are joined."""
    return len(_active) != 1 or bool(_starting) or bool(_at_exit)
