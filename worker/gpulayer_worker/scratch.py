"""Where a job lives while it runs: one folder an attempt, below the worker's scratch root, gone when the attempt is.

work/ is the job's current folder, work/outputs/ what comes back, home/ its HOME. What a job needs to read (a function's
pickle) lies beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpulayer_worker.removing import remove_tree


@dataclass(frozen=True)
class Scratch:
    """The folders of one attempt."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def outputs(self) -> Path:
        return self.work / "outputs"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def file(self, name: str) -> Path:
        return self.root / name


def make_scratch(base: Path, job_id: str, attempt: int) -> Scratch:
    """New and empty: what a former attempt of the same number left is removed first."""
    # A chunk's id holds a slash.
    scratch = Scratch(base / f"{job_id.replace('/', '-')}.{attempt}")
    if scratch.root.exists():
        remove_tree(scratch.root)
    scratch.root.mkdir(mode=0o700, parents=True)
    for folder in (scratch.work, scratch.outputs, scratch.home):
        folder.mkdir()
    return scratch
