"""Where a job lives while it runs: one folder an attempt, below the worker's scratch root, gone when the attempt is.

work/ is the job's current folder, work/outputs/ what comes back, home/ its HOME. What a job needs to read (a large
function's pickle) lies beside them, and tmp/ where it has a folder for temporary files of its own.

Making and removing folders is a good part of what a tiny job costs. Those that a job has left as it was given them,
with nothing in them, are given to another; all others are removed. A job cannot tell which kind it has.

Whatever is done to a folder moves the time of its last change, which nobody can set: one whose time is as it was need
not be looked into. File systems tell that time in steps, so it counts only where it was seen long before a job had the
folder.
"""

from __future__ import annotations

import os
import stat
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulayer_worker.removing import remove_tree

SPARES = 16
# Far more than a step of any file system's clock.
SETTLED_S = 2.0
# The time of a last change may be told in steps of some milliseconds.
TRY_S = 0.05
# A socket's path has 107 bytes, and programs make theirs some levels below their folder for temporary files.
TEMPORARY_PATH_BYTES = 60
HAS_ATTRIBUTES = hasattr(os, "listxattr")


# Device, number and time of the last change of a folder.
Mark = tuple[int, int, int]


@dataclass(frozen=True)
class Seen:
    """Folders that were found empty: which they were, with the times of their last changes, and the moment."""

    marks: tuple[Mark, ...]
    at_s: float


@dataclass(frozen=True)
class Scratch:
    """The folders of one attempt, as text: to make a path of each takes longer than to give them to a job.

    `seen` tells what those below it were when they were last looked into, and when that was; `own` which folders they
    are, by device and number.
    """

    root: str
    seen: Seen | None = None
    own: tuple[tuple[int, int], ...] = ()

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

    def __init__(self, base: Path, links: Path, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.base = str(base)
        self._clock_s = clock_s
        self._links = links
        self._linked: set[str] = set()
        self._spare = str(base.with_name("spare"))
        self._numbers = iter(range(1 << 62))
        self._spares: deque[Scratch] = deque()
        # Mode and owner of each folder.
        self._as_made: dict[str, tuple[int, int]] = {}
        self._tells_changes = False
        remove_tree(self._spare)
        remove_tree(self._links)

    def make(self, job_id: str, attempt: int) -> Scratch:
        """New and empty: what a former attempt of the same number left is removed first."""
        # A chunk's id holds a slash.
        root = f"{self.base}/{job_id.replace('/', '-')}.{attempt}"
        return self._recycled(root) or self._made(root)

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
                if seen := self._emptied(scratch):
                    self._keep(scratch.root, seen, scratch.own)
                    return
        remove_tree(scratch.root)

    def _recycled(self, root: str) -> Scratch | None:
        """Another's folder, if one serves; none does where something of that name is there, but for an empty folder."""
        try:
            spare = self._spares.popleft()
        except IndexError:
            return None
        try:
            os.rename(spare.root, root)
        except OSError:
            remove_tree(spare.root)
            return None
        is_settled = spare.seen is not None and self._clock_s() - spare.seen.at_s > SETTLED_S
        return Scratch(root, spare.seen if is_settled and self._tells_changes else None, spare.own)

    def _made(self, root: str) -> Scratch:
        scratch = Scratch(root)
        if os.path.lexists(root):
            remove_tree(root)
        os.makedirs(root, mode=0o700)
        for folder in (scratch.work, scratch.outputs, scratch.home):
            os.mkdir(folder)
        facts = {folder: os.lstat(folder_in(scratch, folder)) for folder in FOLDERS}
        if not self._as_made:
            self._as_made = {folder: (fact.st_mode, fact.st_uid) for folder, fact in facts.items()}
            self._tells_changes = _tells_changes(scratch.home)
        return Scratch(root, own=tuple(_identity(facts[folder]) for folder in BELOW))

    def _keep(self, root: str, seen: Seen, own: tuple[tuple[int, int], ...]) -> None:
        spare = f"{self._spare}/{next(self._numbers)}"
        try:
            os.rename(root, spare)
        except FileNotFoundError:
            os.makedirs(self._spare, mode=0o700, exist_ok=True)
            os.rename(root, spare)
        self._spares.append(Scratch(spare, seen, own))

    def _emptied(self, scratch: Scratch) -> Seen | None:
        """When the folders were last seen to be as they were given, once the files beside them are removed."""
        if not self._is_as_made(scratch, "", os.lstat(scratch.root)):
            return None
        below = {folder: os.lstat(folder_in(scratch, folder)) for folder in BELOW}
        # What is mounted over a folder is another one.
        if tuple(map(_identity, below.values())) != scratch.own:
            return None
        marks = tuple((facts.st_dev, facts.st_ino, facts.st_ctime_ns) for facts in below.values())
        if scratch.seen is not None and scratch.seen.marks == marks:
            return scratch.seen
        are_as_made = all(self._is_as_made(scratch, folder, facts) for folder, facts in below.items())
        return Seen(marks, self._clock_s()) if are_as_made else None

    def _is_as_made(self, scratch: Scratch, folder: str, facts: os.stat_result) -> bool:
        path = folder_in(scratch, folder)
        if (facts.st_mode, facts.st_uid) != self._as_made.get(folder) or _is_marked(path):
            return False
        beside = set(os.listdir(path)) - FOLDERS[folder]
        return not beside or (folder == "" and _unlinked(path, beside))


# Every folder below a scratch folder, and what is in it when it is given to a job.
FOLDERS: dict[str, set[str]] = {
    "work/outputs": set(),
    "work": {"outputs"},
    "home": set(),
    "": {"work", "home"},
}
BELOW = tuple(folder for folder in FOLDERS if folder)


def folder_in(scratch: Scratch, name: str) -> str:
    return f"{scratch.root}/{name}" if name else scratch.root


def _identity(facts: os.stat_result) -> tuple[int, int]:
    return facts.st_dev, facts.st_ino


def _tells_changes(folder: str) -> bool:
    """Whether a file that comes and goes moves the time of the folder's last change, as on nearly every disk."""
    before_ns, until_s = os.lstat(folder).st_ctime_ns, time.monotonic() + TRY_S
    while time.monotonic() < until_s:
        os.close(os.open(f"{folder}/try", os.O_CREAT | os.O_WRONLY, 0o600))
        os.unlink(f"{folder}/try")
        if os.lstat(folder).st_ctime_ns != before_ns:
            return True
    return False


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
