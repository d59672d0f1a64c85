"""What Python's own modules do at every fork: left out where the fork server forks, in place again in its jobs.

`threading` and `logging` make their locks anew in each child. The fork server has one thread, which holds none of
these locks while it forks: nothing is to be mended in its children. Mending took a fifth of a tiny job all the same,
as it touches many pages, each of which is then copied. What other modules ask for, such as new random numbers, is done.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

LEFT_OUT = {"threading", "logging"}

_left_out: list[dict[str, Any]] = []


@contextlib.contextmanager
def leaving_out() -> Iterator[None]:
    """What these modules ask for at forks, if they are imported in here, is kept for the jobs."""
    own = getattr(os, "register_at_fork", None)
    if own is None:
        yield
        return

    def register(**actions: Any) -> None:
        if {getattr(action, "__module__", None) for action in actions.values()} <= LEFT_OUT:
            _left_out.append(actions)
        else:
            own(**actions)

    os.register_at_fork = register
    try:
        yield
    finally:
        os.register_at_fork = own


def take_up() -> None:
    """In a job's process: its own forks do everything."""
    for actions in _left_out:
        os.register_at_fork(**actions)
    threading = sys.modules.get("threading")
    if _left_out and threading is not None:
        # The one thing that differs here: the main thread's number in the system.
        getattr(threading.main_thread(), "_set_native_id", bool)()
