"""Scratch folders: new and empty for each job, whoever had them before; what a job changed is never handed on."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from gpulayer_worker.scratch import (
    FOLDERS,
    SPARES,
    TEMPORARY_PATH_BYTES,
    Scratch,
    Scratches,
    folder_in,
)


@pytest.fixture
def scratches(tmp_path: Path) -> Scratches:
    (tmp_path / "scratch").mkdir()
    return Scratches(tmp_path / "scratch", tmp_path / "links")


def inode(scratch: Scratch) -> int:
    return os.stat(scratch.root).st_ino


def contents(scratch: Scratch) -> list[str]:
    return sorted(str(path.relative_to(scratch.root)) for path in Path(scratch.root).rglob("*"))


def modes(scratch: Scratch) -> list[int]:
    return [os.stat(folder_in(scratch, folder)).st_mode for folder in FOLDERS]


def test_folders_that_were_left_empty_serve_the_next_job(scratches: Scratches) -> None:
    first = scratches.make("j_1", 1)
    before, fresh = inode(first), modes(first)
    Path(first.file("function")).write_bytes(b"a pickle")
    scratches.give_back(first)

    second = scratches.make("j_2", 1)

    assert inode(second) == before
    assert not os.path.exists(first.root)
    assert contents(second) == ["home", "work", "work/outputs"]
    assert modes(second) == fresh


def _file_in_work(scratch: Scratch) -> None:
    Path(scratch.work, "left").touch()


def _file_in_outputs(scratch: Scratch) -> None:
    Path(scratch.outputs, "left").touch()


def _file_at_home(scratch: Scratch) -> None:
    Path(scratch.home, ".left").touch()


def _folder_beside(scratch: Scratch) -> None:
    Path(scratch.root, "left").mkdir()


def _link_beside(scratch: Scratch) -> None:
    os.symlink("/", scratch.file("left"))


def _other_mode(scratch: Scratch) -> None:
    os.chmod(scratch.home, 0o700 if os.stat(scratch.home).st_mode & 0o777 != 0o700 else 0o755)


def _no_outputs(scratch: Scratch) -> None:
    os.rmdir(scratch.outputs)


def _link_for_home(scratch: Scratch) -> None:
    os.rmdir(scratch.home)
    os.symlink("/", scratch.home)


def _no_root(scratch: Scratch) -> None:
    os.rename(scratch.root, f"{scratch.root}-elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        _file_in_work,
        _file_in_outputs,
        _file_at_home,
        _folder_beside,
        _link_beside,
        _other_mode,
        _no_outputs,
        _link_for_home,
        _no_root,
    ],
)
def test_what_a_job_changed_is_not_handed_on(scratches: Scratches, change: Callable[[Scratch], None]) -> None:
    first = scratches.make("j_1", 1)
    kept = inode(first)
    fresh = modes(first)
    holder = os.open(
        first.root, os.O_RDONLY
    )  # while it is open, the number of a removed folder is not given again
    try:
        change(first)
        scratches.give_back(first)
        second = scratches.make("j_2", 1)

        assert inode(second) != kept
        assert not os.path.exists(first.root)
        assert contents(second) == ["home", "work", "work/outputs"]
        assert modes(second) == fresh
    finally:
        os.close(holder)


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="attributes of files: Linux only")
def test_a_folder_with_attributes_is_not_handed_on(scratches: Scratches) -> None:
    first = scratches.make("j_1", 1)
    kept = inode(first)
    holder = os.open(first.root, os.O_RDONLY)
    try:
        os.setxattr(first.work, "user.note", b"x")
        scratches.give_back(first)

        assert inode(scratches.make("j_2", 1)) != kept
    finally:
        os.close(holder)


def test_a_folder_of_the_same_attempt_is_made_anew(scratches: Scratches) -> None:
    Path(scratches.make("j_1", 1).work, "left").touch()

    assert contents(scratches.make("j_1", 1)) == ["home", "work", "work/outputs"]


def _file(place: Path) -> None:
    place.touch()


def _link(place: Path) -> None:
    place.symlink_to("/")


def _open_folder(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)


def _full_folder(place: Path) -> None:
    (place / "work" / "left").mkdir(parents=True)


@pytest.mark.parametrize("put", [_file, _link, _open_folder, _full_folder])
def test_whatever_stands_in_the_place_of_an_attempts_folder_is_not_in_it(
    scratches: Scratches, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    scratches.give_back(scratches.make("j_0", 1))
    put(tmp_path / "scratch" / "j_1.1")

    scratch = scratches.make("j_1", 1)

    assert not os.path.islink(scratch.root)
    assert contents(scratch) == ["home", "work", "work/outputs"]
    assert stat.S_IMODE(os.stat(scratch.root).st_mode) == 0o700
    assert list((tmp_path / "spare").iterdir()) == []


def test_so_many_are_kept_and_none_of_another_worker_before(scratches: Scratches, tmp_path: Path) -> None:
    for scratch in [scratches.make(f"j_{number}", 1) for number in range(SPARES + 3)]:
        scratches.give_back(scratch)
    assert len(list((tmp_path / "spare").iterdir())) == SPARES
    assert list((tmp_path / "scratch").iterdir()) == []

    Scratches(tmp_path / "scratch", tmp_path / "links")

    assert not (tmp_path / "spare").exists()


def test_a_folder_for_temporary_files_has_a_name_that_sockets_fit_into(tmp_path: Path) -> None:
    base = tmp_path.joinpath(*["a-long-name-of-a-folder"] * 4)
    base.mkdir(parents=True)
    with TemporaryDirectory(dir="/tmp") as short:
        scratches = Scratches(base, Path(short, "links"))
        scratch = scratches.make("j_0123456789ab", 1)

        name = scratches.make_temporary(scratch)

        assert len(name) <= TEMPORARY_PATH_BYTES < len(scratch.temporary)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{name}/listener-0123abcd")
        assert Path(scratch.temporary, "listener-0123abcd").is_socket()
        scratches.give_back(scratch)
        assert os.listdir(Path(short, "links")) == []
        assert not os.path.exists(scratch.root)


def test_short_names_of_another_worker_before_are_removed(tmp_path: Path) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "j_1.1").symlink_to("/nowhere")

    Scratches(tmp_path / "scratch", tmp_path / "links")

    assert not (tmp_path / "links").exists()
