"""Which modules travel with a function, because no worker could import them.

A module whose file lies under the current folder or the script's, and in no site-packages and not in Python's own
library, is the user's project: what a function uses of it is pickled by value. Everything else is imported by the
worker, which must have it. `__main__` and what notebooks define travel by value anyhow.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import ModuleType

OWN_PACKAGES = ("gpulayer", "gpulayer_broker", "gpulayer_worker")
INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")

_lock = threading.RLock()
_added: list[ModuleType] = []
_judged: dict[str, tuple[int, tuple[str, ...], bool]] = {}
_found: list[ModuleType] = []
_found_for: tuple[str, str, int] | None = None


@contextmanager
def local_modules_by_value() -> Iterator[None]:
    """Within it, cloudpickle takes the project's modules by value; other users of cloudpickle are left as they were."""
    import cloudpickle

    with _lock:
        before = set(cloudpickle.list_registry_pickle_by_value())
        outer = len(_added)
        try:
            for module in [module for module in _local_modules() if module.__name__ not in before]:
                cloudpickle.register_pickle_by_value(module)
                _added.append(module)
            yield
        finally:
            _take_back(outer)


def _take_back(upto: int) -> None:
    import cloudpickle

    while len(_added) > upto:
        cloudpickle.unregister_pickle_by_value(_added.pop())


def _after_fork() -> None:
    """Another thread may have been in the middle of it, which the child does not have."""
    global _lock
    _lock = threading.RLock()
    if _added:
        _take_back(0)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def circumstances() -> tuple[object, ...]:
    """What decides besides a module itself whether it travels by value: all is as before where this is equal."""
    import cloudpickle

    return os.getcwd(), _main_file(), len(sys.modules), cloudpickle.list_registry_pickle_by_value()


def is_local(name: str) -> bool:
    """Whether the module of this name, already imported, is the project's."""
    module = sys.modules.get(name)
    return name == "__main__" or (module is not None and _judge(name, module, _roots()))


def is_registered(name: str) -> bool:
    """Whether the user has told cloudpickle to take the module, or a package around it, by value."""
    import cloudpickle

    registered = cloudpickle.list_registry_pickle_by_value()
    return any(name == each or name.startswith(f"{each}.") for each in registered)


def is_installed(module_name: str) -> bool:
    """Whether a top-level module comes from a site-packages folder."""
    module = sys.modules.get(module_name)
    return any(part in f"{_file_of(module)}{os.sep}" for part in INSTALLED) if module else False


def _local_modules() -> list[ModuleType]:
    """The project's modules among the imported ones; looked for again when one was imported or the folder changed."""
    global _found_for, _found
    state = (os.getcwd(), _main_file(), len(sys.modules))
    if state != _found_for or any(sys.modules.get(module.__name__) is not module for module in _found):
        roots = _roots()
        _found = [
            module
            for name, module in list(sys.modules.items())
            if name != "__main__" and isinstance(module, ModuleType) and _judge(name, module, roots)
        ]
        _found_for = state
    return _found


def _judge(name: str, module: ModuleType, roots: tuple[str, ...]) -> bool:
    """As `_is_local`, remembered for each module and folder."""
    judged = _judged.get(name)
    if judged is None or judged[:2] != (id(module), roots):
        judged = _judged[name] = (id(module), roots, _is_local(name, module, roots))
    return judged[2]


def _is_local(name: str, module: ModuleType, roots: tuple[str, ...]) -> bool:
    if name.partition(".")[0] in OWN_PACKAGES or getattr(module, "__name__", None) != name:
        return False
    file = _file_of(module)
    if not file or any(part in file for part in INSTALLED) or file.startswith(_library()):
        return False
    return any(file.startswith(root) for root in roots)


def _file_of(module: ModuleType | None) -> str:
    file = getattr(module, "__file__", None)
    if isinstance(file, str):
        return _real(file, os.getcwd())
    folders = list(getattr(module, "__path__", ()))
    return os.path.realpath(folders[0]) + os.sep if folders and isinstance(folders[0], str) else ""


@cache
def _library() -> tuple[str, ...]:
    """The folders of Python's own library, which stay where they are while it runs."""
    paths = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return tuple(os.path.realpath(path) + os.sep for path in paths if path)


@lru_cache(maxsize=4096)
def _real(file: str, _here: str) -> str:
    """Where a file lies, seen from a folder; asked for with every call of a function, and answered by the disk once."""
    return os.path.realpath(file)


def _roots() -> tuple[str, ...]:
    """The current folder and the script's, with a separator at their ends; never the root folder."""
    return _roots_of(os.getcwd(), _main_file())


@lru_cache(maxsize=16)
def _roots_of(here: str, script: str) -> tuple[str, ...]:
    folders = {here, os.path.dirname(os.path.abspath(script))} if script else {here}
    real = {os.path.realpath(folder) for folder in folders}
    return tuple(sorted(folder + os.sep for folder in real if folder != os.sep))


def _main_file() -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return file if isinstance(file, str) else ""
