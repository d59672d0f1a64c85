"""Bundles: a folder, or files named one by one, as a manifest whose blobs are in a store.

What it guarantees: only what lies in the folder travels, read by handles that follow no link, so a file
swapped for a link meanwhile leaks nothing; what is too large is refused before a byte is hashed; a second
bundle sends what changed. The manifest is stored too, as the blob named by its digest, after all that it
names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpulayer_broker.errors import BadSource, HostileTree, StoreError
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.store.files import digest_of, opened, read_still, reason
from gpulayer_broker.store.ignore import OWN_FILE, IgnoreRules, built_in_rules
from gpulayer_broker.store.limits import Limits
from gpulayer_broker.store.tree import (
    Entry,
    Manifest,
    file_entry,
    folder_entry,
    link_entry,
    path_problem,
    shown,
)
from gpulayer_broker.store.walk import Found, open_beneath, walk

LIMIT_BYTES = 512 * 1024 * 1024
LIMIT_FILES = 100_000
# A folder far over the limit is not walked to its end: the error then says "more than".
_SURVEYED_TIMES = 4
_SKIPPED_LINES = 100
# Syncing to disk and a distant queue are both waiting, which threads share.
_PUT_THREADS = 8

_NAMED_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class Bundle:
    """A stored tree: what is in it, a line for each thing left out, and the number of blobs put."""

    manifest: Manifest
    skipped: tuple[str, ...]
    new_blobs: int

    @property
    def digest(self) -> str:
        """The name of the tree, and of its manifest as a blob."""
        return self.manifest.digest

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return self.manifest.total_bytes


@dataclass(frozen=True, slots=True)
class Item:
    """Something to store: what was found under which path of the tree, and how to open it if it is a file."""

    found: Found
    opener: Callable[[], AbstractContextManager[int]]

    @property
    def path(self) -> str:
        """Its path in the tree."""
        return self.found.path


def make_bundle(
    source: Path, store: BlobStore, *, limit_bytes: int = LIMIT_BYTES, limit_files: int = LIMIT_FILES
) -> Bundle:
    """Store what the ignore rules leave of a folder.

    BadSource: it is missing, unreadable, or holds what cannot travel. SourceTooLarge: names the largest
    paths.
    """
    cure = f"list what the job does not need in {source / OWN_FILE}"
    limits = Limits(limit_bytes, limit_files, str(source), cure).for_store(store)
    with _named_folder(source) as root_fd:
        items, skipped = survey(folder_items(root_fd, "", built_in_rules()), limits)
        _refuse_problems(items, source)
        return store_items(items, skipped, store, limits)


def ship_files(
    files: Mapping[str, Path],
    store: BlobStore,
    *,
    limit_bytes: int = LIMIT_BYTES,
    limit_files: int = LIMIT_FILES,
) -> Bundle:
    """Store files and folders named one by one, by their path in the tree; in a folder nothing is ignored.

    A folder may go to '.', the top of the tree. A link that is named itself is followed; one in a folder is
    not.
    """
    limits = Limits(limit_bytes, limit_files, "input files", "name fewer of them").for_store(store)
    with ExitStack() as stack:
        items, skipped = survey(_named_items(files, stack), limits)
        _refuse_problems(items, None)
        return store_items(items, skipped, store, limits)


def survey(items: Iterable[Item], limits: Limits) -> tuple[list[Item], list[str]]:
    """The items, within the limits as far as is known, and a line for each that is no file, folder or link."""
    kept: list[Item] = []
    skipped: list[str] = []
    complete = True
    for count, item in enumerate(items):
        if count > _SURVEYED_TIMES * limits.files:
            complete = False
            break
        if item.found.kind == "special":
            skipped.append(f"{shown(item.path)}: {item.found.problem}; left out")
            continue
        kept.append(item)
    limits.check(((item.path, item.found.size_bytes) for item in kept), complete=complete)
    return kept, sorted(skipped)


def store_items(
    items: Iterable[Item], skipped: list[str], store: BlobStore, limits: Limits, *, tolerant: bool = False
) -> Bundle:
    """Hash the items, put the blobs that are missing, then the manifest.

    A file that cannot be read is BadSource, or, to the tolerant, one more line of what was left out.
    """
    attempt = partial(_attempt, skipped if tolerant else None)
    hashed = [(item, entry) for item in items if (entry := attempt(entry_of, item))]
    entries, new_blobs = _put_missing(hashed, store, lambda hashed: attempt(_put, *hashed, store))
    limits.check((entry.path, entry.size) for entry in entries)
    manifest = _manifest_of(entries)
    store.put_bytes(manifest.encoded)
    return Bundle(manifest, _bounded(sorted(skipped)), new_blobs)


def _put_missing(
    hashed: list[tuple[Item, Entry]], store: BlobStore, put: Callable[[tuple[Item, Entry]], Entry | None]
) -> tuple[list[Entry], int]:
    """The entries as they are stored, and how many blobs were new.

    Of equal files one is put. If that one has changed meanwhile, the next turn puts another.
    """
    sizes = {entry.sha256: entry.size for _, entry in hashed if entry.kind == "file"}
    missing = store.has(sizes, sizes)
    settled: dict[int, Entry | None] = {}
    new: set[str] = set()
    with ThreadPoolExecutor(_PUT_THREADS, "gpulayer-put") as pool:
        while turn := _one_of_each(hashed, missing - new, settled.keys()):
            settled.update(zip(turn, pool.map(lambda at: put(hashed[at]), turn), strict=True))
            new.update(entry.sha256 for at in turn if (entry := settled[at]))
    entries = (settled.get(at, entry) for at, (_, entry) in enumerate(hashed))
    return [entry for entry in entries if entry], len(new)


def _one_of_each(
    hashed: list[tuple[Item, Entry]], shas: AbstractSet[str], settled: AbstractSet[int]
) -> list[int]:
    unsettled = (at for at in reversed(range(len(hashed))) if at not in settled)
    return list({sha: at for at in unsettled if (sha := hashed[at][1].sha256) in shas}.values())


def _bounded(lines: list[str]) -> tuple[str, ...]:
    more = len(lines) - _SKIPPED_LINES
    return tuple(lines) if more <= 0 else (*lines[:_SKIPPED_LINES], f"{more:,} more left out")


def _attempt(left_out: list[str] | None, action: Callable[..., Entry], *arguments: object) -> Entry | None:
    try:
        return action(*arguments)
    except BadSource as error:
        if left_out is None:
            raise
        left_out.append(f"{error}; left out")
        return None


def _manifest_of(entries: Iterable[Entry]) -> Manifest:
    try:
        return Manifest.of(entries)
    except HostileTree as error:
        raise BadSource(str(error)) from error


def entry_of(item: Item) -> Entry:
    """The manifest's entry; a file is hashed as it is now."""
    if item.found.kind == "dir":
        return folder_entry(item.path)
    if item.found.kind == "link":
        return link_entry(item.path, item.found.target)
    with _opened_item(item) as fd:
        sha, size_bytes = read_still(fd, digest_of, shown(item.path))
        return file_entry(item.path, sha, size_bytes, executable=bool(os.fstat(fd).st_mode & stat.S_IXUSR))


