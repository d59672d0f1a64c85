"""A control group for each job, where this system lets the worker make them.

A group bounds a job's memory and processes, ends it whole, and tells afterwards how much memory and time it took and
whether the kernel killed any of it for memory. Version 1 (memory, pids, cpuacct) is used where it bounds processes,
else version 2; what is missing is done without: `Groups.describe` says what there is. Where there is nothing at all,
jobs run without, and their trees are known by sessions, pipes and marks alone.

To make and to remove a group is a good part of what a tiny job costs, in the kernel too. One of version 1 that is as it
was made (empty, with no memory but a processor's small change, none of `_SETTINGS` touched, no fork refused and
nothing killed in it) serves another job, its peak of memory and its time begun anew; all others are removed.

All groups are below one folder in each hierarchy, named after the worker's own folder. Where it is, is written down
there, so that a worker that starts again finds what a killed one left, wherever it is started from.

On a pure version 2 system the worker moves itself into a leaf, because only a group without processes can hand
controllers down. That road is written from the kernel's documentation; version 1, and version 2 without controllers,
are tested.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from gpulayer_worker.runner import cgroups

from .cgroup_files import GroupFiles, Room, fields, number
from .cgroup_mounts import Mounts, read_mounts

log = logging.getLogger("gpulayer")

SPARES = 4
KEPT = 16
NO_LIMIT = -1
# What a processor has set aside for a group, in steps of 256 KiB, it gives back later; a job's files are more.
LEFT_BYTES = 1 << 20
REMOVE_PATIENCE_S = 5.0
LOOK_AGAIN_S = 0.01
RECORD = "cgroups.json"
WORKERS_LEAF = "worker"


@dataclass(frozen=True)
class GroupFacts:
    """What a group has used. `peak_bytes` counts, as the kernel does, also the files that the job had in memory."""

    peak_bytes: int | None = None
    cpu_s: float | None = None
    oom_kills: int = 0
    forks_refused: int = 0


class Group:
    """One job's group, and another's after it where `renew` says so."""

    def __init__(self, folders: Mapping[str, str], version_of_memory: int, room: Room) -> None:
        self._files = GroupFiles(dict(folders), room)
        self._memory_v2 = version_of_memory == 2
        self.limit_bytes = 0
        ordered = [folders[name] for name in ("unified", "pids", "memory", "cpuacct") if name in folders]
        # As the fork server takes them: the one that ends all at once first.
        self.folders = tuple(dict.fromkeys(ordered))
        # Version 2 has no peak of memory that every reader sees begin anew.
        self._is_renewable = "pids" in folders and "unified" not in folders and not self._memory_v2
        self._as_made = self._files.read(_SETTINGS) if self._is_renewable else []

    def limit(self, memory_bytes: int) -> None:
        """From now on the group has no more memory than that, swap included."""
        limit, with_swap = _V2_LIMITS if self._memory_v2 else _V1_LIMITS
        try:
            self._files.write(limit, memory_bytes)
        except FileNotFoundError:
            return  # nothing here bounds memory
        # Without swap accounting there is no second file, and no second limit either.
        with contextlib.suppress(OSError):
            self._files.write(with_swap, 0 if self._memory_v2 else memory_bytes)
        self.limit_bytes = memory_bytes

    def facts(self) -> GroupFacts:
        """What it has used so far."""
        peak, kills, refused, used_ns = self._files.read(_V2_FACTS if self._memory_v2 else _V1_FACTS)
        return GroupFacts(
            peak_bytes=number(peak),
            cpu_s=self._cpu_s(number(used_ns)),
            oom_kills=fields(kills).get("oom_kill", 0),
            forks_refused=fields(refused).get("max", 0),
        )

    def _cpu_s(self, used_ns: int | None) -> float | None:
        if used_ns is not None:
            return used_ns / 1e9
        [told] = self._files.read([("unified", "cpu.stat")])
        used_us = fields(told).get("usage_usec")
        return None if used_us is None else used_us / 1e6

    def renew(self) -> bool:
        """Makes it as good as new; False where it is not, and is to be removed.

        That it is empty, that the kernel had to refuse or to kill nothing in it, and that nobody has changed a setting
        of it, are all seen by its files: they tell the same as when it was made.
        """
        try:
            return self._is_renewable and self._renewed()
        except OSError:
            return False

    def _renewed(self) -> bool:
        if self.limit_bytes:
            for file in reversed(_V1_LIMITS):
                with contextlib.suppress(FileNotFoundError):
                    self._files.write(file, NO_LIMIT)
            self.limit_bytes = 0
        if self._files.read(_SETTINGS) != self._as_made or self._files.has_groups_below():
            return False
        for file in (_PEAK, _USED):
            with contextlib.suppress(FileNotFoundError):
                self._files.write(file, 0)
        # A peak that begins anew begins with what is there.
        [peak] = self._files.read([_PEAK])
        return (number(peak) or 0) <= LEFT_BYTES

    def remove(self) -> None:
        """Ends what is left in it and removes its folders; gives up, and says so, where the kernel keeps one."""
        self._files.close()
        for folder in self.folders:
            _remove(folder)

    def forget(self) -> None:
        """Its folders are somebody else's to remove."""
        self._files.close()


