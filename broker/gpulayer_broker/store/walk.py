"""Walking a folder by its handles, so that nothing that happens to it meanwhile leads the walk outside.

Every folder is opened below its parent's handle and never through a link; files are looked at, not opened.
The walk decides nothing: what cannot travel is found with a `problem`, and the caller refuses it or passes
over it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from gpulayer_broker.errors import BadSource
from gpulayer_broker.store.files import CHUNK_BYTES, FILE_FLAGS, FOLDER_FLAGS, opened, reason
from gpulayer_broker.store.ignore import GIT_FILE, OWN_FILE, IgnoreRules
from gpulayer_broker.store.tree import link_problem, path_problem

_SPECIAL_KINDS = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@dataclass(frozen=True, slots=True)
class Found:
    """One thing below the walked folder. A folder is found only if it is empty, or cannot be read."""

    path: str
    kind: Literal["file", "dir", "link", "special"]
    size_bytes: int = 0
    target: str = ""
    problem: str | None = None


def walk(root_fd: int, rules: IgnoreRules | None = None) -> Iterator[Found]:
    """All that is below an open folder, and not ignored, in no certain order."""
    yield from _walk_folder(root_fd, "", rules, False)


@contextmanager
def open_beneath(root_fd: int, path: str) -> Iterator[int]:
    """The file at `path` below an open folder, reached without following a link."""
    *folders, name = path.split("/")
    dir_fd = os.dup(root_fd)
    try:
        for folder in folders:
            below = os.open(folder, FOLDER_FLAGS, dir_fd=dir_fd)
            os.close(dir_fd)
            dir_fd = below
        with opened(name, FILE_FLAGS, dir_fd=dir_fd) as fd:
            yield fd
    finally:
        os.close(dir_fd)


def _walk_folder(fd: int, path: str, rules: IgnoreRules | None, within_excluded: bool) -> Iterator[Found]:
    """What is in one folder, then what is below it: one open descriptor a level."""
    if rules is not None and rules.reads_files:
        rules = rules.below(path, _text_of(fd, path, GIT_FILE), _text_of(fd, path, OWN_FILE))
    folders: list[tuple[str, bool]] = []
    empty = True
    with os.scandir(fd) as entries:
        for entry in entries:
            below = f"{path}/{entry.name}" if path else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            excluded = _excluded(rules, below, is_folder, within_excluded)
            if is_folder and (not excluded or (rules is not None and rules.reopens(below))):
                folders.append((below, excluded))
            elif not excluded and (found := _found(entry, below, fd)):
                empty = False
                yield found
    for below, excluded in folders:
        for found in _enter(fd, below, rules, excluded):
            empty = False
            yield found
    if empty and path and not within_excluded:
        yield Found(path, "dir", problem=path_problem(path))


def _enter(parent_fd: int, path: str, rules: IgnoreRules | None, excluded: bool) -> Iterator[Found]:
    # Checked before it is entered, or a deep enough tree would use up the descriptors.
    if problem := path_problem(path):
        yield Found(path, "dir", problem=problem)
        return
    try:
        fd = os.open(path.rpartition("/")[2], FOLDER_FLAGS, dir_fd=parent_fd)
    except FileNotFoundError:
        return
    except OSError as error:
        yield Found(path, "dir", problem=f"a folder that cannot be read: {reason(error)}")
        return
    try:
        yield from _walk_folder(fd, path, rules, excluded)
    finally:
        os.close(fd)


def _excluded(rules: IgnoreRules | None, path: str, is_folder: bool, within_excluded: bool) -> bool:
    return rules is not None and rules.excludes(path, is_folder=is_folder, within_excluded=within_excluded)


def _found(entry: os.DirEntry[str], path: str, dir_fd: int) -> Found | None:
    try:
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            return _found_link(path, os.readlink(entry.name, dir_fd=dir_fd))
    except FileNotFoundError:
        return None
    except OSError as error:
        return Found(path, "file", problem=f"cannot be read: {reason(error)}")
    if stat.S_ISREG(status.st_mode):
        return Found(path, "file", status.st_size, problem=path_problem(path))
    return Found(path, "special", problem=_SPECIAL_KINDS.get(stat.S_IFMT(status.st_mode), "no regular file"))


def _found_link(path: str, target: str) -> Found:
    return Found(path, "link", target=target, problem=path_problem(path) or link_problem(path, target))


def _text_of(dir_fd: int, path: str, name: str) -> str | None:
    """The text of an ignore file; None if the folder has none, or only a link or a folder of its name."""
    try:
        with opened(name, FILE_FLAGS, dir_fd=dir_fd) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            data = os.pread(fd, CHUNK_BYTES + 1, 0)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            return None
        raise BadSource(f"{path}/{name}: cannot be read: {reason(error)}".lstrip("/")) from error
    if len(data) > CHUNK_BYTES:
        raise BadSource(f"{path}/{name}: an ignore file of more than 1 MiB".lstrip("/"))
    return data.decode("utf-8", "surrogateescape")
