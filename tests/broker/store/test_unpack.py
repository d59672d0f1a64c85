"""Unpacking: the tree that was bundled, and nothing outside the folder whatever the list or the folder holds."""

from __future__ import annotations

import gc
import os
import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulayer_broker.errors import BlobCorrupt, BlobMissing, GpulayerError, HostileTree, StoreError
from gpulayer_broker.store.bundle import make_bundle
from gpulayer_broker.store.local import LocalStore
from gpulayer_broker.store.tree import Manifest, file_entry, folder_entry, link_entry
from gpulayer_broker.store.unpack import unpack


def tree_at(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that is below a folder: kind, permissions and content by path."""
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("dir",)
        else:
            found[name] = ("file", stat.S_IMODE(path.stat().st_mode), path.read_bytes())
    return found


def make_source(folder: Path) -> None:
    (folder / "deep/er").mkdir(parents=True)
    (folder / "empty/inner").mkdir(parents=True)
    (folder / "deep/er/ü b\nc").write_bytes(b"one")
    (folder / "deep/tool").write_bytes(b"two")
    (folder / "deep/tool").chmod(0o755)
    (folder / "deep-sibling").write_bytes(b"")
    (folder / "deep/er/up").symlink_to("../tool")
    (folder / "dangling").symlink_to("not/here")
    (folder / "to_folder").symlink_to("deep/er")
    for path in ("deep/er/ü b\nc", "deep-sibling"):
        (folder / path).chmod(0o644)


@pytest.mark.parametrize("exists", [True, False])
def test_an_unpacked_tree_is_the_one_that_was_bundled(
    tmp_path: Path, store: LocalStore, exists: bool
) -> None:
    make_source(tmp_path / "source")
    bundle = make_bundle(tmp_path / "source", store)
    dest = tmp_path / "jobs/one"
    if exists:
        dest.mkdir(parents=True)

    unpack(bundle.manifest, store, dest)

    assert tree_at(dest) == tree_at(tmp_path / "source")
    assert make_bundle(dest, store).digest == bundle.digest


def test_two_trees_share_folders(tmp_path: Path, store: LocalStore) -> None:
    sha = store.put_bytes(b"x")

    unpack(Manifest.of([file_entry("a/source", sha, 1)]), store, tmp_path / "job")
    unpack(Manifest.of([file_entry("a/input", sha, 1)]), store, tmp_path / "job")

    assert set(tree_at(tmp_path / "job")) == {"a", "a/source", "a/input"}


@pytest.mark.parametrize("kind", ["file", "dir", "link"])
def test_a_planted_link_in_place_of_a_folder_is_not_followed(
    tmp_path: Path, store: LocalStore, kind: str
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job/sub").symlink_to(tmp_path / "outside")
    entry = {
        "file": file_entry("sub/x", store.put_bytes(b"x"), 1),
        "dir": folder_entry("sub/x"),
        "link": link_entry("sub/x", "y"),
    }[kind]

    with pytest.raises(StoreError, match=r"'sub': not a folder in"):
        unpack(Manifest.of([entry]), store, tmp_path / "job")

    assert list((tmp_path / "outside").iterdir()) == []


def test_a_planted_link_in_place_of_a_file_is_not_written_through(tmp_path: Path, store: LocalStore) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "job/file").symlink_to(tmp_path / "victim")
    (tmp_path / "job/other").symlink_to(tmp_path / "not_there")

    for name in ("file", "other"):
        with pytest.raises(StoreError, match=f"'{name}': .*there already"):
            unpack(Manifest.of([file_entry(name, store.put_bytes(b"x"), 1)]), store, tmp_path / "job")

    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "not_there").exists()


def test_what_is_there_already_is_not_replaced(tmp_path: Path, store: LocalStore) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job/a").write_text("mine")

    with pytest.raises(StoreError, match="'a': the link cannot be made"):
        unpack(Manifest.of([link_entry("a", "b")]), store, tmp_path / "job")

    assert (tmp_path / "job/a").read_text() == "mine"


def test_a_second_tree_may_replace_files_and_links_but_no_folder(tmp_path: Path, store: LocalStore) -> None:
    (tmp_path / "victim").write_text("mine")
    job = tmp_path / "job"
    (job / "folder").mkdir(parents=True)
    (job / "a").write_text("old")
    (job / "b").symlink_to(tmp_path / "victim")
    (job / "c").write_text("old")
    sha = store.put_bytes(b"new")

    unpack(
        Manifest.of([file_entry("a", sha, 3), file_entry("b", sha, 3), link_entry("c", "a")]),
        store,
        job,
        replace=True,
    )
    with pytest.raises(StoreError, match="'folder': what is there cannot be replaced"):
        unpack(Manifest.of([file_entry("folder", sha, 3)]), store, job, replace=True)

    assert [(job / name).read_text() for name in "abc"] == ["new", "new", "new"]
    assert (tmp_path / "victim").read_text() == "mine"
    assert (job / "c").is_symlink()
    assert (job / "folder").is_dir()


def test_a_folder_that_is_a_link_is_not_unpacked_into(tmp_path: Path, store: LocalStore) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "job").symlink_to(tmp_path / "outside")

    with pytest.raises(StoreError, match="not a folder to unpack into"):
        unpack(Manifest.of([folder_entry("a")]), store, tmp_path / "job")


@pytest.mark.parametrize(
    ("announced_bytes", "words"),
    [
        (0, "larger than the limit of 0 bytes"),
        (9, "larger than the limit of 9 bytes"),
        (11, "10 bytes; the manifest says 11"),
    ],
)
def test_a_file_of_another_size_than_announced_is_refused(
    tmp_path: Path, store: LocalStore, announced_bytes: int, words: str
) -> None:
    manifest = Manifest.of([file_entry("a", store.put_bytes(b"x" * 10), announced_bytes)])

    with pytest.raises(StoreError, match=f"'a': .*{words}"):
        unpack(manifest, store, tmp_path / "job")

    assert tree_at(tmp_path / "job") == {}


def test_a_tree_over_a_limit_is_refused_before_anything_is_written(tmp_path: Path, store: LocalStore) -> None:
    manifest = Manifest.of([file_entry(name, store.put_bytes(b"12345"), 5) for name in "abc"])

    with pytest.raises(HostileTree, match="15 bytes, over the limit of 14"):
        unpack(manifest, store, tmp_path / "job", limit_bytes=14)
    with pytest.raises(HostileTree, match="3 files, over the limit of 2"):
        unpack(manifest, store, tmp_path / "job", limit_files=2)

    assert not (tmp_path / "job").exists()


def test_a_missing_blob_names_the_file_that_needs_it(tmp_path: Path, store: LocalStore) -> None:
    with pytest.raises(BlobMissing, match="'a/b': blob 0000"):
        unpack(Manifest.of([file_entry("a/b", "0" * 64, 1)]), store, tmp_path / "job")


def test_a_file_altered_in_the_store_is_not_unpacked(tmp_path: Path, store: LocalStore) -> None:
    sha = store.put_bytes(b"good")
    (store.root / "blobs" / sha[:2] / sha[2:]).write_bytes(b"evil")

    with pytest.raises(BlobCorrupt, match="'tool': "):
        unpack(Manifest.of([file_entry("tool", sha, 4, executable=True)]), store, tmp_path / "job")

    assert tree_at(tmp_path / "job") == {}


def test_no_descriptor_stays_open(tmp_path: Path, store: LocalStore) -> None:
    make_source(tmp_path / "source")
    gc.collect()
    before = len(os.listdir("/dev/fd"))

    manifest = make_bundle(tmp_path / "source", store).manifest
    unpack(manifest, store, tmp_path / "job")
    with pytest.raises(StoreError):
        unpack(manifest, store, tmp_path / "job")

    assert len(os.listdir("/dev/fd")) <= before


names = st.sampled_from(["a", "b", "c", ".."])
paths = st.lists(names, min_size=1, max_size=4).map("/".join)
planted = st.lists(st.tuples(paths, st.sampled_from(["dir", "file", "out", "up"])), max_size=4)
listed = st.lists(st.tuples(paths, st.sampled_from(["dir", "file", "link"]), paths), max_size=5)


def plant(job: Path, outside: Path, things: list[tuple[str, str]]) -> None:
    """Fill the job's folder as a hostile earlier job might have, staying within it."""
    for path, kind in things:
        place = job / path.replace("..", "d")
        if place.exists() or place.is_symlink() or not place.parent.resolve().is_relative_to(job):
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if kind == "dir":
            place.mkdir()
        elif kind == "file":
            place.write_text("planted")
        else:
            place.symlink_to(outside if kind == "out" else "..")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(planted, listed, st.booleans())
def test_nothing_outside_the_folder_ever_changes(
    tmp_path_factory: pytest.TempPathFactory,
    store: LocalStore,
    things: list[tuple[str, str]],
    entries: list[tuple[str, str, str]],
    replace: bool,
) -> None:
    base = tmp_path_factory.mktemp("case").resolve()
    job, outside = base / "mid/job", base / "outside"
    job.mkdir(parents=True)
    outside.mkdir()
    (outside / "a").write_text("mine")
    plant(job, outside, things)
    before = {path: entry for path, entry in tree_at(base).items() if not path.startswith("mid/job/")}
    sha = store.put_bytes(b"theirs")

    try:
        made = {
            "file": lambda path, _: file_entry(path, sha, 6),
            "dir": lambda path, _: folder_entry(path),
            "link": link_entry,
        }
        unpack(
            Manifest.of(made[kind](path, target) for path, kind, target in entries),
            store,
            job,
            replace=replace,
        )
    except GpulayerError as error:
        assert "\n" not in str(error)  # noqa: PT017

    after = {path: entry for path, entry in tree_at(base).items() if not path.startswith("mid/job/")}
    assert after == before