_PEAK, _USED, _REFUSED = (
    ("memory", "memory.max_usage_in_bytes"),
    ("cpuacct", "cpuacct.usage"),
    ("pids", "pids.events"),
)
_V1_KILLS = ("memory", "memory.oom_control")
_V1_LIMITS = (("memory", "memory.limit_in_bytes"), ("memory", "memory.memsw.limit_in_bytes"))
_V2_LIMITS = (("memory", "memory.max"), ("memory", "memory.swap.max"))
_V1_FACTS = (_PEAK, _V1_KILLS, _REFUSED, _USED)
_V2_FACTS = (("memory", "memory.peak"), ("memory", "memory.events"), _REFUSED, _USED)
# Of version 1: what tells a group that is as it was made.
_SETTINGS = (
    ("pids", "pids.current"),
    ("memory", cgroups.PROCESSES),
    ("cpuacct", cgroups.PROCESSES),
    ("pids", cgroups.MOST_PROCESSES),
    _REFUSED,
    *_V1_LIMITS,
    ("memory", "memory.soft_limit_in_bytes"),
    ("memory", "memory.swappiness"),
    _V1_KILLS,
)


class Groups:
    """The groups of one worker. `take` is quick: a few empty ones are kept ready by `refill`."""

    def __init__(self, roots: Mapping[str, Path], version_of_memory: int, most_processes: int) -> None:
        self._roots = dict(roots)
        self._version = version_of_memory
        self._most_processes = most_processes
        self._spares: deque[Group] = deque()
        self._room = Room()
        self._lock = threading.Lock()
        self._made = 0

    def describe(self) -> dict[str, object]:
        """What is used, for the worker's record."""
        return {"version": self._version, "uses": sorted(self._roots), "most_processes": self._most_processes}

    def take(self, memory_bytes: int = 0) -> Group | None:
        """A group for one job; None where there are none."""
        if not self._roots:
            return None
        with self._lock:
            group = self._spares.pop() if self._spares else None
        try:
            group = group or self._make()
            if memory_bytes:
                group.limit(memory_bytes)
            return group
        except OSError as error:
            log.warning("no control group for a job: %s", error)
            if group is not None:
                group.remove()
            return None

    def give_back(self, group: Group) -> None:
        """For a job's group when nothing of the job is left: it serves another, or is removed."""
        if self._roots and len(self._spares) < KEPT and group.renew():
            self._spares.append(group)
        else:
            group.remove()
            self.refill()

    def refill(self) -> None:
        """Makes spares; to be called by whoever has time."""
        with contextlib.suppress(OSError):
            while self._roots and len(self._spares) < SPARES:
                self._spares.append(self._make())

    def close(self) -> None:
        """Removes everything of this worker's."""
        while self._spares:
            self._spares.pop().forget()
        for root in dict.fromkeys(self._roots.values()):
            _clear_root(root)
        self._roots = {}

    def _make(self) -> Group:
        with self._lock:
            self._made += 1
            name = f"{os.getpid()}-{self._made}"
        folders = {kind: f"{root}/{name}" for kind, root in self._roots.items()}
        for folder in dict.fromkeys(folders.values()):
            os.mkdir(folder)
        if "pids" in folders:
            _put(f"{folders['pids']}/{cgroups.MOST_PROCESSES}", self._most_processes)
        return Group(folders, self._version, self._room)


