"""Where a job lives while it runs: one folder an attempt, below the worker's scratch root, gone when the attempt is.

work/ is the job's current folder, work/outputs/ what comes back, home/ its HOME. What a job needs to read (a large
function's pickle) lies beside them, and tmp/ where it has a folder for temporary files of its own.

Making and removing folders is a good part of what a tiny job costs. Those that a job has left as it was given them,
with nothing in them, are given to another; all others are removed. A job cannot tell which kind it has.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpulayer_worker.removing import remove_tree

SPARES = 16
# A socket's path has 107 bytes, and programs make theirs some levels below their folder for temporary files.
TEMPORARY_PATH_BYTES = 60


@dataclass(frozen=True)
class Scratch:
    """The folders of one attempt."""

    root: Path

    @cached_property
    def work(self) -> Path:
        return self.root / "work"

    @cached_property
    def outputs(self) -> Path:
        return self.work / "outputs"

    @cached_property
    def home(self) -> Path:
        return self.root / "home"

    @cached_property
    def temporary(self) -> Path:
        return self.root / "tmp"

    def file(self, name: str) -> Path:
        return self.root / name


class Scratches:
    """The scratch folders of one worker, below `base`; threads may share it. `links` is for short names of some."""

    def __init__(self, base: Path, links: Path) -> None:
        self.base = base
        self._links = links
        self._linked: set[str] = set()
        self._spare = base.with_name("spare")
        self._numbers = iter(range(1 << 62))
        self._spares: deque[str] = deque()
        self._modes: dict[str, int] = {}
        remove_tree(self._spare)
        remove_tree(self._links)

    def make(self, job_id: str, attempt: int) -> Scratch:
        """New and empty: what a former attempt of the same number left is removed first."""
        # A chunk's id holds a slash.
        scratch = Scratch(self.base / f"{job_id.replace('/', '-')}.{attempt}")
        if os.path.lexists(scratch.root):
            remove_tree(scratch.root)
        if not self._recycled(scratch.root):
            self._make(scratch)
        return scratch

    def make_temporary(self, scratch: Scratch) -> str:
        """The folder for temporary files, by a name that is short enough for sockets in it."""
        scratch.temporary.mkdir(mode=0o700)
        if len(os.fsencode(scratch.temporary)) <= TEMPORARY_PATH_BYTES:
            return str(scratch.temporary)
        self._links.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = scratch.root.name
        os.symlink(scratch.temporary, self._links / name)
        self._linked.add(name)
        return str(self._links / name)

    def give_back(self, scratch: Scratch) -> None:
        """Takes the folder away; nothing of its job may be left when this is called."""
        if scratch.root.name in self._linked:
            self._linked.discard(scratch.root.name)
            with suppress(OSError):
                os.unlink(self._links / scratch.root.name)
        if len(self._spares) < SPARES:
            with suppress(OSError):
                if self._emptied(scratch):
                    self._keep(scratch.root)
                    return
        remove_tree(scratch.root)

    def _recycled(self, root: Path) -> bool:
        with suppress(IndexError, OSError):
            os.rename(self._spares.popleft(), root)
            return True
        return False

    def _make(self, scratch: Scratch) -> None:
        scratch.root.mkdir(mode=0o700, parents=True)
        for folder in (scratch.work, scratch.outputs, scratch.home):
            folder.mkdir()
        if not self._modes:
            self._modes = {folder: os.lstat(folder_in(scratch, folder)).st_mode for folder in FOLDERS}

    def _keep(self, root: Path) -> None:
        spare = f"{self._spare}/{next(self._numbers)}"
        try:
            os.rename(root, spare)
        except FileNotFoundError:
            self._spare.mkdir(mode=0o700, exist_ok=True)
            os.rename(root, spare)
        self._spares.append(spare)

    def _emptied(self, scratch: Scratch) -> bool:
        """Whether the folders are as they were given, once the files beside them are removed."""
        for folder, inside in FOLDERS.items():
            path = folder_in(scratch, folder)
            facts = os.lstat(path)
            if facts.st_mode != self._modes.get(folder) or facts.st_uid != os.geteuid() or _is_marked(path):
                return False
            beside = set(os.listdir(path)) - inside
            if beside and not (folder == "" and _unlinked(path, beside)):
                return False
        return True


# Every folder below a scratch folder, and what is in it when it is given to a job.
FOLDERS: dict[str, set[str]] = {
    "work/outputs": set(),
    "work": {"outputs"},
    "home": set(),
    "": {"work", "home"},
}


def folder_in(scratch: Scratch, name: str) -> str:
    return f"{scratch.root}/{name}" if name else str(scratch.root)


def _unlinked(folder: str, names: set[str]) -> bool:
    """Removes these files; False where one of them is none."""
    for name in names:
        path = f"{folder}/{name}"
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        os.unlink(path)
    return True


def _is_marked(path: str) -> bool:
    """Whether a folder has attributes beyond its mode, such as an access list."""
    return hasattr(os, "listxattr") and bool(os.listxattr(path, follow_symlinks=False))
