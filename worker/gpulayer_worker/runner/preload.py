"""Imports frameworks in the fork server: only what is installed, never the user's own code.

Imported is not used: nothing here touches a GPU or starts a computation. A module that cannot be imported is
told and left to the job, whose own import then says why.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading

INSTALLED = ("stdlib", "platstdlib", "purelib", "platlib")


def load(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Imports the modules; those that are in, and why the others are not."""
    imported: list[str] = []
    failed: dict[str, str] = {}
    for name in names:
        try:
            if not is_installed(name):
                failed[name] = "not an installed top-level module"
                continue
            importlib.import_module(name)
            imported.append(name)
        except BaseException as error:  # noqa: BLE001 - a broken package is the job's to meet
            failed[name] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    return imported, failed


def is_installed(name: str) -> bool:
    """Whether the name is a top-level module of this Python's standard library or site-packages."""
    if name in sys.modules:
        return True
    if not name.isidentifier():
        return False
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    origin = os.path.realpath(spec.origin)
    roots = {os.path.realpath(sysconfig.get_path(kind)) for kind in INSTALLED} | set(sys.argv[3:])
    return any(origin.startswith(root + os.sep) for root in roots)


def foreign_threads() -> list[str]:
    """Names of Python threads that an import has started: a fork beside them is not safe."""
    return [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
