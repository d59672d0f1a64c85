"""Descriptor work that stores and bundles share: hash while reading, read what holds still, write anew.

Nothing here follows a link or opens a path of more than one component, but for a path that a person named.
Memory stays flat: files pass through in chunks of 1 MiB.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gpulayer_broker.errors import BadSource, BlobCorrupt, GpulayerError, StoreError

CHUNK_BYTES = 1 << 20
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Non-blocking, or opening a fifo that was swapped in would hang for its writer.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ_ATTEMPTS = 3
_SHA256 = re.compile(r"[0-9a-f]{64}")


def is_sha256(text: object) -> bool:
    """Whether `text` is a SHA-256 in lower-case hex."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def checked_sha256(sha: str) -> str:
    """`sha` itself.

    StoreError for anything that is not a SHA-256, such as a path that wants out of the store.
    """
    if not is_sha256(sha):
        raise StoreError(f"{sha!r:.80} is not a SHA-256 in lower-case hex")
    return sha


def is_name(name: str) -> bool:
    """Whether `name` is one component of a path that names something below a folder."""
    return bool(name) and name not in (".", "..") and "/" not in name and "\0" not in name


def reason(error: OSError) -> str:
    """What the system says, in words and without the path."""
    return error.strerror or type(error).__name__


@contextlib.contextmanager
def opened(path: str | Path, flags: int, *, dir_fd: int | None = None) -> Iterator[int]:
    """An open descriptor, closed at the end."""
    fd = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def regular_file(source: Path | int) -> Iterator[int]:
    """A descriptor of a regular file: of a path, never through a link, or one that stays the caller's."""
    if isinstance(source, int):
        yield _checked_regular(source, f"descriptor {source}")
        return
    try:
        fd = os.open(source, FILE_FLAGS)
    except OSError as error:
        raise BadSource(f"{source}: cannot be read: {reason(error)}") from error
    try:
        yield _checked_regular(fd, str(source))
    finally:
        os.close(fd)


def _checked_regular(fd: int, label: str) -> int:
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BadSource(f"{label}: not a regular file")
    return fd


def chunks_of(fd: int, label: str, error_type: type[GpulayerError] = StoreError) -> Iterator[bytes]:
    """The file's bytes from its start; the descriptor's own position is neither used nor moved."""
    offset = 0
    while True:
        try:
            chunk = os.pread(fd, CHUNK_BYTES, offset)
        except OSError as error:
            raise error_type(f"{label}: cannot be read: {reason(error)}") from error
        if not chunk:
            return
        offset += len(chunk)
        yield chunk


def read_still(fd: int, consume: Callable[[Iterator[bytes]], tuple[str, int]], label: str) -> tuple[str, int]:
    """What `consume` says of the file's bytes, read while nobody wrote; BadSource if it keeps changing.

    `consume` returns hash and size, and is called again, from the start, when the file changed under it.
    """
    for _ in range(_READ_ATTEMPTS):
        before = os.fstat(fd)
        sha, size_bytes = consume(chunks_of(fd, label, BadSource))
        after = os.fstat(fd)
        if size_bytes == after.st_size and _stamp(before) == _stamp(after):
            return sha, size_bytes
    raise BadSource(
        f"{label}: changed while it was read, {_READ_ATTEMPTS} times; wait until its writer is done"
    )


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def digest_of(chunks: Iterable[bytes]) -> tuple[str, int]:
    """SHA-256 and number of bytes."""
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        size_bytes += len(chunk)
    return digest.hexdigest(), size_bytes


def copy_hashed(chunks: Iterable[bytes], fd: int, *, limit_bytes: int | None = None) -> tuple[str, int]:
    """Write the chunks to `fd`, hashing them on the way.

    StoreError before a byte over the limit is written.
    """
    digest, size_bytes = hashlib.sha256(), 0
    for chunk in chunks:
        size_bytes += len(chunk)
        if limit_bytes is not None and size_bytes > limit_bytes:
            raise StoreError(f"a blob is larger than the {limit_bytes:,} bytes that were announced")
        digest.update(chunk)
        write_all(fd, chunk)
    return digest.hexdigest(), size_bytes


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`, however small the portions that the system takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_verified(
    chunks: Iterable[bytes], sha: str, dir_fd: int, name: str, mode: int, *, limit_bytes: int | None = None
) -> int:
    """Write a blob as the new file `name` of a folder.

    BlobCorrupt, and nothing left, if the bytes are not `sha`'s.
    """
    fd = _new_file(dir_fd, name)
    try:
        found, size_bytes = copy_hashed(chunks, fd, limit_bytes=limit_bytes)
        if found != sha:
            raise BlobCorrupt(f"blob {sha} was altered in its store: its bytes have the SHA-256 {found}")
        os.fchmod(fd, mode & 0o777)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)
        if isinstance(error, OSError):
            raise StoreError(f"{name!r}: cannot be written: {reason(error)}") from error
        raise
    finally:
        os.close(fd)
    return size_bytes


def _new_file(dir_fd: int, name: str) -> int:
    if not is_name(name):
        raise StoreError(f"{name!r} is not the name of a file")
    try:
        return os.open(name, _NEW_FLAGS, 0o600, dir_fd=dir_fd)
    except OSError as error:
        stands = error.errno in (errno.EEXIST, errno.ELOOP)
        words = "something of that name is there already" if stands else reason(error)
        raise StoreError(f"{name!r}: cannot be created: {words}") from error
