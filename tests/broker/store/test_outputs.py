"""Outputs: what is taken out of a folder that a job left in any state."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpulayer_broker.errors import BadSource, StoreError
from gpulayer_broker.store import outputs
from gpulayer_broker.store.bundle import Bundle, make_bundle
from gpulayer_broker.store.local import LocalStore
from gpulayer_broker.store.outputs import collect, list_new_files
from gpulayer_broker.store.tree import Manifest
from gpulayer_broker.store.unpack import unpack


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def write(path: Path, text: str = "data") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def paths_of(bundle: Bundle) -> list[str]:
    return [entry.path for entry in bundle.manifest.entries]


def test_a_whole_folder_is_collected_ignore_files_or_not(job: Path, store: LocalStore) -> None:
    for path in (".gitignore", "a.log", "venv/x", "sub/b"):
        write(job / path, "*.log")
    (job / "empty").mkdir()
    (job / "link").symlink_to("sub/b")

    bundle = collect(job, None, store)

    assert paths_of(bundle) == [".gitignore", "a.log", "empty", "link", "sub/b", "venv/x"]
    assert bundle.skipped == ()


def test_collected_files_unpack_again(job: Path, store: LocalStore, tmp_path: Path) -> None:
    write(job / "sub/model", "weights")

    unpack(collect(job, None, store).manifest, store, tmp_path / "back")

    assert (tmp_path / "back/sub/model").read_text() == "weights"


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["*.csv"], ["a.csv"]),
        (["**/*.csv"], ["a.csv", "sub/b.csv", "sub/deep/c.csv"]),
        (["sub/*.csv"], ["sub/b.csv"]),
        (["./sub/"], ["sub/b.csv", "sub/deep/c.csv", "sub/empty"]),
        (["sub"], ["sub/b.csv", "sub/deep/c.csv", "sub/empty"]),
        (["!odd", "#odd"], ["!odd", "#odd"]),
        (["a.csv", "sub/deep/*"], ["a.csv", "sub/deep/c.csv"]),
        (["nothing"], []),
        ([], []),
    ],
)
def test_patterns_choose_what_is_collected(
    job: Path, store: LocalStore, patterns: list[str], expected: list[str]
) -> None:
    for path in ("a.csv", "sub/b.csv", "sub/deep/c.csv", "other", "!odd", "#odd"):
        write(job / path)
    (job / "sub/empty").mkdir()

    assert paths_of(collect(job, patterns, store)) == expected


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", "a/../../b", "", "."])
def test_a_pattern_that_points_elsewhere_is_refused(job: Path, store: LocalStore, pattern: str) -> None:
    with pytest.raises(BadSource, match="output pattern"):
        collect(job, [pattern], store)


def test_what_cannot_travel_is_left_out_and_said(job: Path, store: LocalStore) -> None:
    write(job / "good")
    (job / "passwd").symlink_to("/etc/passwd")
    (job / "up").symlink_to("../secret")
    os.mkfifo(job / "pipe")
    write(job / os.fsdecode(b"caf\xe9"))
    write(job / "/".join(["d"] * 70))

    bundle = collect(job, None, store)

    assert paths_of(bundle) == ["good"]
    assert len(bundle.skipped) == 5
    assert all(line.endswith("left out") and "\n" not in line for line in bundle.skipped)
    assert any("'passwd': a link to the absolute path '/etc/passwd'" in line for line in bundle.skipped)


def test_of_many_things_left_out_a_hundred_are_named(job: Path, store: LocalStore) -> None:
    for number in range(120):
        (job / f"l{number}").symlink_to("/etc/passwd")

    skipped = collect(job, None, store).skipped

    assert (len(skipped), skipped[-1]) == (101, "20 more left out")


def test_a_folder_that_the_job_made_a_link_is_not_followed(
    job: Path, store: LocalStore, tmp_path: Path
) -> None:
    write(tmp_path / "secret/file")
    (job / "outputs").symlink_to(tmp_path / "secret")

    bundle = collect(job / "outputs", None, store)

    assert paths_of(bundle) == []
    assert "without following a link" in bundle.skipped[0]


def test_a_missing_folder_has_nothing_in_it(job: Path, store: LocalStore) -> None:
    bundle = collect(job / "outputs", None, store)

    assert (paths_of(bundle), bundle.skipped) == ([], ())


def test_a_file_that_never_holds_still_is_left_out(
    job: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(job / "log")
    write(job / "result", "done")
    log = (job / "log").stat().st_ino
    pread = os.pread

    def append_and_read(fd: int, length: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == log:
            with (job / "log").open("a") as file:
                file.write("+")
            return b""
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", append_and_read)

    bundle = collect(job, None, store)

    assert paths_of(bundle) == ["result"]
    assert "'log': changed while it was read" in bundle.skipped[0]


def test_outputs_over_the_limit_name_the_largest(job: Path, store: LocalStore) -> None:
    write(job / "ckpt/huge", "x" * 5000)
    write(job / "small")

    with pytest.raises(
        StoreError, match=r"outputs: .* over the limit of .*; largest: ckpt/huge .*, small 4 B"
    ):
        collect(job, None, store, limit_bytes=1000)


def shipped(job: Path, store: LocalStore, tmp_path: Path) -> Manifest:
    write(tmp_path / "source/train.py", "code")
    write(tmp_path / "source/metrics.csv", "1,2")
    manifest = make_bundle(tmp_path / "source", store).manifest
    unpack(manifest, store, job)
    return manifest


def test_an_untouched_source_has_no_new_files(job: Path, store: LocalStore, tmp_path: Path) -> None:
    assert list_new_files(job, shipped(job, store, tmp_path)) == []


def test_new_and_changed_files_are_listed_and_caches_are_not(
    job: Path, store: LocalStore, tmp_path: Path
) -> None:
    source = shipped(job, store, tmp_path)
    for path in ("model.pt", "runs/a/log", "__pycache__/train.pyc", ".gitignore"):
        write(job / path, "*")
    write(job / "metrics.csv", "3,4")
    write(job / "train.py", "code, longer")
    (job / "link").symlink_to("model.pt")

    assert list_new_files(job, source) == [".gitignore", "metrics.csv", "model.pt", "runs/a/log", "train.py"]


def test_the_list_of_new_files_is_bounded(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        write(job / str(number))
    monkeypatch.setattr(outputs, "_LISTED_FILES", 10)

    assert len(list_new_files(job, Manifest.of([]))) == 10


def test_a_job_folder_that_is_gone_has_no_new_files(job: Path) -> None:
    assert list_new_files(job / "gone", Manifest.of([])) == []
