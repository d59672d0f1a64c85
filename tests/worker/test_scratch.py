"""Scratch folders: new and empty for each job, whoever had them before; what a job changed is never handed on."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from gpulayer_worker.scratch import (
    FOLDERS,
    SETTLED_S,
    SPARES,
    TEMPORARY_PATH_BYTES,
    Scratch,
    Scratches,
    folder_in,
)
from tests.support import PATIENCE_S, wait_until


class Clock:
    """Stands until somebody moves it."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def scratches(tmp_path: Path, clock: Clock) -> Scratches:
    (tmp_path / "scratch").mkdir()
    return Scratches(tmp_path / "scratch", tmp_path / "links", clock)


def long_known(scratches: Scratches, clock: Clock) -> Scratch:
    """A folder that was found empty long ago."""
    known = scratches.make("j_0", 1)
    changed_ns = os.stat(known.home).st_ctime_ns
    scratches.give_back(known)
    clock.now_s += SETTLED_S + 1

    def moved_on() -> bool:
        os.utime(scratches.base)
        return os.stat(scratches.base).st_ctime_ns > changed_ns

    wait_until(moved_on, PATIENCE_S, "the file system's clock goes on")
    return scratches.make("j_1", 1)


def first_of_all(scratches: Scratches, _: Clock) -> Scratch:
    return scratches.make("j_1", 1)


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


def _another_home(scratch: Scratch) -> None:
    """As where something is mounted over it: the same to look at, and another folder."""
    mode = os.stat(scratch.home).st_mode
    os.rename(scratch.home, f"{scratch.root}-home")
    os.mkdir(scratch.home)
    os.chmod(scratch.home, mode)


def _no_outputs(scratch: Scratch) -> None:
    os.rmdir(scratch.outputs)


def _link_for_home(scratch: Scratch) -> None:
    os.rmdir(scratch.home)
    os.symlink("/", scratch.home)


def _no_root(scratch: Scratch) -> None:
    os.rename(scratch.root, f"{scratch.root}-elsewhere")


@pytest.mark.parametrize("make", [first_of_all, long_known])
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
        _another_home,
        _link_for_home,
        _no_root,
    ],
)
def test_what_a_job_changed_is_not_handed_on(
    scratches: Scratches,
    clock: Clock,
    change: Callable[[Scratch], None],
    make: Callable[[Scratches, Clock], Scratch],
) -> None:
    first = make(scratches, clock)
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
@pytest.mark.parametrize("make", [first_of_all, long_known])
def test_a_folder_with_attributes_is_not_handed_on(
    scratches: Scratches, clock: Clock, make: Callable[[Scratches, Clock], Scratch]
) -> None:
    first = make(scratches, clock)
    kept = inode(first)
    holder = os.open(first.root, os.O_RDONLY)
    try:
        os.setxattr(first.work, "user.note", b"x")
        scratches.give_back(first)

        assert inode(scratches.make("j_2", 1)) != kept
    finally:
        os.close(holder)


def looks_into(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that are looked into from now on."""
    looked, listdir = list[str](), os.listdir

    def noted(path: str) -> list[str]:
        looked.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", noted)
    return looked


def test_folders_below_are_not_looked_into_while_nothing_is_done_to_them(
    scratches: Scratches, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = long_known(scratches, clock)
    looked = looks_into(monkeypatch)

    scratches.give_back(scratch)
    assert looked == [scratch.root]
    kept = scratches.make("j_2", 1)
    _file_in_work(kept)
    os.unlink(f"{kept.work}/left")
    scratches.give_back(kept)

    assert set(looked[1:]) == {kept.root, kept.work, kept.outputs, kept.home}
    assert contents(scratches.make("j_3", 1)) == ["home", "work", "work/outputs"]


def stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the time of a last change is always the same."""
    lstat = os.lstat

    def in_steps(path: str, **options: Any) -> SimpleNamespace:
        facts = lstat(path, **options)
        names = ("st_mode", "st_uid", "st_dev", "st_ino")
        return SimpleNamespace(st_ctime_ns=0, **{name: getattr(facts, name) for name in names})

    monkeypatch.setattr(os, "lstat", in_steps)


def test_what_a_job_left_within_one_step_of_the_file_systems_clock_is_seen(
    scratches: Scratches, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratches.make("j_0", 1)  # by which it is known that changes are told here
    stands_still(monkeypatch)
    scratches.give_back(scratches.make("j_1", 1))
    clock.now_s += SETTLED_S
    second = scratches.make("j_2", 1)
    _file_in_work(second)

    scratches.give_back(second)

    assert contents(scratches.make("j_3", 1)) == ["home", "work", "work/outputs"]


def test_where_the_file_system_does_not_tell_changes_what_a_job_left_is_seen(
    scratches: Scratches, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_still(monkeypatch)
    scratches.give_back(scratches.make("j_1", 1))
    clock.now_s += 10 * SETTLED_S
    second = scratches.make("j_2", 1)
    _file_in_work(second)

    scratches.give_back(second)

    assert contents(scratches.make("j_3", 1)) == ["home", "work", "work/outputs"]


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
