"""The fork server's memory: the runner and what it makes lie close together, so that forks copy few pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpulayer_worker.runner

RUNNER = Path(gpulayer_worker.runner.__file__).parent
MADE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import main
main.load_package()
if sys.argv[2] == "with room":
    main.module("room").make([])
"""
PAGES = """
pieces = [(bytes(size), size) for _ in range(4) for size in range(100, 460, 40)]
print(json.dumps(len({id(piece) // 4096 for piece, _ in pieces})))
"""
NEW_MODULES = """
known = set(sys.modules)
main.module("server")
print(json.dumps(sorted(name for name in sys.modules if name not in known)))
"""


def told(script: str, room: str = "with room") -> Any:
    """What the script prints, as JSON, in a process that is on its way to a fork server."""
    command = [sys.executable, "-c", MADE + script, str(RUNNER), room]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_what_is_made_after_room_was_made_lies_in_fewer_pages() -> None:
    assert told(PAGES) < told(PAGES, "without")


def test_all_that_the_runner_imports_is_there_before_it() -> None:
    assert all(name.startswith("gpulayer_runner.") for name in told(NEW_MODULES))
