"""Locks of processes: held for life, also by a child that inherits them, and naming who holds them."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpulayer_broker.locks import block_until_free, holder_pid, is_held, try_lock, wait_lock, wait_until_free
from tests.support import PATIENCE_S


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_one_holder_excludes_another(path: Path) -> None:
    first = try_lock(path)

    assert first is not None
    assert is_held(path)
    assert try_lock(path) is None
    first.close()
    assert not is_held(path)


def test_sharers_exclude_only_an_exclusive_holder(path: Path) -> None:
    one, two = try_lock(path, shared=True), try_lock(path, shared=True)

    assert one is not None
    assert two is not None
    assert try_lock(path) is None
    one.close()
    two.close()


def test_a_child_that_inherits_a_lock_holds_it_until_its_end(path: Path) -> None:
    lock = try_lock(path)
    assert lock is not None
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock.descriptor,)
    ) as child:
        lock.record_pid(child.pid)
        lock.close()

        assert holder_pid(path) == child.pid
        child.communicate(b"\n", timeout=PATIENCE_S)
    assert wait_until_free(path, PATIENCE_S)
    assert holder_pid(path) is None


def test_a_new_holder_is_not_taken_for_the_former(path: Path) -> None:
    first = try_lock(path)
    assert first is not None
    first.record_pid(12345)
    first.close()

    second = try_lock(path)
    assert second is not None
    assert holder_pid(path) is None
    second.record_pid(os.getpid())
    assert holder_pid(path) == os.getpid()
    second.close()


def test_a_wait_ends_at_its_deadline_or_with_the_lock(path: Path) -> None:
    first = try_lock(path)
    assert first is not None
    assert wait_lock(path, 0.05) is None

    with ThreadPoolExecutor(1) as pool:
        for wait in (lambda: wait_lock(path, PATIENCE_S), lambda: block_until_free(path)):
            pending = pool.submit(wait)
            with pytest.raises(TimeoutError):
                pending.result(0.1)
            first.close()
            got = pending.result(PATIENCE_S)
            assert got is not None
            first = got
    first.close()


def test_a_lock_behind_a_planted_link_is_refused(path: Path) -> None:
    path.symlink_to("/etc/hostname")

    with pytest.raises(OSError, match="symbolic links"):
        try_lock(path)


def test_the_next_holder_s_id_takes_the_room_of_the_last_one_s(path: Path) -> None:
    """On a full disk a lock file cannot grow, and nobody could tell of a server whose id is not known."""
    first = block_until_free(path)
    first.record_pid(4_194_304)
    length = path.stat().st_size
    first.close()
    second = block_until_free(path)

    assert holder_pid(path) is None
    assert path.stat().st_size == length
    second.record_pid(7)
    assert holder_pid(path) == 7
    assert path.stat().st_size == length
    second.close()
