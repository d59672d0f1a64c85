"""Folders of the private set-up: where they are, and that nobody else can reach into them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from gpulayer_broker.errors import BadStateFolder
from gpulayer_broker.folders import (
    SOCKET_PATH_BYTES,
    locate_folders,
    machine_name,
    make_private_folder,
    state_base,
)


def environ_of(folder: Path) -> dict[str, str]:
    (folder / "run").mkdir(exist_ok=True, mode=0o700)
    return {"GPULAYER_STATE_DIR": str(folder / "state"), "XDG_RUNTIME_DIR": str(folder / "run")}


def test_every_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folders = locate_folders(environ_of(tmp_path)).create()

    for folder in (folders.state.parent, folders.state, folders.queue, folders.store, folders.runtime):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_places_follow_the_environment() -> None:
    assert state_base({"GPULAYER_STATE_DIR": "/a"}) == Path("/a")
    assert state_base({"XDG_STATE_HOME": "/b", "HOME": "/home/u"}) == Path("/b/gpulayer")
    assert state_base({"XDG_STATE_HOME": "b", "HOME": "/home/u"}) == Path("/home/u/.local/state/gpulayer")
    assert state_base({"HOME": "/home/u"}).is_relative_to("/home/u")


def test_a_relative_state_folder_is_refused() -> None:
    with pytest.raises(BadStateFolder, match="absolute"):
        state_base({"GPULAYER_STATE_DIR": "here"})


def test_a_folder_that_others_can_write_is_refused_with_the_command_that_mends_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)

    with pytest.raises(BadStateFolder, match="chmod go-w"):
        make_private_folder(tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a folder to another user")
    os.chown(tmp_path, 12345, 12345)

    with pytest.raises(BadStateFolder, match="belongs to another user"):
        make_private_folder(tmp_path)


def test_a_link_that_another_user_planted_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a link to another user")
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    os.lchown(tmp_path / "link", 12345, 12345)

    with pytest.raises(BadStateFolder, match="link of another user"):
        make_private_folder(tmp_path / "link")


def test_a_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(
        BadStateFolder, match=r"cannot be made: .*: set GPULAYER_STATE_DIR and XDG_RUNTIME_DIR"
    ):
        make_private_folder(tmp_path / "file")


def test_a_long_path_still_has_a_short_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 150)
    deep.mkdir()

    folders = locate_folders(environ_of(deep))

    assert len(os.fsencode(folders.socket)) <= SOCKET_PATH_BYTES
    assert folders.state.is_relative_to(deep)


def test_two_state_folders_have_two_sockets(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    runtime = environ_of(tmp_path)["XDG_RUNTIME_DIR"]
    environs = [{"GPULAYER_STATE_DIR": str(tmp_path / name), "XDG_RUNTIME_DIR": runtime} for name in "ab"]

    assert locate_folders(environs[0]).socket != locate_folders(environs[1]).socket


def test_a_machine_without_an_id_of_its_own_keeps_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpulayer_broker.folders._linux_machine_id", lambda: None)

    first = machine_name(tmp_path)

    assert machine_name(tmp_path) == first
    monkeypatch.setattr("gpulayer_broker.folders.socket.gethostname", lambda: "elsewhere")
    assert machine_name(tmp_path) != first
