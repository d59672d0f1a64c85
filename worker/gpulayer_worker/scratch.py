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
from pathlib import Path

from gpulayer_worker.removing import remove_tree

SPARES = 16
# A socket's path has 107 bytes, and programs make theirs some levels below their folder for temporary files.
TEMPORARY_PATH_BYTES = 60
HAS_ATTRIBUTES = hasattr(os, "listxattr")


@dataclass(frozen=True)
class Scratch:
    """The folders of one attempt, as text: to make a path of each takes longer than to give them to a job."""

    root: str

    @property
    def work(self) -> str:
        return f"{self.root}/work"

    @property
    def outputs(self) -> str:
        return f"{self.root}/work/outputs"

    @property
    def home(self) -> str:
        return f"{self.root}/home"

    @property
    def temporary(self) -> str:
        return f"{self.root}/tmp"

    @property
    def name(self) -> str:
        return os.path.basename(self.root)

    def file(self, name: str) -> str:
        return f"{self.root}/{name}"


class Scratches:
    """The scratch folders of one worker, below `base`; threads may share it. `links` is for short names of some."""

    def __init__(self, base: Path, links: Path) -> None:
        self.base = str(base)
        self._links = links
        self._linked: set[str] = set()
        self._spare = str(base.with_name("spare"))
        self._numbers = iter(range(1 << 62))
        self._spares: deque[str] = deque()
        # Mode and owner of each folder.
        self._as_made: dict[str, tuple[int, int]] = {}
        remove_tree(self._spare)
        remove_tree(self._links)

    def make(self, job_id: str, attempt: int) -> Scratch:
        """New and empty: what a former attempt of the same number left is removed first."""
        # A chunk's id holds a slash.
        scratch = Scratch(f"{self.base}/{job_id.replace('/', '-')}.{attempt}")
        if not self._recycled(scratch.root):
            if os.path.lexists(scratch.root):
                remove_tree(scratch.root)
            self._make(scratch)
        return scratch

    def make_temporary(self, scratch: Scratch) -> str:
        """The folder for temporary files, by a name that is short enough for sockets in it."""
        os.mkdir(scratch.temporary, mode=0o700)
        if len(os.fsencode(scratch.temporary)) <= TEMPORARY_PATH_BYTES:
            return scratch.temporary
        self._links.mkdir(mode=0o700, parents=True, exist_ok=True)
        link = f"{self._links}/{scratch.name}"
        os.symlink(scratch.temporary, link)
        self._linked.add(scratch.root)
        return link

    def give_back(self, scratch: Scratch) -> None:
        """Takes the folder away; nothing of its job may be left when this is called."""
        if scratch.root in self._linked:
            self._linked.discard(scratch.root)
            with suppress(OSError):
                os.unlink(self._links / scratch.name)
        if len(self._spares) < SPARES:
            with suppress(OSError):
                if self._emptied(scratch):
                    self._keep(scratch.root)
                    return
        remove_tree(scratch.root)

    def _recycled(self, root: str) -> bool:
        """Whether another's folder serves; not where something of that name is there, unless it is an empty folder."""
        try:
            spare = self._spares.popleft()
        except IndexError:
            return False
        try:
            os.rename(spare, root)
        except OSError:
            remove_tree(spare)
            return False
        return True

    def _make(self, scratch: Scratch) -> None:
        os.makedirs(scratch.root, mode=0o700)
        for folder in (scratch.work, scratch.outputs, scratch.home):
            os.mkdir(folder)
        if not self._as_made:
            self._as_made = {folder: _mode_and_owner(folder_in(scratch, folder)) for folder in FOLDERS}

    def _keep(self, root: str) -> None:
        spare = f"{self._spare}/{next(self._numbers)}"
        try:
            os.rename(root, spare)
        except FileNotFoundError:
            os.makedirs(self._spare, mode=0o700, exist_ok=True)
            os.rename(root, spare)
        self._spares.append(spare)

    def _emptied(self, scratch: Scratch) -> bool:
        """Whether the folders are as they were given, once the files beside them are removed."""
        for folder, inside in FOLDERS.items():
            path = folder_in(scratch, folder)
            if _mode_and_owner(path) != self._as_made.get(folder) or _is_marked(path):
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
    return f"{scratch.root}/{name}" if name else scratch.root


def _mode_and_owner(path: str) -> tuple[int, int]:
    facts = os.lstat(path)
    return facts.st_mode, facts.st_uid


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
    return HAS_ATTRIBUTES and bool(os.listxattr(path, follow_symlinks=False))
