"""A control group serves one job after another only while nothing of the earlier ones can be seen in it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_worker.processes import cgroup_files
from gpulayer_worker.processes.cgroup import LEFT_BYTES, Group, Groups, open_groups
from tests.support import PATIENCE_S

from .bench import Bench

MIB = 1 << 20
BURN = "import time\nb = bytearray(64 << 20)\nwhile time.process_time() < 0.3: pass"
FILL_MEMORY = "b = bytearray(200 << 20); print(len(b))"
WRITE_FILE = "open('file', 'wb').write(b'x' * (8 << 20))"


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    (tmp_path / "home").mkdir()
    groups = open_groups(tmp_path / "home", 4096)
    if groups.describe()["version"] != 1 or not {"pids", "memory", "cpuacct"} <= set(
        groups.describe()["uses"]
    ):  # type: ignore[call-overload]
        pytest.skip("groups are made anew for each job here")
    yield groups
    groups.close()


def taken(groups: Groups, memory_bytes: int = 0) -> Group:
    group = groups.take(memory_bytes)
    assert group is not None
    return group


def folder_of(group: Group, kind: str) -> Path:
    return next(Path(folder) for folder in group.folders if f"/{kind}/" in folder)


def is_used_again(groups: Groups, group: Group) -> bool:
    groups.give_back(group)
    return groups.take() is group


def python(bench: Bench, code: str, group: Group) -> None:
    bench.command(sys.executable, "-c", code, cgroups=group.folders).wait(PATIENCE_S)


def test_a_group_that_is_used_again_has_counted_nothing(bench: Bench, groups: Groups) -> None:
    group = taken(groups)
    python(bench, BURN, group)
    before = group.facts()

    assert is_used_again(groups, group)

    after = group.facts()
    assert before.cpu_s is not None
    assert after.cpu_s is not None
    assert before.peak_bytes is not None
    assert after.peak_bytes is not None
    assert before.cpu_s >= 0.3
    assert after.cpu_s < 0.1
    assert before.peak_bytes > 64 * MIB
    assert after.peak_bytes <= LEFT_BYTES


def test_a_job_in_a_used_group_is_counted_alone(bench: Bench, groups: Groups) -> None:
    group = taken(groups)
    python(bench, BURN, group)
    assert is_used_again(groups, group)

    bench.shell("true", cgroups=group.folders).wait(PATIENCE_S)

    facts = group.facts()
    assert facts.cpu_s is not None
    assert 0 < facts.cpu_s < 0.3
    assert facts.peak_bytes is not None
    assert 0 < facts.peak_bytes < 64 * MIB


def test_a_limit_of_memory_ends_with_its_job(bench: Bench, groups: Groups) -> None:
    group = taken(groups, 64 * MIB)

    assert is_used_again(groups, group)

    assert group.limit_bytes == 0
    job = bench.command(sys.executable, "-c", FILL_MEMORY, cgroups=group.folders)
    ending = job.wait(PATIENCE_S)
    assert ending.exit is not None
    assert ending.exit.code == 0


@pytest.mark.parametrize(("first", "second"), [(64 * MIB, 96 * MIB), (96 * MIB, 64 * MIB)])
def test_the_next_job_has_a_limit_of_its_own(bench: Bench, groups: Groups, first: int, second: int) -> None:
    group = taken(groups, first)
    groups.give_back(group)

    again = taken(groups, second)

    assert again is group
    python(bench, FILL_MEMORY, again)
    facts = again.facts()
    assert facts.oom_kills == 1
    assert facts.peak_bytes is not None
    assert second - 16 * MIB < facts.peak_bytes <= second


def test_a_group_in_which_memory_ran_out_is_removed(bench: Bench, groups: Groups) -> None:
    group = taken(groups, 64 * MIB)
    python(bench, FILL_MEMORY, group)

    assert not is_used_again(groups, group)
    assert not any(Path(folder).exists() for folder in group.folders)


def test_a_group_that_was_refused_a_fork_is_removed(bench: Bench, tmp_path: Path) -> None:
    groups = open_groups(tmp_path, 1)
    group = groups.take()
    if group is None or not {"pids", "memory"} <= set(groups.describe()["uses"]):  # type: ignore[call-overload]
        pytest.skip("no control group bounds processes here")
    bench.shell("sleep 0 & true", cgroups=group.folders).wait(PATIENCE_S)
    assert group.facts().forks_refused

    assert not is_used_again(groups, group)
    groups.close()


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("pids", "pids.max", "7"),
        ("memory", "memory.limit_in_bytes", str(64 * MIB)),
        ("memory", "memory.soft_limit_in_bytes", str(64 * MIB)),
        ("memory", "memory.swappiness", "1"),
        ("memory", "memory.oom_control", "1"),
    ],
)
def test_a_group_whose_settings_a_job_has_changed_is_removed(
    groups: Groups, kind: str, name: str, value: str
) -> None:
    group = taken(groups)
    try:
        (folder_of(group, kind) / name).write_text(value)
    except OSError as error:
        pytest.skip(f"this kernel does not let it be changed: {error}")

    assert not is_used_again(groups, group)


def test_a_group_that_still_holds_memory_is_removed(bench: Bench, groups: Groups) -> None:
    group = taken(groups)
    python(bench, WRITE_FILE, group)

    assert not is_used_again(groups, group)


@pytest.mark.parametrize("kind", ["pids", "memory", "cpuacct"])
def test_a_group_in_which_a_process_is_left_is_removed_with_it(groups: Groups, kind: str) -> None:
    group = taken(groups)
    child = os.fork()
    if child == 0:
        signal.pause()
    (folder_of(group, kind) / "cgroup.procs").write_text(str(child))

    assert not is_used_again(groups, group)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.parametrize("kind", ["pids", "memory", "cpuacct"])
def test_a_group_with_a_group_below_it_is_removed(groups: Groups, kind: str) -> None:
    group = taken(groups)
    (folder_of(group, kind) / "made-by-the-job").mkdir()

    assert not is_used_again(groups, group)
    assert not any(Path(folder).exists() for folder in group.folders)


def test_no_more_groups_are_kept_than_may_be(groups: Groups) -> None:
    many = [taken(groups) for _ in range(20)]

    for group in many:
        groups.give_back(group)

    assert sum(Path(group.folders[0]).exists() for group in many) <= 16


def test_a_group_reads_the_same_with_its_files_kept_open_or_not(
    bench: Bench, groups: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = taken(groups)
    monkeypatch.setattr(cgroup_files.Room, "take", lambda _: False)
    not_kept = taken(groups)

    for group in (kept, not_kept):
        python(bench, BURN, group)
        facts = group.facts()
        assert (facts.cpu_s or 0) >= 0.3
        assert (facts.peak_bytes or 0) > 64 * MIB
        assert is_used_again(groups, group)


def test_a_group_that_is_removed_has_no_file_open(groups: Groups) -> None:
    group = taken(groups)
    group.facts()

    group.remove()

    assert not [path for path in open_paths() if path.startswith(tuple(group.folders))]


def test_a_group_that_nobody_gave_back_has_no_file_open(groups: Groups) -> None:
    group = taken(groups)
    group.facts()
    folders = tuple(group.folders)
    assert [path for path in open_paths() if path.startswith(folders)]

    del group

    assert not [path for path in open_paths() if path.startswith(folders)]


def open_paths() -> list[str]:
    """What this process has open."""
    paths = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            paths.append(os.readlink(f"/proc/self/fd/{number}"))
    return paths
