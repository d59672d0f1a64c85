"""Bundles: what travels of a folder, what is refused and in which words, and what is sent a second time."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gpulayer_broker.errors import BadSource, GpulayerError, SourceTooLarge
from gpulayer_broker.store import bundle as bundles
from gpulayer_broker.store.bundle import make_bundle, ship_files
from gpulayer_broker.store.local import LocalStore
from gpulayer_broker.store.unpack import load_manifest


def write(path: Path, data: bytes = b"data", mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def refused(action: Callable[[], object], error: type[GpulayerError] = BadSource) -> str:
    with pytest.raises(error) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_travels_with_its_modes_links_and_empty_folders(source: Path, store: LocalStore) -> None:
    write(source / "run.sh", b"#!/bin/sh\n", 0o755)
    write(source / "data/ü name\n.txt")
    (source / "empty").mkdir()
    (source / "data/script").symlink_to("../run.sh")

    bundle = make_bundle(source, store)

    assert [(entry.path, entry.kind, oct(entry.mode), entry.target) for entry in bundle.manifest.entries] == [
        ("data/script", "link", "0o777", "../run.sh"),
        ("data/ü name\n.txt", "file", "0o644", ""),
        ("empty", "dir", "0o755", ""),
        ("run.sh", "file", "0o755", ""),
    ]
    assert (bundle.total_bytes, bundle.new_blobs, bundle.skipped) == (14, 2, ())


def test_the_manifest_is_in_the_store_by_its_digest(source: Path, store: LocalStore) -> None:
    write(source / "a")

    bundle = make_bundle(source, store)

    assert load_manifest(bundle.digest, store) == bundle.manifest


def test_a_second_bundle_puts_only_what_changed(
    source: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        write(source / f"f{number}", str(number).encode())
    first = make_bundle(source, store)
    write(source / "f7", b"changed")
    put: list[Path | int] = []
    put_file = store.put_file

    def count_and_put(source: Path | int) -> tuple[str, int]:
        put.append(source)
        return put_file(source)

    monkeypatch.setattr(store, "put_file", count_and_put)

    second = make_bundle(source, store)

    assert (first.new_blobs, second.new_blobs, len(put)) == (20, 1, 1)
    assert first.digest != second.digest


def test_equal_files_are_one_blob(source: Path, store: LocalStore) -> None:
    write(source / "a")
    write(source / "b")

    assert make_bundle(source, store).new_blobs == 1


def test_hard_links_become_copies(source: Path, store: LocalStore) -> None:
    write(source / "a")
    os.link(source / "a", source / "b")

    manifest = make_bundle(source, store).manifest

    assert [(entry.path, entry.kind) for entry in manifest.entries] == [("a", "file"), ("b", "file")]


def test_sockets_and_pipes_are_left_out_and_said(
    source: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source / "a")
    os.mkfifo(source / "pipe")
    monkeypatch.chdir(source)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")

    bundle = make_bundle(source, store)

    assert bundle.skipped == ("'pipe': a named pipe; left out", "'sock': a socket; left out")
    assert [entry.path for entry in bundle.manifest.entries] == ["a"]


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside"])
def test_a_link_out_of_the_tree_is_refused_with_what_to_do(
    source: Path, store: LocalStore, target: str
) -> None:
    (source / "sub").mkdir()
    (source / "sub/link").symlink_to(Path("..") / target if target.startswith(".") else target)

    line = refused(lambda: make_bundle(source, store))

    assert "'sub/link': a link" in line
    assert repr(target) in line or repr(f"../{target}") in line
    assert f"list it in {source}/.gpulayerignore" in line


def test_a_link_out_of_the_tree_that_is_ignored_is_no_problem(source: Path, store: LocalStore) -> None:
    (source / "link").symlink_to("/etc/passwd")
    write(source / ".gpulayerignore", b"link\n")

    assert [entry.path for entry in make_bundle(source, store).manifest.entries] == [".gpulayerignore"]


@pytest.mark.parametrize(
    ("name", "words"), [(b"caf\xe9", "a name that is not UTF-8"), (b"a\\b", "a backslash in the path")]
)
def test_a_name_that_cannot_travel_is_refused(
    source: Path, store: LocalStore, name: bytes, words: str
) -> None:
    (source / os.fsdecode(name)).write_text("")

    line = refused(lambda: make_bundle(source, store))

    assert words in line
    assert line.isprintable()


def test_a_tree_that_is_too_deep_is_refused_before_it_uses_up_the_descriptors(
    source: Path, store: LocalStore
) -> None:
    write(source / "/".join(["d"] * 400) / "f")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        line = refused(lambda: make_bundle(source, store))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert "deeper than 64 folders" in line


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.write_text("")], ids=["missing", "file"]
)
def test_a_source_that_is_no_folder_is_named(
    tmp_path: Path, store: LocalStore, make: Callable[[Path], object]
) -> None:
    make(tmp_path / "gone")

    assert str(tmp_path / "gone") in refused(lambda: make_bundle(tmp_path / "gone", store))


@pytest.mark.skipif(os.geteuid() != 0, reason="dropping to another user needs root")
@pytest.mark.parametrize("locked", ["", "sub", "sub/file"])
def test_what_cannot_be_read_is_named(store: LocalStore, locked: str) -> None:
    # Not below pytest's own folder, which no other user may enter.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        source = Path(name) / "source"
        write(source / "sub/file")
        (source / locked).chmod(0o000)

        os.seteuid(65534)
        try:
            line = refused(lambda: make_bundle(source, store))
        finally:
            os.seteuid(0)

    assert (repr(locked) if locked else str(source)) in line
    assert locked == "" or line.endswith(("or leave it out", ".gpulayerignore"))
    assert "Permission denied" in line


def test_too_many_bytes_are_refused_before_anything_is_stored(source: Path, store: LocalStore) -> None:
    write(source / "train.py", b"x" * 10)
    write(source / "model.bin", b"x" * 3000)
    write(source / "runs/one/weights.pt", b"x" * 5000)
    write(source / "runs/one/log", b"x" * 10)
    for number in range(10):
        write(source / f"data/{number}", b"x" * 1000)

    line = refused(lambda: make_bundle(source, store, limit_bytes=1024), SourceTooLarge)

    assert line == (
        f"{source}: 17.6 kB, over the limit of 1.0 kB; largest: data/ 9.8 kB, runs/one/weights.pt 4.9 kB,"
        " model.bin 2.9 kB, train.py 10 B;"
        f" list what the job does not need in {source}/.gpulayerignore"
    )
    assert [path for path in (store.root / "blobs").rglob("*") if path.is_file()] == []


def test_too_many_files_are_refused_with_their_folders(source: Path, store: LocalStore) -> None:
    for number in range(12):
        write(source / f"cache/{number}")
    write(source / "a")

    line = refused(lambda: make_bundle(source, store, limit_files=10), SourceTooLarge)

    assert "13 files, over the limit of 10; largest: cache/ 12, a 1;" in line


def test_a_folder_far_over_the_limit_is_not_walked_to_its_end(source: Path, store: LocalStore) -> None:
    for number in range(50):
        write(source / f"{number}")

    line = refused(lambda: make_bundle(source, store, limit_files=5), SourceTooLarge)

    assert "more than" in line


def test_a_file_swapped_for_a_link_meanwhile_leaks_nothing(
    source: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "secret", b"secret")
    write(source / "file")
    survey = bundles.survey

    def swap_after_survey(*arguments: object) -> object:
        surveyed = survey(*arguments)  # type: ignore[arg-type]
        (source / "file").unlink()
        (source / "file").symlink_to(tmp_path / "secret")
        return surveyed

    monkeypatch.setattr(bundles, "survey", swap_after_survey)

    assert "'file': cannot be read" in refused(lambda: make_bundle(source, store))


def test_a_folder_swapped_for_a_link_meanwhile_leaks_nothing(
    source: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "outside/file", b"secret")
    write(source / "sub/file")
    survey = bundles.survey

    def swap_after_survey(*arguments: object) -> object:
        surveyed = survey(*arguments)  # type: ignore[arg-type]
        (source / "sub").rename(source / "moved")
        (source / "sub").symlink_to(tmp_path / "outside")
        return surveyed

    monkeypatch.setattr(bundles, "survey", swap_after_survey)

    assert "'sub/file': cannot be read" in refused(lambda: make_bundle(source, store))


def test_a_file_that_is_written_between_hash_and_put_travels_as_it_was_put(
    source: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source / "file", b"before")
    has = store.has

    def write_then_ask(shas: set[str], sizes: Mapping[str, int]) -> set[str]:
        write(source / "file", b"after!!")
        return has(shas, sizes)

    monkeypatch.setattr(store, "has", write_then_ask)

    [entry] = make_bundle(source, store).manifest.entries

    assert (store.read_bytes(entry.sha256, 10), entry.size) == (b"after!!", 7)


def test_of_equal_files_one_that_changes_meanwhile_does_not_cost_the_other(
    source: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(source / "a", b"equal")
    write(source / "b", b"equal")
    put_file = store.put_file
    changed: list[str] = []

    def change_then_put(fd: Path | int) -> tuple[str, int]:
        if not changed:
            first = source / ("a" if os.fstat(int(str(fd))).st_ino == (source / "a").stat().st_ino else "b")
            first.write_bytes(b"other")
            changed.append(first.name)
        return put_file(fd)

    monkeypatch.setattr(store, "put_file", change_then_put)

    bundle = make_bundle(source, store)

    contents = {entry.path: store.read_bytes(entry.sha256, 5) for entry in bundle.manifest.entries}
    assert contents == {"a": b"equal", "b": b"equal"} | {changed[0]: b"other"}
    assert bundle.new_blobs == 2


def test_named_files_and_folders_travel_under_their_destinations(source: Path, store: LocalStore) -> None:
    write(source / "a.csv")
    write(source / "d/.git/config")
    write(source / "d/x.csv", b"x")
    (source / "void").mkdir()
    (source / "link.csv").symlink_to("a.csv")

    bundle = ship_files(
        {
            "in/a.csv": source / "a.csv",
            "deep/d": source / "d",
            "void": source / "void",
            "l.csv": source / "link.csv",
        },
        store,
    )

    assert [(entry.path, entry.kind) for entry in bundle.manifest.entries] == [
        ("deep/d/.git/config", "file"),
        ("deep/d/x.csv", "file"),
        ("in/a.csv", "file"),
        ("l.csv", "file"),
        ("void", "dir"),
    ]


def test_a_named_folder_may_go_to_the_top(source: Path, store: LocalStore) -> None:
    write(source / "d/x")

    assert [entry.path for entry in ship_files({".": source / "d"}, store).manifest.entries] == ["x"]


@pytest.mark.parametrize("dest", ["/abs", "../up", "a/../../b", "", "a//b"])
def test_an_input_goes_below_the_jobs_folder_alone(source: Path, store: LocalStore, dest: str) -> None:
    write(source / "a")

    line = refused(lambda: ship_files({dest: source / "a"}, store))

    assert f"{source}/a: it cannot go to {dest!r}" in line


def test_a_missing_input_is_named(source: Path, store: LocalStore) -> None:
    assert f"input {source}/gone: cannot be read" in refused(
        lambda: ship_files({"a": source / "gone"}, store)
    )


def test_an_input_that_is_no_file_is_refused(source: Path, store: LocalStore) -> None:
    os.mkfifo(source / "pipe")

    assert "neither a regular file nor a folder" in refused(lambda: ship_files({"a": source / "pipe"}, store))


def test_two_inputs_for_one_place_are_refused(source: Path, store: LocalStore) -> None:
    write(source / "d/x")
    write(source / "y")

    line = refused(lambda: ship_files({"to": source / "d", "to/x": source / "y"}, store))

    assert "'to/x': stands twice" in line


def test_a_link_out_of_an_input_folder_is_refused(source: Path, store: LocalStore) -> None:
    (source / "d").mkdir()
    (source / "d/up").symlink_to("../secret")

    assert "'in/up': a link that leaves the tree" in refused(lambda: ship_files({"in": source / "d"}, store))
