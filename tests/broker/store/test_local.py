"""The store in a folder: whole blobs or none, verified on the way out, whoever writes, dies or collects."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpulayer_broker.errors import BadSource, BlobCorrupt, BlobMissing, StoreError
from gpulayer_broker.store import files
from gpulayer_broker.store.local import LocalStore
from tests.support import PATIENCE_S, wait_until

ABSENT = "0" * 64
DAY_S = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "folder").mkdir()
    with files.opened(tmp_path / "folder", files.FOLDER_FLAGS) as fd:
        yield fd


def sha_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_path(store: LocalStore, sha: str) -> Path:
    return store.root / "blobs" / sha[:2] / sha[2:]


def blobs_in(store: LocalStore) -> list[Path]:
    return [path for path in (store.root / "blobs").rglob("*") if path.is_file()]


def leftovers_in(store: LocalStore) -> list[Path]:
    return list((store.root / "tmp").iterdir())


def make_old(store: LocalStore, sha: str, age_s: float = 2 * DAY_S) -> None:
    path = blob_path(store, sha)
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))


def test_bytes_come_back_by_their_hash(store: LocalStore) -> None:
    sha = store.put_bytes(b"hello")

    assert sha == sha_of(b"hello")
    assert store.read_bytes(sha, 5) == b"hello"
    with store.open(sha) as file:
        assert file.read() == b"hello"


def test_a_file_comes_back_by_its_hash(store: LocalStore, tmp_path: Path) -> None:
    data = os.urandom(3 * files.CHUNK_BYTES + 7)
    (tmp_path / "big").write_bytes(data)

    assert store.put_file(tmp_path / "big") == (sha_of(data), len(data))
    assert store.read_bytes(sha_of(data), len(data)) == data


def test_an_open_descriptor_is_stored_from_its_start_and_stays_open(
    store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"hello")
    with (tmp_path / "file").open("rb") as file:
        file.read(3)

        assert store.put_file(file.fileno()) == (sha_of(b"hello"), 5)
        assert file.read() == b"lo"


def test_an_empty_blob_is_a_blob(store: LocalStore) -> None:
    assert store.read_bytes(store.put_bytes(b""), 0) == b""


def test_folders_and_blobs_belong_to_the_user_alone(store: LocalStore) -> None:
    sha = store.put_bytes(b"secret")

    path = blob_path(store, sha)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(parent.stat().st_mode) for parent in (path.parent, store.root)} == {0o700}


def test_has_names_what_is_missing(store: LocalStore) -> None:
    sha = store.put_bytes(b"here")

    assert store.has([sha, ABSENT]) == {ABSENT}


@pytest.mark.parametrize("found", [b"", b"her", b"here and more"])
def test_a_blob_that_has_not_the_size_it_is_known_to_have_is_missing(store: LocalStore, found: bytes) -> None:
    sha = store.put_bytes(b"here")
    blob_path(store, sha).write_bytes(found)

    assert store.has([sha, ABSENT], {sha: 4, ABSENT: 1}) == {sha, ABSENT}
    store.put_bytes(b"here")
    assert store.has([sha], {sha: 4}) == set()


def test_a_missing_blob_is_named(store: LocalStore, folder: int) -> None:
    with pytest.raises(BlobMissing, match=ABSENT):
        store.read_bytes(ABSENT, 10)
    with pytest.raises(BlobMissing, match=ABSENT):
        store.fetch(ABSENT, folder, "file", 0o644)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("sha", ["../../etc/passwd", "", "AB" * 32, "ab" * 31 + "/.", "ab" * 32 + "\n"])
def test_a_name_that_is_no_hash_never_reaches_the_file_system(store: LocalStore, sha: str) -> None:
    with pytest.raises(StoreError, match="is not a SHA-256"):
        store.has([sha])
    with pytest.raises(StoreError, match="is not a SHA-256"):
        store.open(sha)


def test_a_small_blob_does_not_take_the_memory_of_its_limit(store: LocalStore) -> None:
    sha = store.put_bytes(b"small")
    tracemalloc.start()
    try:
        assert store.read_bytes(sha, 1 << 28) == b"small"
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def test_a_blob_over_the_limit_is_not_read(store: LocalStore) -> None:
    sha = store.put_bytes(b"12345")

    with pytest.raises(StoreError, match="larger than the limit of 4 bytes"):
        store.read_bytes(sha, 4)


@pytest.mark.parametrize("mode", [0o644, 0o755])
def test_a_fetched_file_has_its_content_and_mode(store: LocalStore, folder: int, mode: int) -> None:
    size_bytes = store.fetch(store.put_bytes(b"content"), folder, "file", mode)

    status = os.stat("file", dir_fd=folder)
    assert (size_bytes, stat.S_IMODE(status.st_mode)) == (7, mode)


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".", "..", "a\0b"])
def test_fetch_takes_only_a_name_in_the_folder(store: LocalStore, folder: int, name: str) -> None:
    with pytest.raises(StoreError, match="is not the name of a file"):
        store.fetch(store.put_bytes(b"x"), folder, name, 0o644)


def test_fetch_never_writes_through_a_planted_link(store: LocalStore, folder: int, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    os.symlink(tmp_path / "victim", "file", dir_fd=folder)

    with pytest.raises(StoreError, match="is there already"):
        store.fetch(store.put_bytes(b"theirs"), folder, "file", 0o644)

    assert (tmp_path / "victim").read_text() == "mine"


@pytest.mark.parametrize("altered", [b"hellO", b"hell", b"hello, and more", b""])
@pytest.mark.parametrize("limit_bytes", [None, 5])
def test_an_altered_blob_is_set_aside_and_nothing_is_written(
    store: LocalStore, folder: int, altered: bytes, limit_bytes: int | None
) -> None:
    sha = store.put_bytes(b"hello")
    blob_path(store, sha).write_bytes(altered)

    with pytest.raises(BlobCorrupt, match=sha):
        store.fetch(sha, folder, "file", 0o644, limit_bytes=limit_bytes)

    assert os.listdir(folder) == []
    assert store.has([sha]) == {sha}
    assert [path.name.split(".")[0] for path in (store.root / "corrupt").iterdir()] == [sha]


def test_an_altered_blob_is_not_read(store: LocalStore) -> None:
    sha = store.put_bytes(b"hello")
    blob_path(store, sha).write_bytes(b"hellO")

    with pytest.raises(BlobCorrupt, match=sha):
        store.read_bytes(sha, 5)
    assert store.has([sha]) == {sha}


def test_putting_again_heals_a_truncated_blob(store: LocalStore) -> None:
    sha = store.put_bytes(b"hello")
    blob_path(store, sha).write_bytes(b"he")

    store.put_bytes(b"hello")

    assert store.read_bytes(sha, 5) == b"hello"


def test_a_blob_larger_than_announced_is_not_written(store: LocalStore, folder: int) -> None:
    with pytest.raises(StoreError, match="larger than the limit of 4 bytes"):
        store.fetch(store.put_bytes(b"12345"), folder, "file", 0o644, limit_bytes=4)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_only_regular_files_are_stored(
    store: LocalStore, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "thing")

    with pytest.raises(BadSource, match="not a regular file"):
        store.put_file(tmp_path / "thing")


def test_a_link_is_not_stored_as_what_it_points_to(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")

    with pytest.raises(BadSource, match="cannot be read"):
        store.put_file(tmp_path / "link")
    assert blobs_in(store) == []


def changing_file(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Let a writer append to `path` during each of its first `times` readings."""
    pread, left = os.pread, [times]

    def read_and_append(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        if offset == 0 and left[0] > 0:
            left[0] -= 1
            with path.open("ab") as file:
                file.write(b"+")
        return data

    monkeypatch.setattr(os, "pread", read_and_append)


def test_a_file_that_changes_once_is_read_again(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one")
    changing_file(monkeypatch, path, times=1)

    assert store.put_file(path) == (sha_of(b"one+"), 4)


def test_a_file_that_never_holds_still_is_refused(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one")
    changing_file(monkeypatch, path, times=100)

    with pytest.raises(BadSource, match=r"log: changed while it was read"):
        store.put_file(path)
    assert blobs_in(store) == leftovers_in(store) == []


PUT_MANY_TIMES = """
import sys
from pathlib import Path
from gpulayer_broker.store.local import LocalStore

store, source = LocalStore(Path(sys.argv[1])), Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.read()
for _ in range(20):
    store.put_file(source)
    store.put_bytes(source.read_bytes())
"""


def test_processes_that_put_one_blob_at_once_leave_one_whole_blob(store: LocalStore, tmp_path: Path) -> None:
    data = os.urandom(300_000)
    (tmp_path / "source").write_bytes(data)
    command = [sys.executable, "-c", PUT_MANY_TIMES, str(store.root), str(tmp_path / "source")]

    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(3)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()

    assert [process.returncode for process in processes] == [0, 0, 0]
    assert store.read_bytes(sha_of(data), len(data)) == data
    assert len(blobs_in(store)) == 1
    assert leftovers_in(store) == []


ENDLESS_PUT = """
import sys
from pathlib import Path
from gpulayer_broker.store import files, local

def endless(fd, label, error_type):
    while True:
        yield b"x"

files.chunks_of = endless
local.LocalStore(Path(sys.argv[1])).put_file(Path(sys.argv[2]))
"""


def test_a_process_killed_in_the_middle_of_a_put_leaves_no_visible_blob(
    store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(b"x")
    process = subprocess.Popen([sys.executable, "-c", ENDLESS_PUT, str(store.root), str(tmp_path / "source")])
    try:
        wait_until(
            lambda: any(p.stat().st_size for p in leftovers_in(store)),
            PATIENCE_S,
            "the put has begun to write",
        )
    finally:
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL

    assert blobs_in(store) == []
    [leftover] = leftovers_in(store)
    os.utime(leftover, (0, 0))
    store.gc(DAY_S)
    assert leftovers_in(store) == []


def test_a_blob_is_on_disk_before_it_is_visible(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    visible_at_sync: list[int] = []
    fsync = os.fsync

    def look_and_sync(fd: int) -> None:
        visible_at_sync.append(len(blobs_in(store)))
        assert os.fstat(fd).st_size == 4
        fsync(fd)

    monkeypatch.setattr(os, "fsync", look_and_sync)

    store.put_bytes(b"data")

    assert (visible_at_sync, len(blobs_in(store))) == ([0], 1)


def test_gc_removes_what_nobody_used_and_keeps_the_rest(store: LocalStore) -> None:
    old, fresh = store.put_bytes(b"old"), store.put_bytes(b"fresh")
    make_old(store, old)

    report = store.gc(DAY_S)

    assert store.has([old, fresh]) == {old}
    assert (report.blobs, report.total_bytes) == (1, 3)


@pytest.mark.parametrize("use", ["has", "put_bytes", "put_file", "read_bytes"])
def test_a_blob_in_use_is_not_collected(store: LocalStore, tmp_path: Path, use: str) -> None:
    (tmp_path / "file").write_bytes(b"data")
    sha = store.put_bytes(b"data")
    make_old(store, sha)

    uses: dict[str, Callable[[], object]] = {
        "has": lambda: store.has([sha]),
        "put_bytes": lambda: store.put_bytes(b"data"),
        "put_file": lambda: store.put_file(tmp_path / "file"),
        "read_bytes": lambda: store.read_bytes(sha, 4),
    }
    uses[use]()

    assert store.gc(DAY_S).blobs == 0
    assert store.read_bytes(sha, 4) == b"data"


def test_what_a_killed_collector_held_is_put_back_or_removed(store: LocalStore) -> None:
    held, stale = store.put_bytes(b"held"), store.put_bytes(b"stale")
    make_old(store, stale)
    for sha in (held, stale):
        blob_path(store, sha).rename(store.root / "trash" / sha)

    store.gc(DAY_S)

    assert store.has([held, stale]) == {stale}
    assert list((store.root / "trash").iterdir()) == []


def test_a_blob_that_a_collector_holds_can_still_be_read(store: LocalStore) -> None:
    sha = store.put_bytes(b"held")
    blob_path(store, sha).rename(store.root / "trash" / sha)

    assert store.read_bytes(sha, 4) == b"held"


def test_a_blob_that_has_reports_present_survives_a_concurrent_gc(store: LocalStore) -> None:
    shas = [store.put_bytes(str(number).encode()) for number in range(20)]
    done = threading.Event()

    def collect_all_the_time() -> None:
        while not done.is_set():
            store.gc(DAY_S)

    collector = threading.Thread(target=collect_all_the_time)
    collector.start()
    found = turns = 0
    end_s = time.monotonic() + PATIENCE_S
    try:
        # Until the collector and this thread have met in both orders.
        while turns < 2000 or (found in (0, turns) and time.monotonic() < end_s):
            number = turns % len(shas)
            turns += 1
            if store.has([shas[number]]):
                store.put_bytes(str(number).encode())
            else:
                found += 1
            assert store.read_bytes(shas[number], 9) == str(number).encode()
            # The collector may hold this one just now, to look at its time again.
            with contextlib.suppress(FileNotFoundError):
                make_old(store, shas[number])
    finally:
        done.set()
        collector.join(PATIENCE_S)

    assert 0 < found < turns, "the collector and this thread met in both orders"


def test_a_full_disk_is_one_line_and_leaves_nothing_partial(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root (CAP_SYS_ADMIN)")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs CAP_SYS_ADMIN, which this root lacks")
    try:
        store = LocalStore(disk / "store")
        (tmp_path / "big").write_bytes(b"x" * (2 << 20))

        with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)):
            store.put_file(tmp_path / "big")
        with pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)):
            store.put_bytes(b"x" * (2 << 20))

        assert blobs_in(store) == leftovers_in(store) == []
        assert store.read_bytes(store.put_bytes(b"small"), 5) == b"small"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_fetch_onto_a_full_disk_leaves_no_file(store: LocalStore, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("mounting a small file system needs root (CAP_SYS_ADMIN)")
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs CAP_SYS_ADMIN, which this root lacks")
    try:
        sha = store.put_bytes(b"x" * (2 << 20))
        with (
            files.opened(disk, files.FOLDER_FLAGS) as fd,
            pytest.raises(StoreError, match=os.strerror(errno.ENOSPC)),
        ):
            store.fetch(sha, fd, "file", 0o644)
        assert list(disk.iterdir()) == []
        assert store.has([sha]) == set()
    finally:
        subprocess.run(["umount", str(disk)], check=True)
