"""Taking files out of a job's folder, which the job may have left in any state.

What it guarantees: as for bundles, only what lies in the folder travels and no link is followed. But a
thing that cannot travel does not fail the rest: it is left out, and said in a line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from pathspec import GitIgnoreSpec

from gpulayer_broker.errors import BadSource, StoreError
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.store.bundle import Bundle, Item, folder_items, store_items, survey
from gpulayer_broker.store.files import FOLDER_FLAGS, digest_of, read_still, reason
from gpulayer_broker.store.ignore import built_in_rules
from gpulayer_broker.store.limits import Limits
from gpulayer_broker.store.tree import Entry, Manifest, shown
from gpulayer_broker.store.walk import Found, open_beneath, walk

LIMIT_BYTES = 50 * 1024**3
LIMIT_FILES = 100_000
_WALKED_FILES = 200_000
_LISTED_FILES = 1000
_REHASHED_BYTES = 64 << 20


def collect(
    folder: Path,
    patterns: Sequence[str] | None,
    store: BlobStore,
    *,
    limit_bytes: int = LIMIT_BYTES,
    limit_files: int = LIMIT_FILES,
) -> Bundle:
    """Store a folder's files: all of them, or those that match a pattern; a folder that matches comes whole.

    Patterns count from the folder: `*.csv` is there alone, `**/*.csv` anywhere below. A folder that is
    missing has nothing in it; one that is a link is left out. StoreError if it is too much, naming the
    largest paths.
    """
    cure = "write less there, or name less to return"
    limits = Limits(limit_bytes, limit_files, "outputs", cure, StoreError).for_store(store)
    wanted = None if patterns is None else _matcher(patterns)
    with _job_folder(folder) as (fds, left_out):
        items = (item for fd in fds for item in folder_items(fd, "", None))
        matching = (item for item in items if wanted is None or _wanted(item.found, wanted))
        kept, special = survey(matching, limits)
        sound, problems = _sound(kept)
        return store_items(sound, [*left_out, *special, *problems], store, limits, tolerant=True)


def list_new_files(folder: Path, source: Manifest) -> list[str]:
    """Regular files that the job made, or changed: what outputs might have been missed.

    Caches and other built-in excludes do not count. It is bounded: of large folders the first 200,000 files
    are looked at and 1,000 named; a file of the source that kept its size is read again only up to 64 MiB
    in all.
    """
    shipped = {entry.path: entry for entry in source.of_kind("file")}
    with _job_folder(folder) as (fds, _):
        files = (found for fd in fds for found in walk(fd, built_in_rules(reads_files=False)))
        regular = (
            found for found in islice(files, _WALKED_FILES) if found.kind == "file" and not found.problem
        )
        changed = _Changed(fds)
        new = (one.path for one in regular if one.path not in shipped or changed(one, shipped[one.path]))
        return sorted(islice(new, _LISTED_FILES))


@contextmanager
def _job_folder(folder: Path) -> Iterator[tuple[list[int], list[str]]]:
    """The folder's handle, if it has one, and the line that says why not."""
    try:
        fd = os.open(folder, FOLDER_FLAGS)
    except FileNotFoundError:
        yield [], []
        return
    except OSError as error:
        yield (
            [],
            [f"{folder}: not a folder that can be read without following a link ({reason(error)}); left out"],
        )
        return
    try:
        yield [fd], []
    finally:
        os.close(fd)


def _matcher(patterns: Iterable[str]) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines([_anchored(pattern) for pattern in patterns])


def _anchored(pattern: str) -> str:
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if not names or ".." in names or pattern.startswith("/"):
        raise BadSource(f"output pattern {pattern!r}: it must name something below the job's folder")
    return "/" + "/".join(names)


def _wanted(found: Found, wanted: GitIgnoreSpec) -> bool:
    path = f"{found.path}/" if found.kind == "dir" else found.path
    return bool(wanted.check_file(path).include)


def _sound(items: Iterable[Item]) -> tuple[list[Item], list[str]]:
    sound, problems = [], []
    for item in items:
        if item.found.problem:
            problems.append(f"{shown(item.path)}: {item.found.problem}; left out")
        else:
            sound.append(item)
    return sound, problems


class _Changed:
    """Whether a file of the source has another content now; reads no more than its budget."""

    def __init__(self, fds: Sequence[int]) -> None:
        self._fds = fds
        self._budget_bytes = _REHASHED_BYTES

    def __call__(self, found: Found, entry: Entry) -> bool:
        if found.size_bytes != entry.size:
            return True
        self._budget_bytes -= entry.size
        return self._budget_bytes >= 0 and self._hash(found) != entry.sha256

    def _hash(self, found: Found) -> str | None:
        with suppress(OSError, BadSource), open_beneath(self._fds[0], found.path) as fd:
            return read_still(fd, digest_of, shown(found.path))[0]
        return None
