"""Blobs on the queue's server: whole or absent, with a lifetime, verified, and within one job's limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from gpulayer_broker.connection import Endpoint
from gpulayer_broker.errors import (
    BadSource,
    BlobCorrupt,
    BlobMissing,
    GpulayerError,
    SourceTooLarge,
    StoreError,
)
from gpulayer_broker.keys import Keys
from gpulayer_broker.store.blobs import QueueStore
from gpulayer_broker.store.bundle import make_bundle
from gpulayer_broker.store.files import CHUNK_BYTES, FOLDER_FLAGS, chunks_of, digest_of, opened
from gpulayer_broker.store.unpack import load_manifest, unpack
from tests.servers import QueueServer
from tests.support import PATIENCE_S, wait_until

BIG = os.urandom(2 * CHUNK_BYTES + 5)


@pytest.fixture
def client(valkey: Endpoint) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=valkey.path) as client:
        yield client


@pytest.fixture
def key(root: str) -> Callable[[str, int], str]:
    return Keys(root).blob


@pytest.fixture
def store(client: redis.Redis, key: Callable[[str, int], str]) -> QueueStore:
    return QueueStore(client, key)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "folder").mkdir()
    with opened(tmp_path / "folder", FOLDER_FLAGS) as fd:
        yield fd


@pytest.mark.parametrize("data", [b"", b"x", b"x" * CHUNK_BYTES, b"x" * (CHUNK_BYTES + 1), BIG])
def test_bytes_come_back_by_their_hash(store: QueueStore, data: bytes) -> None:
    sha = store.put_bytes(data)

    assert sha == digest_of((data,))[0]
    assert store.read_bytes(sha, len(data)) == data


def test_a_file_comes_back_as_a_file(store: QueueStore, folder: int, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(BIG)

    sha, size_bytes = store.put_file(tmp_path / "big")

    assert store.fetch(sha, folder, "copy", 0o755) == size_bytes == len(BIG)
    assert (tmp_path / "folder/copy").read_bytes() == BIG
    assert (tmp_path / "folder/copy").stat().st_mode & 0o777 == 0o755


def test_no_key_holds_more_than_a_chunk_and_its_size(
    store: QueueStore, client: redis.Redis, key: Callable[[str, int], str]
) -> None:
    sha = store.put_bytes(BIG)

    assert [client.strlen(key(sha, n)) for n in range(4)] == [CHUNK_BYTES + 8, CHUNK_BYTES, 5, 0]


def test_a_blob_that_has_not_the_size_it_is_known_to_have_is_missing(store: QueueStore) -> None:
    shas = [store.put_bytes(data) for data in (b"one", b"three")]

    assert store.has(shas, dict.fromkeys(shas, 3)) == {shas[1]}


def test_has_names_what_is_missing(store: QueueStore) -> None:
    shas = [store.put_bytes(str(number).encode()) for number in range(1200)]

    assert store.has([*shas, "0" * 64]) == {"0" * 64}


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_blob_that_lost_a_chunk_is_missing(
    store: QueueStore, client: redis.Redis, key: Callable[[str, int], str], folder: int, lost: int
) -> None:
    sha = store.put_bytes(BIG)
    client.delete(key(sha, lost))

    assert store.has([sha]) == {sha}
    with pytest.raises(BlobMissing, match="submit again"):
        store.fetch(sha, folder, "file", 0o644)
    assert os.listdir(folder) == []
    store.put_bytes(BIG)
    assert store.read_bytes(sha, len(BIG)) == BIG


def test_every_key_has_a_lifetime_and_use_renews_it(
    store: QueueStore, client: redis.Redis, key: Callable[[str, int], str]
) -> None:
    sha = store.put_bytes(BIG)
    keys = [key(sha, n) for n in range(3)]
    uses: list[Callable[[], object]] = [lambda: store.has([sha]), lambda: store.put_bytes(BIG)]

    for use in uses:
        for name in keys:
            client.expire(name, 10)
        use()
        assert all(86_000 < client.ttl(name) <= 86_400 for name in keys)


def test_clients_that_put_one_blob_at_once_leave_one_whole_blob(
    valkey: Endpoint, store: QueueStore, key: Callable[[str, int], str]
) -> None:
    """Two jobs that ship the same folder: a reader finds the blob whole, however their chunks fall together."""
    sha = digest_of((BIG,))[0]

    def put(_: int) -> str:
        with redis.Redis(unix_socket_path=valkey.path) as client:
            return QueueStore(client, key).put_bytes(BIG)

    with ThreadPoolExecutor(4) as pool:
        writers = pool.map(put, range(12))
        wait_until(lambda: not store.has([sha]), PATIENCE_S, "the blob is there")
        assert store.read_bytes(sha, len(BIG)) == BIG
        assert set(writers) == {sha}
    assert store.read_bytes(sha, len(BIG)) == BIG


@pytest.mark.parametrize("n", [0, 1])
def test_an_altered_blob_is_refused_and_can_be_put_again(
    store: QueueStore, client: redis.Redis, key: Callable[[str, int], str], folder: int, n: int
) -> None:
    sha = store.put_bytes(BIG)
    client.setrange(key(sha, n), 100, b"altered")

    with pytest.raises(BlobCorrupt, match=sha):
        store.fetch(sha, folder, "file", 0o644)

    assert os.listdir(folder) == []
    assert store.has([sha]) == {sha}
    store.put_bytes(BIG)
    assert store.read_bytes(sha, len(BIG)) == BIG


def test_an_altered_size_neither_reads_for_ever_nor_passes(
    store: QueueStore, client: redis.Redis, key: Callable[[str, int], str]
) -> None:
    sha = store.put_bytes(b"data")
    client.setrange(key(sha, 0), 0, b"\xff" * 8)

    assert store.has([sha]) == {sha}
    with pytest.raises(StoreError):
        store.read_bytes(sha, 10)


def test_a_blob_over_the_readers_limit_is_not_read(store: QueueStore, folder: int) -> None:
    sha = store.put_bytes(b"12345")

    with pytest.raises(StoreError, match="larger than the limit of 4 bytes"):
        store.read_bytes(sha, 4)
    with pytest.raises(StoreError, match="larger than the limit of 4 bytes"):
        store.fetch(sha, folder, "file", 0o644, limit_bytes=4)


def test_a_job_over_the_limit_is_told_the_total_the_limit_and_what_to_do(
    client: redis.Redis, key: Callable[[str, int], str], tmp_path: Path
) -> None:
    store = QueueStore(client, key, limit_bytes=2048)
    store.put_bytes(b"x" * 1536)
    (tmp_path / "more").write_bytes(b"y" * 1024)

    with pytest.raises(StoreError, match=r"2\.5 kB of files .* over its limit of 2\.0 kB per job; ship less"):
        store.put_file(tmp_path / "more")

    assert store.put_bytes(b"x" * 1536)
    assert store.has([digest_of((b"y" * 1024,))[0]])


def test_another_job_has_a_limit_of_its_own(client: redis.Redis, key: Callable[[str, int], str]) -> None:
    store = QueueStore(client, key, limit_bytes=10)
    sha = store.put_bytes(b"x" * 10)

    other = store.for_job()

    assert other.has([sha, other.put_bytes(b"y" * 10)]) == set()
    with pytest.raises(StoreError, match="over its limit"):
        other.put_bytes(b"z")


@pytest.mark.parametrize("sha", ["x", "../" * 21 + "a", "AB" * 32])
def test_a_name_that_is_no_hash_never_becomes_a_key(store: QueueStore, sha: str) -> None:
    for use in (lambda: store.has([sha]), lambda: store.read_bytes(sha, 1)):
        with pytest.raises(StoreError, match="is not a SHA-256"):
            use()


@pytest.mark.parametrize(
    "change",
    [lambda path: os.truncate(path, 10), lambda path: path.write_bytes(b"!" * len(BIG))],
    ids=["shrinks", "is rewritten"],
)
def test_a_file_that_changes_while_it_is_sent_leaves_no_blob(
    store: QueueStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], object]
) -> None:
    path = tmp_path / "big"
    path.write_bytes(BIG)

    def change_and_read(fd: int, label: str, error_type: type[GpulayerError]) -> Iterator[bytes]:
        change(path)
        return chunks_of(fd, label, error_type)

    monkeypatch.setattr("gpulayer_broker.store.blobs.chunks_of", change_and_read)

    with pytest.raises(BadSource, match="changed while it was read"):
        store.put_file(path)
    assert store.has([digest_of((BIG,))[0]])


def test_a_bundle_travels_through_the_queue(store: QueueStore, tmp_path: Path) -> None:
    (tmp_path / "source/sub").mkdir(parents=True)
    (tmp_path / "source/sub/a").write_bytes(BIG)
    (tmp_path / "source/b").symlink_to("sub/a")

    bundle = make_bundle(tmp_path / "source", store)
    unpack(load_manifest(bundle.digest, store), store, tmp_path / "job")

    assert (tmp_path / "job/b").read_bytes() == BIG
    assert make_bundle(tmp_path / "source", store).new_blobs == 0


def test_a_source_over_the_queues_limit_names_its_largest_paths(
    client: redis.Redis, key: Callable[[str, int], str], tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.bin").write_bytes(b"x" * 5000)

    with pytest.raises(
        SourceTooLarge, match=r"4\.9 kB, over the limit of 2\.0 kB; largest: model\.bin 4\.9 kB"
    ):
        make_bundle(tmp_path / "source", QueueStore(client, key, limit_bytes=2048))


def test_a_server_that_is_full_or_gone_is_one_line(
    queue_server: Callable[..., QueueServer], key: Callable[[str, int], str]
) -> None:
    server = queue_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    with redis.Redis(unix_socket_path=server.endpoint.path, retry=Retry(NoBackoff(), 0)) as client:
        store = QueueStore(client, key)

        with pytest.raises(StoreError, match="the queue's server refused or lost a blob") as full:
            store.put_bytes(os.urandom(8 << 20))
        server.kill()
        with pytest.raises(StoreError, match="the queue's server refused or lost a blob") as gone:
            store.has(["0" * 64])

    assert "\n" not in str(full.value) + str(gone.value)