def _put(item: Item, entry: Entry, store: BlobStore) -> Entry:
    with _opened_item(item) as fd:
        try:
            sha, size_bytes = store.put_file(fd)
        except (BadSource, StoreError) as error:
            raise type(error)(f"{shown(item.path)}: {error}") from error
    # It may have been written since it was hashed: what was stored is what counts.
    return replace(entry, sha256=sha, size=size_bytes)


@contextmanager
def _opened_item(item: Item) -> Iterator[int]:
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(item.opener())
        except OSError as error:
            told = f"{shown(item.path)}: cannot be read: {reason(error)}; make it readable, or leave it out"
            raise BadSource(told) from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise BadSource(f"{shown(item.path)}: no longer a regular file")
        yield fd


def folder_items(root_fd: int, prefix: str, rules: IgnoreRules | None) -> Iterator[Item]:
    """What is below an open folder, under `prefix` ('' or with a slash at its end) in the tree."""
    for found in walk(root_fd, rules):
        opener = partial(open_beneath, root_fd, found.path)
        yield Item(_moved(found, prefix) if prefix else found, opener)


def _moved(found: Found, prefix: str) -> Found:
    path = prefix + found.path
    return Found(path, found.kind, found.size_bytes, found.target, found.problem or path_problem(path))


def _named_items(files: Mapping[str, Path], stack: ExitStack) -> Iterator[Item]:
    for dest, path in files.items():
        if dest != "." and (problem := path_problem(dest)):
            raise BadSource(f"input {path}: it cannot go to {shown(dest)}: {problem}")
        if path.is_dir():
            prefix = "" if dest == "." else f"{dest}/"
            yield from _named_folder_items(stack.enter_context(_named_folder(path)), prefix)
        else:
            yield Item(_named_file(dest, path), partial(opened, path, _NAMED_FLAGS))


def _named_folder_items(root_fd: int, prefix: str) -> Iterator[Item]:
    empty = True
    for item in folder_items(root_fd, prefix, None):
        empty = False
        yield item
    if empty and prefix:
        yield Item(Found(prefix.rstrip("/"), "dir"), _nothing_to_open)


def _named_file(dest: str, path: Path) -> Found:
    try:
        status = path.stat()
    except OSError as error:
        raise BadSource(f"input {path}: cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadSource(f"input {path}: neither a regular file nor a folder")
    return Found(dest, "file", status.st_size)


def _nothing_to_open() -> AbstractContextManager[int]:
    raise BadSource("a folder has no bytes of its own")


@contextmanager
def _named_folder(path: Path) -> Iterator[int]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise BadSource(f"{path}: not a folder that can be read: {reason(error)}") from error
    try:
        yield fd
    finally:
        os.close(fd)


def _refuse_problems(items: Iterable[Item], source: Path | None) -> None:
    for item in items:
        if item.found.problem:
            cure = (
                f"change it, or list it in {source / OWN_FILE}"
                if source
                else "change it, or name other files"
            )
            raise BadSource(f"{shown(item.path)}: {item.found.problem}; {cure}")
