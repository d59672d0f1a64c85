"""Imports frameworks in the fork server: only what is installed, never the user's own code.

Imported is not used: nothing here touches a GPU or starts a computation. A module that cannot be imported is
told and left to the job, whose own import then says why.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import threading

# What a CUDA or ROCm runtime opens when it begins; it cannot be used in a fork of the process that began it.
GPU_FILES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/renderD")
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
    settle()
    return imported, failed


def settle() -> None:
    """What is there now stays: the collector of a job's process is not to touch, and so to copy, all of it."""
    gc.collect()
    if hasattr(gc, "freeze"):  # CPython alone keeps what it collects beside the objects
        gc.freeze()


def bring_cloudpickle(folders: list[str]) -> None:
    """Imports cloudpickle: this Python's own, or the brought one where that is missing or older.

    An older cloudpickle cannot read what a newer one has written.
    """
    own = _own_version()
    for folder in folders:
        brought = _version_in(os.path.join(folder, "cloudpickle", "__init__.py"))
        if brought > own:
            for name in [name for name in sys.modules if name.partition(".")[0] == "cloudpickle"]:
                del sys.modules[name]
            sys.path.insert(0, folder)
            try:
                importlib.import_module("cloudpickle")
            finally:
                sys.path.remove(folder)
            return


def _own_version() -> tuple[int, ...]:
    try:
        return _numbers(str(importlib.import_module("cloudpickle").__version__))
    except Exception:  # noqa: BLE001 - a broken copy is as good as none
        return ()


def _version_in(path: str) -> tuple[int, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            found = re.search(r"""__version__ = ["']([^"']+)""", file.read())
    except OSError:
        return ()
    return _numbers(found.group(1)) if found else ()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


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


def open_gpus() -> list[str]:
    """Device files of GPUs that an import has opened: what was begun with a GPU does not survive a fork."""
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return []
    return sorted({path for path in map(_path_of, numbers) if path.startswith(GPU_FILES)})


def _path_of(number: str) -> str:
    try:
        return os.readlink("/proc/self/fd/" + number)
    except OSError:
        return ""  # the one that listed the folder
