"""Blobs carried by the queue's own server, where client and worker share nothing else.

A blob is chunks of 1 MiB under `key(sha, n)`; chunk 0 begins with the blob's size and is written last, so a blob is
there whole or not at all. Every key has a lifetime, renewed by `has` and by putting again. What is read is verified.
The server's memory is everybody's: one store serves one job, and takes no more than its limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import redis

from gpulayer_broker.errors import BadSource, BlobCorrupt, BlobMissing, StoreError
from gpulayer_broker.store.blobstore import NO_SIZES
from gpulayer_broker.store.files import (
    CHUNK_BYTES,
    checked_sha256,
    chunks_of,
    digest_of,
    read_still,
    regular_file,
    write_verified,
)
from gpulayer_broker.units import format_size

LIMIT_BYTES = 64 << 20
TTL_S = 86_400

_SIZE = struct.Struct(">Q")
_BATCH = 500
_LARGEST_BYTES = 4 << 30


class QueueStore:
    """The blobs of one job on a Redis or Valkey server; for threads. `client` returns bytes, as redis-py does."""

    def __init__(
        self,
        client: redis.Redis,
        key: Callable[[str, int], str],
        *,
        limit_bytes: int = LIMIT_BYTES,
        ttl_s: int = TTL_S,
    ) -> None:
        self._client = client
        self._key = key
        self._limit_bytes = min(limit_bytes, _LARGEST_BYTES)
        self._ttl_s = ttl_s
        self._taken: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def limit_bytes(self) -> int:
        """The most bytes that the job may bring."""
        return self._limit_bytes

    def for_job(self) -> QueueStore:
        """A store by the same connection that counts from zero."""
        return QueueStore(self._client, self._key, limit_bytes=self._limit_bytes, ttl_s=self._ttl_s)

    def has(self, shas: Iterable[str], sizes: Mapping[str, int] = NO_SIZES) -> set[str]:
        """Those of `shas` that are missing, or miss a chunk; the others live for the whole lifetime from now."""
        missing: set[str] = set()
        pending = iter([checked_sha256(sha) for sha in shas])
        while batch := list(islice(pending, _BATCH)):
            missing.update(self._missing_of(batch, sizes))
        return missing

    def put_bytes(self, data: bytes) -> str:
        """Store `data`, whether or not it is there; its SHA-256."""
        sha, size_bytes = digest_of((data,))
        self._put(sha, size_bytes, (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)))
        return sha

    def put_file(self, source: Path | int) -> tuple[str, int]:
        """Store a regular file, whether or not it is there; BadSource if it cannot be read, or changes."""
        label = str(source)
        with regular_file(source) as fd:
            sha, size_bytes = read_still(fd, digest_of, label)
            self._put(sha, size_bytes, chunks_of(fd, label, BadSource))
        return sha, size_bytes

    def read_bytes(self, sha: str, limit_bytes: int) -> bytes:
        """The verified content of a blob; StoreError if it is larger than `limit_bytes`."""
        data = b"".join(self._chunks(sha, limit_bytes))
        if digest_of((data,))[0] != sha:
            raise self._discarded(sha)
        return data

    def fetch(self, sha: str, dir_fd: int, name: str, mode: int, *, limit_bytes: int | None = None) -> int:
        """Write a blob as a new file, verified on the way; an altered blob is removed and BlobCorrupt raised."""
        try:
            chunks = self._chunks(sha, limit_bytes)
            return write_verified(chunks, sha, dir_fd, name, mode, limit_bytes=limit_bytes)
        except BlobCorrupt:
            raise self._discarded(sha) from None

    def _missing_of(self, shas: list[str], sizes: Mapping[str, int]) -> set[str]:
        found = zip(shas, self._sizes(shas), strict=True)
        present = [(sha, size) for sha, size in found if size is not None and size == sizes.get(sha, size)]
        keys = [(sha, self._key(sha, n)) for sha, size in present for n in range(_count_of(size))]
        renewed = self._run([("EXPIRE", key, self._ttl_s) for _, key in keys])
        gone = {sha for (sha, _), was_there in zip(keys, renewed, strict=True) if not was_there}
        return gone | (set(shas) - {sha for sha, _ in present})

    def _sizes(self, shas: list[str]) -> list[int | None]:
        heads = self._run([("GETRANGE", self._key(sha, 0), 0, _SIZE.size - 1) for sha in shas])
        sizes = (_SIZE.unpack(head)[0] if len(head) == _SIZE.size else None for head in heads)
        # A size that nobody can have put is damage, and would be a loop without end.
        return [None if size is None or size > _LARGEST_BYTES else size for size in sizes]

    def _put(self, sha: str, size_bytes: int, chunks: Iterator[bytes]) -> None:
        self._reserve(sha, size_bytes)
        first = next(chunks, b"")
        digest = hashlib.sha256(first)
        for n, chunk in enumerate(chunks, start=1):
            digest.update(chunk)
            self._set(sha, n, chunk)
        if digest.hexdigest() != sha:
            self._discard(sha)
            raise BadSource(f"blob {sha}: its file changed while it was read; wait until its writer is done")
        self._set(sha, 0, _SIZE.pack(size_bytes) + first)

    def _set(self, sha: str, n: int, chunk: bytes) -> None:
        self._run([("SET", self._key(sha, n), chunk, "EX", self._ttl_s)])

    def _reserve(self, sha: str, size_bytes: int) -> None:
        """Count a blob towards the job's limit, once; StoreError if it goes over."""
        with self._lock:
            total_bytes = sum(self._taken.values()) + (0 if sha in self._taken else size_bytes)
            if total_bytes <= self._limit_bytes:
                self._taken[sha] = size_bytes
                return
        raise StoreError(
            f"{format_size(total_bytes)} of files would travel through the queue, over its limit of"
            f" {format_size(self._limit_bytes)} per job; ship less, or give the job's data by a server's"
            " store or a folder that the worker can read"
        )

    def _chunks(self, sha: str, limit_bytes: int | None) -> Iterator[bytes]:
        [size_bytes] = self._sizes([checked_sha256(sha)])
        if size_bytes is None:
            raise self._missing(sha)
        if limit_bytes is not None and size_bytes > limit_bytes:
            raise StoreError(f"blob {sha} is larger than the limit of {limit_bytes:,} bytes")
        for n in range(_count_of(size_bytes)):
            [chunk] = self._run([("GET", self._key(sha, n))])
            if chunk is None:
                raise self._missing(sha)
            yield chunk[_SIZE.size :] if n == 0 else chunk

    def _missing(self, sha: str) -> BlobMissing:
        return BlobMissing(f"blob {sha} is not on the queue, or no longer; submit again to send it anew")

    def _discarded(self, sha: str) -> BlobCorrupt:
        self._discard(sha)
        return BlobCorrupt(f"blob {sha} was altered on the queue; submit again to send it anew")

    def _discard(self, sha: str) -> None:
        with contextlib.suppress(StoreError):
            self._run([("UNLINK", self._key(sha, 0))])

    def _run(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if not commands:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
        try:
            return list(pipeline.execute())
        except redis.RedisError as error:
            raise StoreError(f"the queue's server refused or lost a blob: {error}") from error


def _count_of(size_bytes: int) -> int:
    return max(1, -(-size_bytes // CHUNK_BYTES))
