"""The disk of the private set-up is full in the middle of a map: nothing is lost, one line says it, and it goes on.

The disk is a small tmpfs, which needs root; somebody else's file takes every byte that comes free.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import gpulayer as gl
from gpulayer import private, session
from gpulayer.cli import run
from gpulayer_broker.folders import locate_folders
from tests.reliability.set_up import ALL_S, SERVICES, killed_of, private_set_up, processes_of_set_up, service
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(600)
COUNT = 300
DISK_MIB = 24
BLOCK_BYTES = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=700", "gpulayer-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root and mount")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, disk: Path) -> Iterator[Path]:
    with private_set_up(disk / "state", monkeypatch) as state:
        yield state


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """No room on the disk meanwhile, whatever others free."""
    file, over = disk / "filler", threading.Event()

    def fill() -> None:
        with open(file, "ab", buffering=0) as filler:
            while not over.wait(0.001):
                with suppress(OSError):
                    while True:
                        filler.write(bytes(BLOCK_BYTES))

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)
        file.unlink()


def square(n: int, folder: str) -> int:
    import time
    from pathlib import Path as Place

    with open(Place(folder, "calls"), "a") as calls:
        calls.write(f"{n}\n")
    time.sleep(0.02)
    return n * n


def writes() -> bool:
    return bool(private.status()["server"]["writes"])


def the_line(capsys: pytest.CaptureFixture[str], command: list[str]) -> str:
    """What a command that is refused says, which else waits a little for what passes."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as hurry:
        hurry.setattr(session, "PATIENCE_S", 0.5)
        assert run(command) == 69
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_map_outlives_a_full_disk_and_the_death_of_its_server_meanwhile(
    isolation: str,
    state: Path,
    disk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls_file = tmp_path / "calls"
    function = gl.remote(square, isolation=isolation)
    assert function.delay(2, str(tmp_path)).result(ALL_S) == 4
    calls = function.starmap([(n, str(tmp_path)) for n in range(COUNT)])
    wait_until(lambda: len(calls_file.read_text().split()) > 20, ALL_S, "calls have begun", every=0.005)
    with filled(disk):
        wait_until(lambda: not writes(), ALL_S, "the server has met the full disk")
        line = the_line(capsys, ["submit", "--detach", "--", "true"])
        assert "cannot write to its disk (free space" in line
        assert "No space left on device" in line
        assert run(["status"]) == 0
        assert "cannot write: its disk is full" in capsys.readouterr().out

        wait_until(lambda: killed_of("server"), PATIENCE_S, "the server is killed")
        wait_until(lambda: private.status()["server"] is None, PATIENCE_S, "and gone")
        line = the_line(capsys, ["submit", "--detach", "--", "true"])
        assert line.startswith(f"gpulayer: the disk of {locate_folders().state} is full (")
        wait_until(
            lambda: "is full (" in locate_folders().supervisor_log.read_text(), PATIENCE_S, "it is logged"
        )

    assert calls.results() == [n * n for n in range(COUNT)]
    assert [service(name) > 0 for name in SERVICES] == [True] * 3
    assert function.delay(7, str(tmp_path)).result(ALL_S) == 49
    assert run(["down"]) == 0
    assert not processes_of_set_up(state)


def test_a_set_up_that_would_start_on_a_full_disk_says_so_and_starts_when_there_is_room(
    state: Path, disk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with filled(disk):
        wait_until(lambda: os.statvfs(disk).f_bavail == 0, PATIENCE_S, "the disk is full")
        line = the_line(capsys, ["submit", "--detach", "--", "true"])

    assert "is full (0 B free): free space there" in line or "cannot be made: No space left on device" in line
    assert gl.remote(square).delay(7, str(tmp_path)).result(ALL_S) == 49
