"""Entry point of the runner: `main.py serve FD [FOLDER...]` is a fork server, `main.py call SPEC FD` runs one function.

The folders go to the end of `sys.path`: they hold what a job needs where its Python lacks it.

It keeps its own folder off `sys.path`: a job that imports `report` or `server` means its own module, never
one of ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = "gpulayer_runner"


def load_package() -> None:
    """Makes this folder importable as the package `gpulayer_runner`, and under no other name."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != FOLDER]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(FOLDER, "__init__.py"), submodule_search_locations=[FOLDER]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the runner from {FOLDER}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)


def module(name: str) -> ModuleType:
    """One neighbour of this file, by name."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def main(argv: list[str]) -> int:
    """Runs what the command line names; the exit code of this process."""
    load_package()
    if len(argv) >= 3 and argv[1] == "serve":
        sys.path.extend(argv[3:])
        module("room").make(argv[3:])
        return int(module("server").serve(int(argv[2])))
    if len(argv) == 4 and argv[1] == "call":
        module("call").call_and_exit(argv[2], int(argv[3]))
    sys.stderr.write("usage: main.py serve FD [FOLDER...] | main.py call SPEC REPORT_FD\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv))
