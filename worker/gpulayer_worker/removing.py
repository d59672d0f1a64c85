"""Removes a tree that somebody hostile has made: of any depth, with folders that cannot be read, names of any bytes.

Nothing outside of the tree is touched: links are removed, not followed. What cannot be removed (a file with an
attribute of its own, a mount) is left, and told by the return value; nothing is raised.

Neither recursion nor paths are used, as both have a limit that a job can pass: each folder is emptied by moving the
folders in it up to the root of the tree, so that all of them are one below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(folder: Path | str) -> bool:
    """Whether nothing of it is left."""
    if os.path.islink(folder) or not os.path.isdir(folder):
        with suppress(OSError):
            os.unlink(folder)
        return not os.path.lexists(folder)
    with suppress(OSError):
        os.chmod(folder, 0o700)
        root = os.open(folder, OPEN_FOLDER)
        try:
            _empty(root)
        finally:
            os.close(root)
        os.rmdir(folder)
    return not os.path.lexists(folder)


def _empty(root: int) -> None:
    names = (f".removed-{number}" for number in count())
    waiting = _remove_files(root)
    while waiting:
        name = waiting.pop()
        with suppress(OSError):
            folder = os.open(name, OPEN_FOLDER, dir_fd=root)
            try:
                for below in _remove_files(folder):
                    moved = _moved(below, folder, root, names)
                    if moved is not None:
                        waiting.append(moved)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=root)


def _moved(name: str, folder: int, root: int, names: Iterator[str]) -> str | None:
    """A folder's new name in the root; None if it cannot be moved."""
    for new in names:
        # What a job itself has called so stays for its own turn.
        try:
            os.lstat(new, dir_fd=root)
        except FileNotFoundError:
            break
    with suppress(OSError):
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=root)
        return new
    return None


def _remove_files(folder: int) -> list[str]:
    """Unlinks what is no folder; the folders, made readable."""
    folders = []
    with os.scandir(folder) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in found:
        with suppress(OSError):
            if is_folder:
                os.chmod(name, 0o700, dir_fd=folder)
                folders.append(name)
            else:
                os.unlink(name, dir_fd=folder)
    return folders
