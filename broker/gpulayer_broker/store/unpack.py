"""Laying a tree out in a folder, by directory handles alone.

What it guarantees: nothing is written outside the folder, whatever the manifest says and whatever already
lies in the folder: every folder is opened below its parent's handle and never through a link, every file
and link is new, links come last, and each file is verified and has the size that the manifest announced.
Unless told to, it replaces nothing. When it fails, what it wrote so far stays, whole files only; the caller
removes the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from gpulayer_broker.errors import HostileTree, StoreError
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.store.bundle import LIMIT_BYTES, LIMIT_FILES
from gpulayer_broker.store.files import FOLDER_FLAGS, reason
from gpulayer_broker.store.tree import FOLDER_MODE, MAX_MANIFEST_BYTES, Entry, Manifest, shown


def load_manifest(digest: str, store: BlobStore) -> Manifest:
    """The manifest that a store holds under its digest, checked as anybody's."""
    return Manifest.decode(store.read_bytes(digest, MAX_MANIFEST_BYTES))


def unpack(
    manifest: Manifest,
    store: BlobStore,
    dest: Path,
    *,
    limit_bytes: int = LIMIT_BYTES,
    limit_files: int = LIMIT_FILES,
    replace: bool = False,
) -> None:
    """Lay the tree out in `dest`, a new or existing folder that is no link itself.

    With `replace`, a file or link that stands in the place of another is removed first; a folder never is.
    """
    _check_limits(manifest, limit_bytes, limit_files)
    with _open_dest(dest) as root_fd, _Folders(root_fd, dest) as folders:
        for entry in manifest.of_kind("dir"):
            folders.open(entry.path)
        for entry in manifest.of_kind("file"):
            _clear(entry, folders, replace)
            _write_file(entry, store, folders)
        for entry in manifest.of_kind("link"):
            _clear(entry, folders, replace)
            _make_link(entry, folders)


def _check_limits(manifest: Manifest, limit_bytes: int, limit_files: int) -> None:
    if manifest.total_bytes > limit_bytes:
        raise HostileTree(f"a tree of {manifest.total_bytes:,} bytes, over the limit of {limit_bytes:,}")
    if len(manifest.entries) > limit_files:
        raise HostileTree(f"a tree of {len(manifest.entries):,} files, over the limit of {limit_files:,}")


@contextmanager
def _open_dest(dest: Path) -> Iterator[int]:
    try:
        dest.mkdir(parents=True, exist_ok=True)
        fd = os.open(dest, FOLDER_FLAGS)
    except OSError as error:
        raise StoreError(f"{dest}: not a folder to unpack into: {reason(error)}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _clear(entry: Entry, folders: _Folders, replace: bool) -> None:
    if not replace:
        return
    folder, _, name = entry.path.rpartition("/")
    try:
        os.unlink(name, dir_fd=folders.open(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{shown(entry.path)}: what is there cannot be replaced: {reason(error)}") from error


def _write_file(entry: Entry, store: BlobStore, folders: _Folders) -> None:
    folder, _, name = entry.path.rpartition("/")
    dir_fd = folders.open(folder)
    try:
        size_bytes = store.fetch(entry.sha256, dir_fd, name, entry.mode, limit_bytes=entry.size)
    except StoreError as error:
        raise type(error)(f"{shown(entry.path)}: {error}") from error
    if size_bytes != entry.size:
        os.unlink(name, dir_fd=dir_fd)
        raise HostileTree(f"{shown(entry.path)}: {size_bytes:,} bytes; the manifest says {entry.size:,}")


def _make_link(entry: Entry, folders: _Folders) -> None:
    folder, _, name = entry.path.rpartition("/")
    try:
        os.symlink(entry.target, name, dir_fd=folders.open(folder))
    except OSError as error:
        raise StoreError(f"{shown(entry.path)}: the link cannot be made: {reason(error)}") from error


def _shared(these: list[str], those: list[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(these, those, strict=False)))


class _Folders:
    """Handles of the folders on the way to the last opened one: sorted paths share most of it."""

    def __init__(self, root_fd: int, dest: Path) -> None:
        self._dest = dest
        self._names: list[str] = []
        self._fds = [root_fd]

    def __enter__(self) -> _Folders:
        return self

    def __exit__(self, *exc: object) -> None:
        self._keep(0)

    def open(self, path: str) -> int:
        """The handle of the folder at `path` ('' is the top), made if need be.

        It is closed when the way leaves it.
        """
        names = path.split("/") if path else []
        self._keep(_shared(self._names, names))
        for name in names[len(self._names) :]:
            self._fds.append(self._enter(name))
            self._names.append(name)
        return self._fds[-1]

    def _keep(self, depth: int) -> None:
        while len(self._names) > depth:
            self._names.pop()
            os.close(self._fds.pop())

    def _enter(self, name: str) -> int:
        try:
            with suppress(FileExistsError):
                os.mkdir(name, FOLDER_MODE, dir_fd=self._fds[-1])
            return os.open(name, FOLDER_FLAGS, dir_fd=self._fds[-1])
        except OSError as error:
            path = shown("/".join([*self._names, name]))
            raise StoreError(f"{path}: not a folder in {self._dest}: {reason(error)}") from error
