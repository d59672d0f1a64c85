"""Blobs in a folder of this machine: `<root>/blobs/ab/cdef…`, named by their SHA-256.

What it guarantees: a blob becomes visible whole or not at all (written aside, synced, renamed), so a
process killed in the middle leaves nothing but a temporary file that `gc` takes away; a blob handed out has
been verified; any number of processes may put, read and collect garbage at once, without a lock. Folders
are 0700, blobs 0600.

The time of last use is the blob's mtime: `has`, `put_*` and `fetch` renew it, `gc` goes by it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpulayer_broker.errors import BlobCorrupt, BlobMissing, StoreError
from gpulayer_broker.store.blobstore import NO_SIZES
from gpulayer_broker.store.files import (
    FILE_FLAGS,
    checked_sha256,
    chunks_of,
    copy_hashed,
    digest_of,
    read_still,
    reason,
    regular_file,
    write_verified,
)

_TEMP_RETENTION_S = 3600.0


@dataclass(frozen=True)
class GcReport:
    """What a garbage collection removed."""

    blobs: int
    total_bytes: int


class LocalStore:
    """A content-addressed folder. Threads and processes may share it."""

    limit_bytes: int | None = None

    def __init__(self, root: Path) -> None:
        self.root = root
        self._blobs, self._temp = root / "blobs", root / "tmp"
        self._trash, self._corrupt = root / "trash", root / "corrupt"
        for folder in (root, self._blobs, self._temp, self._trash, self._corrupt):
            _make_folder(folder)

    def for_job(self) -> LocalStore:
        """This store: it sets a job no limit of its own."""
        return self

    def has(self, shas: Iterable[str], sizes: Mapping[str, int] = NO_SIZES) -> set[str]:
        """Those of `shas` that are missing; the others are safe from `gc` for its whole period from now.

        One that a failing disk has cut short is as good as missing, where its size is known.
        """
        return {sha for sha in shas if not self._renewed(sha, sizes.get(sha))}

    def put_bytes(self, data: bytes) -> str:
        """Store `data`; its SHA-256. Bytes that are there already cost a stat."""
        sha, size_bytes = digest_of((data,))
        if not self._renewed(sha, size_bytes):
            self._publish(lambda fd: copy_hashed((data,), fd))
        return sha

    def put_file(self, source: Path | int) -> tuple[str, int]:
        """Store a regular file, hashed while it is copied.

        StoreError if its writer never lets it hold still.
        """
        label = str(source)
        with regular_file(source) as source_fd:
            return self._publish(lambda fd: read_still(source_fd, lambda chunks: _rewrite(chunks, fd), label))

    def open(self, sha: str) -> BinaryIO:
        """The blob as an open file. Its bytes are not verified: `fetch` and `read_bytes` do that."""
        return os.fdopen(self._open(sha), "rb")

    def read_bytes(self, sha: str, limit_bytes: int) -> bytes:
        """The verified content of a blob; StoreError if it is larger than `limit_bytes`."""
        with self.open(sha) as file:
            self._check_size(file.fileno(), sha, limit_bytes)
            # No more than there is: what is asked for is set aside in memory before it is read.
            data = file.read(min(limit_bytes, os.fstat(file.fileno()).st_size))
        if digest_of((data,))[0] != sha:
            raise self._set_aside(sha, self._altered(sha))
        return data

    def fetch(self, sha: str, dir_fd: int, name: str, mode: int, *, limit_bytes: int | None = None) -> int:
        """Write a blob as a new file, verified on the way.

        An altered blob is set aside and BlobCorrupt raised.
        """
        blob_fd = self._open(sha)
        chunks = chunks_of(blob_fd, f"blob {sha}")
        try:
            self._check_size(blob_fd, sha, limit_bytes)
            return write_verified(chunks, sha, dir_fd, name, mode, limit_bytes=limit_bytes)
        except BlobCorrupt as error:
            raise self._set_aside(sha, error) from None
        finally:
            os.close(blob_fd)

    def gc(self, older_than_s: float) -> GcReport:
        """Remove the blobs that nobody used for `older_than_s` seconds, and what killed processes left."""
        cutoff_ns = time.time_ns() - int(older_than_s * 1e9)
        self._empty_trash(cutoff_ns)
        sizes = [self._collect(path, cutoff_ns) for path in self._old_blobs(cutoff_ns)]
        _remove_old(self._corrupt, cutoff_ns)
        _remove_old(self._temp, time.time_ns() - int(max(older_than_s, _TEMP_RETENTION_S) * 1e9))
        removed = [size for size in sizes if size is not None]
        return GcReport(len(removed), sum(removed))

    def _path(self, sha: str) -> Path:
        checked_sha256(sha)
        return self._blobs / sha[:2] / sha[2:]

    def _open(self, sha: str) -> int:
        # A collector may hold the blob in the trash for the moment in which it looks at its time again.
        for path in (self._path(sha), self._trash / sha, self._path(sha)):
            try:
                fd = os.open(path, FILE_FLAGS)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise StoreError(f"blob {sha} of {self.root} cannot be read: {reason(error)}") from error
            with contextlib.suppress(OSError):
                os.utime(fd)
            return fd
        raise BlobMissing(f"blob {sha} is not in {self.root}; submit again to send it anew")

    def _renewed(self, sha: str, size_bytes: int | None) -> bool:
        path = self._path(sha)
        return _touch(path) and (size_bytes is None or _size_of(path) == size_bytes)

    def _publish(self, write: Callable[[int], tuple[str, int]]) -> tuple[str, int]:
        temp = self._temp / f"{os.getpid()}-{secrets.token_hex(8)}"
        try:
            sha, size_bytes = _write_synced(temp, write)
            self._rename_into_place(temp, sha)
        except OSError as error:
            raise StoreError(f"the store {self.root} cannot take a blob: {reason(error)}") from error
        finally:
            with contextlib.suppress(OSError):
                temp.unlink()
        return sha, size_bytes

    def _rename_into_place(self, temp: Path, sha: str) -> None:
        path = self._path(sha)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temp.replace(path)

    def _check_size(self, blob_fd: int, sha: str, limit_bytes: int | None) -> None:
        if limit_bytes is None or os.fstat(blob_fd).st_size <= limit_bytes:
            return
        if digest_of(chunks_of(blob_fd, f"blob {sha}"))[0] != sha:
            raise self._set_aside(sha, self._altered(sha))
        raise StoreError(f"blob {sha} is larger than the limit of {limit_bytes:,} bytes")

    def _altered(self, sha: str) -> BlobCorrupt:
        return BlobCorrupt(f"blob {sha} was altered in {self.root}; submit again to send it anew")

    def _set_aside(self, sha: str, error: BlobCorrupt) -> BlobCorrupt:
        with contextlib.suppress(OSError):
            self._path(sha).replace(self._corrupt / f"{sha}.{secrets.token_hex(4)}")
        return error

    def _old_blobs(self, cutoff_ns: int) -> Iterator[Path]:
        for folder in sorted(self._blobs.iterdir()):
            yield from _older(folder, cutoff_ns)

    def _collect(self, path: Path, cutoff_ns: int) -> int | None:
        """Take one blob out of sight, look at its time again, then delete it or put it back.

        The bytes freed.
        """
        trashed = self._trash / (path.parent.name + path.name)
        try:
            path.rename(trashed)
        except FileNotFoundError:
            return None
        return self._delete_or_restore(trashed, cutoff_ns)

    def _delete_or_restore(self, trashed: Path, cutoff_ns: int) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            status = trashed.stat()
            if status.st_mtime_ns < cutoff_ns:
                trashed.unlink()
                return status.st_size
            trashed.replace(self._path(trashed.name))
        return None

    def _empty_trash(self, cutoff_ns: int) -> None:
        for trashed in list(self._trash.iterdir()):
            self._delete_or_restore(trashed, cutoff_ns)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"the store's folder {folder} cannot be made: {reason(error)}") from error


def _touch(path: Path) -> bool:
    try:
        os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"{path}: cannot be renewed: {reason(error)}") from error
    return True


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _rewrite(chunks: Iterator[bytes], fd: int) -> tuple[str, int]:
    os.lseek(fd, 0, os.SEEK_SET)
    os.ftruncate(fd, 0)
    return copy_hashed(chunks, fd)


def _write_synced(temp: Path, write: Callable[[int], tuple[str, int]]) -> tuple[str, int]:
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        written = write(fd)
        os.fsync(fd)
    finally:
        os.close(fd)
    return written


def _older(folder: Path, cutoff_ns: int) -> Iterator[Path]:
    for path in list(folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns < cutoff_ns:
                yield path


def _remove_old(folder: Path, cutoff_ns: int) -> None:
    for path in _older(folder, cutoff_ns):
        path.unlink(missing_ok=True)
