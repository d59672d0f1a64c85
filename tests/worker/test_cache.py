"""The cache of jobs stays within its bound: what was not used for longest goes first."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gpulayer_worker.cache import trim_cache

KIB = 1024
HOUR_S = 3600


def put(
    folder: Path, name: str, hours_ago: float, size: int = 64 * KIB, read_hours_ago: float = 1000
) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    now_s = time.time()
    os.utime(path, (now_s - read_hours_ago * HOUR_S, now_s - hours_ago * HOUR_S))
    return path


def test_the_files_used_least_lately_go_until_the_rest_fits(tmp_path: Path) -> None:
    files = [put(tmp_path, f"hub/{hours}", hours) for hours in (2, 3, 4, 5)]

    trim_cache(tmp_path, 130 * KIB)

    assert [file.exists() for file in files] == [True, True, False, False]


def test_a_file_that_was_only_read_lately_counts_as_used(tmp_path: Path) -> None:
    old = put(tmp_path, "old", hours_ago=100)
    read = put(tmp_path, "read", hours_ago=200, read_hours_ago=2)

    trim_cache(tmp_path, 65 * KIB)

    assert (old.exists(), read.exists()) == (False, True)


def test_a_cache_within_its_bound_is_left_alone(tmp_path: Path) -> None:
    files = [put(tmp_path, str(number), 1000) for number in range(3)]

    assert trim_cache(tmp_path, 1024 * KIB) == 0
    assert all(file.exists() for file in files)


def test_what_was_just_used_stays_even_over_the_bound(tmp_path: Path) -> None:
    new, old = put(tmp_path, "new", 0), put(tmp_path, "old", 5)

    trim_cache(tmp_path, 0)

    assert (new.exists(), old.exists()) == (True, False)


def test_links_are_left_alone_and_not_followed(tmp_path: Path) -> None:
    outside = put(tmp_path, "outside/data", 1000)
    cache = tmp_path / "cache"
    put(cache, "file", 1000)
    (cache / "link").symlink_to(outside)
    (cache / "folder").symlink_to(outside.parent)

    trim_cache(cache, 0)

    assert outside.exists()
    assert (cache / "link").is_symlink()
    assert not (cache / "file").exists()
