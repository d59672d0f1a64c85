"""What a job's folders take of the disk is measured as the file system has it, and told once when it is too much."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from gpulayer_worker.bounds import Bound, Bounds, used_bytes
from tests.support import PATIENCE_S, wait_until

MB = 1_000_000


def note(told: list[tuple[int, int]], size_bytes: int, limit_bytes: int) -> None:
    told.append((size_bytes, limit_bytes))


def test_what_is_written_counts_and_holes_and_second_names_do_not(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "full").write_bytes(b"x" * MB)
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(500 * MB)
    os.link(tmp_path / "below" / "full", tmp_path / "again")
    (tmp_path / "link").symlink_to("/")

    assert MB <= used_bytes(tmp_path) < 2 * MB


def test_a_folder_that_is_not_there_takes_nothing(tmp_path: Path) -> None:
    assert used_bytes(tmp_path / "missing") == 0


def test_what_is_too_much_is_told_once_and_what_is_not_is_left_alone(tmp_path: Path) -> None:
    told: dict[str, list[tuple[int, int]]] = {"small": [], "large": []}
    bounds = Bounds()
    for name, size in (("small", MB), ("large", 3 * MB)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * size)
        bounds.watch(name, Bound([tmp_path / name], 2 * MB, partial(note, told[name])))

    bounds.look()
    bounds.look()

    assert told["small"] == []
    [(size, limit)] = told["large"]
    assert size >= 3 * MB
    assert limit == 2 * MB


def test_on_a_full_disk_the_largest_of_those_without_a_limit_is_told_and_no_other_for_a_while(
    tmp_path: Path,
) -> None:
    told: dict[str, list[tuple[int, int]]] = {name: [] for name in ("small", "middle", "large", "limited")}
    lacking = [0]
    bounds = Bounds(lacking_bytes=lambda: lacking[0])
    for name, size in (("small", 1), ("large", 4), ("middle", 3), ("limited", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x" * size * MB)
        limit_bytes = 100 * MB if name == "limited" else 0
        bounds.watch(name, Bound([tmp_path / name], limit_bytes, partial(note, told[name])))

    bounds.look()
    assert not any(told.values()), "the disk is not full"
    lacking[0] = 2 * MB
    bounds.look()
    bounds.look()
    assert [name for name, sizes in told.items() if sizes] == ["large"]
    [(size, limit)] = told["large"]
    assert size >= 4 * MB
    assert limit == 0


def test_nobody_is_told_of_a_full_disk_that_others_have_filled(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * MB)
    told: list[tuple[int, int]] = []
    bounds = Bounds(lacking_bytes=lambda: 3 * MB)
    bounds.watch("t", Bound([tmp_path], 0, partial(note, told)))

    bounds.look()
    assert told == []


def test_what_is_forgotten_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * MB)
    told: list[tuple[int, int]] = []
    bounds = Bounds()
    bounds.watch("t", Bound([tmp_path], 1, partial(note, told)))
    bounds.forget("t")

    bounds.look()
    assert told == []


def test_a_fault_at_one_look_does_not_end_the_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"x" * MB)
    told: list[tuple[int, int]] = []

    def fails(*_: int) -> None:
        raise RuntimeError("of the test")

    bounds = Bounds(every_s=0.01)
    bounds.start()
    bounds.watch("first", Bound([tmp_path], 1, fails))
    wait_until(lambda: "of the test" in caplog.text, PATIENCE_S, "the fault is logged")
    bounds.watch("second", Bound([tmp_path], 1, partial(note, told)))
    wait_until(lambda: told, PATIENCE_S, "the next is told")
    bounds.stop()


def test_a_watch_that_had_nothing_to_look_at_looks_at_the_next(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * MB)
    told: list[tuple[int, int]] = []
    bounds = Bounds(every_s=0.01)
    bounds.start()
    bounds.watch("first", Bound([tmp_path], 100 * MB, partial(note, told)))
    bounds.forget("first")
    wait_until(lambda: not bounds._some.is_set(), PATIENCE_S, "nobody looks")

    bounds.watch("second", Bound([tmp_path], 1, partial(note, told)))

    wait_until(lambda: told, PATIENCE_S, "the next is told")
    bounds.forget("second")
    wait_until(lambda: not bounds._some.is_set(), PATIENCE_S, "nobody looks again")
    bounds.stop()
    assert not bounds.is_alive()
