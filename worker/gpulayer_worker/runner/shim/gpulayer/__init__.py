"""Stands in for `gpulayer` inside a job whose Python does not have it, and gives way to the real package.

It serves what a job's own code calls: `remote` as a pass-through, `progress`, `current_job`, `Runtime`.
Submitting further jobs needs the real package, and says so.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["Runtime", "current_job", "progress", "remote"]

_NEEDS_THE_PACKAGE = (
    "only a stand-in for gpulayer is here: to submit jobs from a job, install gpulayer in its Python"
)


def _give_way() -> bool:
    """Loads the real package in place of this one, if the path holds it."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    others = [entry for entry in sys.path if os.path.abspath(entry) != here]
    spec = importlib.machinery.PathFinder.find_spec(__name__, others)
    if spec is None or spec.loader is None:
        return False
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)
    return True


class Runtime:
    """What the job was granted, read from its environment."""

    def __init__(self, environment: Any) -> None:
        self.job_id = environment.get("GPULAYER_JOB_ID", "")
        self.attempt = int(environment.get("GPULAYER_ATTEMPT") or 1)
        self.name = environment.get("GPULAYER_NAME", "")
        self.accelerator = environment.get("GPULAYER_ACCELERATOR", "cpu")
        self.gpus = int(environment.get("GPULAYER_GPUS") or 0)
        self.outputs = environment.get("GPULAYER_OUTPUTS", "outputs")
        self.scratch = environment.get("GPULAYER_SCRATCH", "")
        self.cache = environment.get("GPULAYER_CACHE", "")
        self.resume = environment.get("GPULAYER_RESUME", "")
        self.rank = int(environment.get("GPULAYER_RANK") or 0)
        self.world_size = int(environment.get("GPULAYER_WORLD_SIZE") or 1)
        self.nodes = int(environment.get("GPULAYER_NODES") or 1)
        self.node_rank = int(environment.get("GPULAYER_NODE_RANK") or 0)

    @property
    def id(self) -> str:
        """The job's id."""
        return str(self.job_id)

    @classmethod
    def current(cls) -> Runtime:
        """The runtime of this process."""
        return cls(os.environ)


def current_job() -> Runtime | None:
    """The job that this process runs for; None outside of one."""
    return Runtime.current() if os.environ.get("GPULAYER_JOB_ID") else None


def progress(done: float, total: float) -> None:
    """Tells how far the job is. Does nothing outside of a job, and never blocks it."""
    descriptor = os.environ.get("GPULAYER_PROGRESS_FD")
    if not descriptor:
        return
    line = json.dumps({"done": done, "total": total}) + "\n"
    try:
        os.write(int(descriptor), line.encode("ascii"))
    except OSError:
        # A full pipe: the worker is behind, and the next call tells more. A closed one: nobody listens.
        return


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError(_NEEDS_THE_PACKAGE)


def remote(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Hands back a function that calls through; it can be submitted only by the real package."""
    if function is None:
        return remote
    for verb in ("delay", "map", "starmap", "options"):
        setattr(function, verb, _refuse)
    return function


_give_way()
