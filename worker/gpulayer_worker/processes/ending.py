"""Ends what a dead fork server, or a dead worker, has left behind. Linux: it reads /proc.

A process is told by its session, by the variables that jobs carry in the environment of their exec, or, where
the worker is a subreaper, by having become its child. Each function returns when nothing that it looks for is
left, or its time is over.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection

from gpulayer_worker.runner import proctree
from gpulayer_worker.runner.jobs import MARK
from gpulayer_worker.runner.proctree import Status, become_subreaper, lease_clock_s

__all__ = ["become_subreaper", "clear_leftovers", "end_jobs", "lease_clock_s", "reap_strays"]

SCRATCH = "GPULAYER_SCRATCH"
PATIENCE_S = 10.0
LOOK_AGAIN_S = 0.005

Belongs = Callable[[int, Status], bool]


def end_jobs(sessions: Collection[int], identifiers: Collection[str], patience_s: float = PATIENCE_S) -> int:
    """KILLs every process of the given jobs, named by the sessions of their main processes and by their ids."""

    def belongs(pid: int, status: Status) -> bool:
        return status.session in sessions or proctree.environment_value(pid, MARK) in identifiers

    return _end_all(belongs, patience_s)


def reap_strays(keep: Collection[int] = (), patience_s: float = PATIENCE_S) -> int:
    """KILLs and reaps the orphans that this process, a subreaper, was given.

    Jobs live in sessions of their own, the worker's helpers in the worker's: a child in another session is an
    orphan of a job, unless its id is in `keep`.
    """
    own_session = os.getsid(0)

    def belongs(pid: int, status: Status) -> bool:
        return status.parent == os.getpid() and status.session != own_session and pid not in keep

    return _end_all(belongs, patience_s)


def clear_leftovers(scratch_root: str, patience_s: float = PATIENCE_S) -> int:
    """KILLs every job process whose scratch folder is below the given one, whoever started it."""
    root = os.path.join(scratch_root, "")

    def belongs(pid: int, _: Status) -> bool:
        return os.path.join(proctree.environment_value(pid, SCRATCH) or "", "").startswith(root)

    return _end_all(belongs, patience_s)


def _end_all(belongs: Belongs, patience_s: float) -> int:
    """Kills what matches until nothing does; the number of processes killed."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + patience_s
    while True:
        found = _matches(belongs)
        if not found or time.monotonic() > deadline_s:
            return len(killed)
        found = proctree.kill_tree(found)
        killed |= found
        for pid in found:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(LOOK_AGAIN_S)


def _matches(belongs: Belongs) -> set[int]:
    found = set()
    for pid in proctree.parents():
        status = proctree.status(pid)
        if status is None or pid == os.getpid():
            continue
        # A zombie that is somebody else's child is dead, and theirs to reap.
        if status.state == "Z" and status.parent != os.getpid():
            continue
        if belongs(pid, status):
            found.add(pid)
    return found