def open_groups(home: Path, most_processes: int, mounts: Mounts | None = None) -> Groups:
    """The groups of the worker whose folder is `home`, after `clear_groups`."""
    mounts = mounts or read_mounts()
    name = f"gpulayer-{sha256(str(home.resolve()).encode()).hexdigest()[:12]}"
    roots: dict[str, Path] = {}
    version = 1
    # Where processor time is counted and shared out in one hierarchy, groups would change who gets how much.
    counts_alone = mounts.v1.get("cpuacct") != mounts.v1.get("cpu")
    for kind in ("memory", "pids", *(["cpuacct"] if counts_alone else [])):
        if kind in mounts.v1 and (root := _usable(mounts.v1[kind] / name)):
            roots[kind] = root
    # Beside version 1 it would add nothing but the wait of each job that enters it.
    if "pids" not in roots and mounts.unified and (root := _usable(mounts.unified / name)):
        roots["unified"] = root
        if "memory" not in roots:
            handed_down = _hand_down(root)
            version = 2 if "memory" in handed_down else 1
            roots.update(dict.fromkeys(handed_down, root))
    (home / RECORD).write_text(json.dumps(sorted({str(root) for root in roots.values()})))
    return Groups(roots, version, most_processes)


def clear_groups(home: Path) -> int:
    """KILLs whatever a killed worker of this folder left in its groups, and removes them; how many processes."""
    try:
        roots = [Path(root) for root in json.loads((home / RECORD).read_text())]
    except (OSError, ValueError, TypeError):
        return 0
    return sum(_clear_root(root) for root in roots if root.name.startswith("gpulayer-"))


def _clear_root(root: Path) -> int:
    killed = 0
    for folder in sorted(root.glob("*")) if root.is_dir() else []:
        if folder.is_dir():
            left = cgroups.members([str(folder)]) - {os.getpid()}
            killed += len(left)
            if os.getpid() in cgroups.members([str(folder)]):
                _leave(root)
            _remove(str(folder))
    with contextlib.suppress(OSError):
        root.rmdir()
    return killed


# --- making sure ---


def _usable(root: Path) -> Path | None:
    """The folder, if groups can be made and entered in it: tried, because permissions do not tell all."""
    probe = root / f"probe-{os.getpid()}"
    try:
        root.mkdir(exist_ok=True)
        probe.mkdir()
    except OSError:
        return None
    try:
        return root if os.access(probe / cgroups.PROCESSES, os.W_OK) else None
    finally:
        probe.rmdir()


def _hand_down(root: Path) -> tuple[str, ...]:
    """Controllers that groups below `root` have from now on (version 2)."""
    for attempt in (_no_move, _move_into_leaf):
        try:
            attempt(root)
            for folder in (root.parent, root):
                _put(f"{folder}/cgroup.subtree_control", "+memory +pids")
            return ("memory", "pids")
        except OSError:
            continue
    _leave(root)
    return ()


def _no_move(_: Path) -> None:
    """The parent may be the root of all, or hand down already."""


def _move_into_leaf(root: Path) -> None:
    leaf = root / WORKERS_LEAF
    leaf.mkdir(exist_ok=True)
    cgroups.enter([str(leaf)])


def _leave(root: Path) -> None:
    """Back to where the worker was started."""
    with contextlib.suppress(OSError):
        for folder in (root, root.parent):
            _put(f"{folder}/cgroup.subtree_control", "-memory -pids")
        cgroups.enter([str(root.parent)])
        (root / WORKERS_LEAF).rmdir()


# --- files ---


def _put(path: str, value: int | str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)


def _remove(folder: str) -> None:
    until_s = time.monotonic() + REMOVE_PATIENCE_S
    while not _removed(folder):
        if time.monotonic() > until_s:
            log.warning("control group %s cannot be removed", folder)
            return
        cgroups.kill([folder])
        time.sleep(LOOK_AGAIN_S)


def _removed(folder: str) -> bool:
    """Groups that the job made below it go first."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)
        return True
    try:
        for below, _, _ in os.walk(folder, topdown=False):
            os.rmdir(below)
        return True
    except FileNotFoundError:
        return True
    except OSError:
        return False
