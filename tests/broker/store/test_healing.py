"""Files that are shipped again heal what a failing disk has done to their blobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulayer_broker.errors import BlobCorrupt
from gpulayer_broker.store.bundle import make_bundle
from gpulayer_broker.store.local import LocalStore


def blob_path(store: LocalStore, sha: str) -> Path:
    return store.root / "blobs" / sha[:2] / sha[2:]


@pytest.mark.parametrize("left", [b"", b"hel"])
def test_a_blob_cut_short_is_sent_again_before_anybody_has_read_it(
    source: Path, store: LocalStore, left: bytes
) -> None:
    (source / "a").write_bytes(b"hello")
    (source / "b").write_bytes(b"other")
    bundle = make_bundle(source, store)
    cut = next(entry.sha256 for entry in bundle.manifest.entries if entry.path == "a")
    blob_path(store, cut).write_bytes(left)

    again = make_bundle(source, store)

    assert (again.digest, again.new_blobs) == (bundle.digest, 1)
    assert store.read_bytes(cut, 5) == b"hello"


def test_a_blob_altered_at_its_size_is_noticed_by_its_reader_and_sent_again_then(
    source: Path, store: LocalStore
) -> None:
    (source / "a").write_bytes(b"hello")
    bundle = make_bundle(source, store)
    [entry] = bundle.manifest.entries
    blob_path(store, entry.sha256).write_bytes(b"hellO")
    assert make_bundle(source, store).new_blobs == 0

    with pytest.raises(BlobCorrupt):
        store.read_bytes(entry.sha256, 5)
    assert make_bundle(source, store).new_blobs == 1
    assert store.read_bytes(entry.sha256, 5) == b"hello"
