"""`make demo` on a fresh clone: in an awkward place, twice at once, with nothing left."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support import end_process

ROOT = Path(__file__).resolve().parents[2]
INSTALL_S = 600


@pytest.fixture
def clone() -> Iterator[Path]:
    """This checkout's files as they are, in a folder whose path has a space and more than 150 characters."""
    if shutil.which("git") is None or shutil.which("make") is None:
        pytest.skip("git or make is missing")
    base = Path(tempfile.mkdtemp(prefix="gpl-demo-", dir="/tmp"))
    place = base / ("a place " + "x" * 80) / ("y" * 60)
    place.mkdir(parents=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            target = place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    yield place
    shutil.rmtree(base, ignore_errors=True)


@pytest.mark.timeout(2 * INSTALL_S)
def test_the_demo_runs_twice_at_once_in_a_place_with_a_space_and_a_long_path(clone: Path) -> None:
    assert len(str(clone)) > 150
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GPULAYER_", "VIRTUAL_ENV"))
    }

    with ExitStack() as ends:
        demos = []
        for _ in range(2):
            demos.append(
                subprocess.Popen(
                    ["make", "demo"],
                    cwd=clone,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            ends.callback(end_process, demos[-1])
        outputs = [demo.communicate(timeout=INSTALL_S)[0] for demo in demos]

    for demo, output in zip(demos, outputs, strict=True):
        assert demo.returncode == 0, output
        assert "demo: all as expected" in output
        assert output.count("ok: state of") == 2
