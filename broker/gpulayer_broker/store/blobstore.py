"""What every place for blobs can do.

A blob is bytes named by their SHA-256 in hex; a store never hands out bytes that do not have the name they
were asked by. Bundles and unpacking speak to this protocol only, so that a local folder, the queue and a
server are one to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

NO_SIZES: Mapping[str, int] = MappingProxyType({})


class BlobStore(Protocol):
    """Blobs by SHA-256. A failing store is StoreError, BlobMissing or BlobCorrupt."""

    @property
    def limit_bytes(self) -> int | None:
        """The most bytes that one job may bring, None where only the job's own limits hold."""

    def for_job(self) -> BlobStore:
        """The same blobs, for another job: its bytes count from zero."""

    def has(self, shas: Iterable[str], sizes: Mapping[str, int] = NO_SIZES) -> set[str]:
        """Those of `shas` that are missing; what is there is kept for another retention period.

        One that does not have the size that it is known to have counts as missing: to put it again heals it.
        """

    def put_bytes(self, data: bytes) -> str:
        """Store `data`; its SHA-256."""

    def put_file(self, source: Path | int) -> tuple[str, int]:
        """Store a regular file, by path or open descriptor; its SHA-256 and size. BadSource if unreadable."""

    def read_bytes(self, sha: str, limit_bytes: int) -> bytes:
        """The verified content of a blob that is no larger than `limit_bytes`."""

    def fetch(self, sha: str, dir_fd: int, name: str, mode: int, *, limit_bytes: int | None = None) -> int:
        """Write a verified blob as the new file `name` of an open folder; its size in bytes.

        Nothing is left under `name` when it fails, and a file or link that is there already is never
        written through.
        """
