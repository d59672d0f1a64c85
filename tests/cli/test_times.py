"""What a start costs, in what it imports: seconds would say more of the machine than of the code.

Benchmarks measure the seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

HEAVY = {"dramatiq", "cloudpickle", "numpy", "torch", "rich", "psutil"}
# Python's own start has 30 or so of these.
IMPORT_MODULES = 90
SUBMIT_MODULES = 600


def modules_after(code: str, *arguments: str) -> set[str]:
    """What a Python of its own has imported when that code has run."""
    told = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    ended = subprocess.run(
        [sys.executable, "-c", told, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ.copy(),
    )
    return set(json.loads(ended.stderr.splitlines()[-1]))


@pytest.mark.usefixtures("address")
def test_a_detached_submit_imports_nothing_that_it_does_not_need() -> None:
    found = modules_after(
        "import sys\nfrom gpulayer.cli import run\nassert run(sys.argv[1:]) == 0",
        *("submit", "--detach", "--no-ship", "--", "true"),
    )

    assert "redis" in found, "it went to the queue"
    assert not HEAVY & found
    assert len(found) < SUBMIT_MODULES


def test_importing_gpulayer_imports_little_beyond_python_itself() -> None:
    assert len(modules_after("import gpulayer")) < IMPORT_MODULES


def test_nothing_heavy_is_imported_with_the_package_or_the_command_line() -> None:
    assert not (HEAVY | {"redis"}) & modules_after("import gpulayer, gpulayer.cli.app")
