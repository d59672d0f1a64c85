"""A job's control group: it bounds the job, ends all of it, and says what it used and what the kernel killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulayer_worker.processes.cgroup import Group, Groups, clear_groups, open_groups
from gpulayer_worker.processes.cgroup_mounts import Mounts, read_mounts
from gpulayer_worker.runner import cgroups
from tests.support import PATIENCE_S, wait_until

from .bench import Bench, is_gone, wait_gone
from .test_trees import DAEMON, UNTIL_CHILD

MIB = 1 << 20
FILL_MEMORY = "b = bytearray(200 << 20); print(len(b))"


def opened(folder: Path, mounts: Mounts) -> Iterator[Groups]:
    groups = open_groups(folder, 4096, mounts)
    if not groups.describe()["uses"]:
        pytest.skip("no control group can be made here")
    yield groups
    groups.close()


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    yield from opened(tmp_path, read_mounts())


@pytest.fixture(params=["all that is there", "version 2 alone"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Group]:
    """What holds for each kind of group, also for one that bounds nothing."""
    mounts = read_mounts()
    if request.param == "version 2 alone":
        mounts = Mounts({}, mounts.unified)
    (tmp_path / "either").mkdir()
    for groups in opened(tmp_path / "either", mounts):
        group = groups.take()
        assert group is not None
        yield group


def test_a_job_is_in_its_group_before_it_runs(bench: Bench, group: Group) -> None:
    job = bench.shell("cat /proc/self/cgroup", cgroups=group.folders)

    job.wait(PATIENCE_S)
    assert bench.out(job).count(cgroups.tag(group.folders).decode()) == len(group.folders)


def test_a_job_does_not_wait_for_version_2_where_version_1_bounds_it(groups: Groups) -> None:
    facts = groups.describe()

    assert facts["version"] == 2 or not {"pids", "unified"} <= set(facts["uses"])  # type: ignore[call-overload]


def test_a_function_is_in_its_group_too(bench: Bench, group: Group) -> None:
    def where() -> str:
        return Path("/proc/self/cgroup").read_text()

    ending = bench.run(where, cgroups=group.folders)

    assert ending.report is not None
    assert cgroups.tag(group.folders) in ending.report.payload


def test_a_hidden_daemon_dies_with_its_job_beside_another(
    bench: Bench, groups: Groups, tmp_path: Path
) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    mine, others = groups.take(), groups.take()
    assert mine is not None
    assert others is not None
    other = bench.shell("exec sleep 1000", cgroups=others.folders)
    other.started.result(PATIENCE_S)
    leave = f"{sys.executable} {tmp_path}/daemon.py {tmp_path}/child; {UNTIL_CHILD}"
    job = bench.shell(leave, cgroups=mine.folders)

    ending = job.wait(PATIENCE_S)

    assert is_gone(bench.number_in("child"))
    assert ending.strays
    assert not other.gone.done()
    other.kill()


def test_a_killed_job_takes_its_hidden_daemon_along(bench: Bench, groups: Groups, tmp_path: Path) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    mine, others = groups.take(), groups.take()
    assert mine is not None
    assert others is not None
    other = bench.shell("exec sleep 1000", cgroups=others.folders)
    other.started.result(PATIENCE_S)
    stay = f"{sys.executable} {tmp_path}/daemon.py {tmp_path}/child; sleep 1000"
    job = bench.shell(stay, cgroups=mine.folders)
    pid = bench.number_in("child")

    job.kill()
    job.wait(PATIENCE_S)

    assert is_gone(pid)
    other.kill()


def test_the_end_of_the_fork_server_ends_what_hides_in_a_group(
    bench: Bench, group: Group, tmp_path: Path
) -> None:
    (tmp_path / "daemon.py").write_text(DAEMON)
    job = bench.shell(
        f"{sys.executable} {tmp_path}/daemon.py {tmp_path}/child; sleep 1000", cgroups=group.folders
    )
    pid = bench.number_in("child")

    os.kill(bench.server.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    assert job.wait(PATIENCE_S).lost
    wait_gone(pid)


def test_a_fork_bomb_is_bounded_and_ended(bench: Bench, tmp_path: Path) -> None:
    groups = open_groups(tmp_path, 50)
    group = groups.take()
    if group is None or "pids" not in groups.describe()["uses"]:  # type: ignore[operator]
        pytest.skip("no control group bounds processes here")
    job = bench.shell("bomb() { bomb | bomb & }; bomb; sleep 1000", cgroups=group.folders)
    wait_until(lambda: group.facts().forks_refused > 0, PATIENCE_S, "a fork is refused")

    most = len(cgroups.members(group.folders))
    job.kill()
    job.wait(PATIENCE_S)

    assert most <= 50
    assert not cgroups.members(group.folders)
    groups.close()


def test_a_job_over_its_memory_is_killed_and_the_group_says_so(bench: Bench, groups: Groups) -> None:
    group = groups.take(64 * MIB)
    assert group is not None
    if not group.limit_bytes:
        pytest.skip("no control group bounds memory here")

    ending = bench.command(sys.executable, "-c", FILL_MEMORY, cgroups=group.folders).wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.signal == signal.SIGKILL
    facts = group.facts()
    assert facts.oom_kills == 1
    assert facts.peak_bytes is not None
    assert 32 * MIB < facts.peak_bytes <= 64 * MIB


def test_a_job_killed_otherwise_is_told_apart(bench: Bench, groups: Groups) -> None:
    group = groups.take(64 * MIB)
    assert group is not None

    ending = bench.shell("kill -9 $$", cgroups=group.folders).wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.signal == signal.SIGKILL
    assert group.facts().oom_kills == 0


def test_a_group_counts_what_children_used_whom_nobody_waited_for(bench: Bench, group: Group) -> None:
    if group.facts().cpu_s is None:
        pytest.skip("no control group counts processor time here")
    burn = "import time\nwhile time.process_time() < 0.3: pass\nopen('child', 'w').write('1\\n')"
    bench.shell(f'setsid {sys.executable} -c "{burn}" & {UNTIL_CHILD}', cgroups=group.folders).wait(
        PATIENCE_S
    )

    assert (group.facts().cpu_s or 0) >= 0.3


def test_a_groups_folders_are_removed_with_the_groups_that_the_job_made(bench: Bench, group: Group) -> None:
    below = [Path(folder, "made-by-the-job") for folder in group.folders]
    for folder in below:
        folder.mkdir()

    group.remove()

    assert not any(Path(folder).exists() for folder in group.folders)


def test_what_a_killed_worker_left_in_its_groups_is_cleared(groups: Groups, tmp_path: Path) -> None:
    group = groups.take()
    assert group is not None
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pause()
    for folder in group.folders:
        Path(folder, "cgroup.procs").write_text(str(child))

    killed = clear_groups(tmp_path)

    assert killed >= 1
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not any(Path(folder).exists() for folder in group.folders)


def test_a_group_that_is_gone_refuses_the_job_by_name(bench: Bench, group: Group) -> None:
    group.remove()

    job = bench.shell("echo ran", cgroups=group.folders)
    ending = job.wait(PATIENCE_S)

    assert ending.report is not None
    assert "cannot start" in ending.report.header["message"]
    assert not bench.out(job)


def test_spares_are_made_ahead_and_used_up(groups: Groups) -> None:
    groups.refill()
    first, second = groups.take(), groups.take()

    assert first is not None
    assert second is not None
    assert set(first.folders).isdisjoint(second.folders)


def test_mounts_are_read_as_the_kernel_writes_them(tmp_path: Path) -> None:
    memory = tmp_path / "mem ory" / "own"
    memory.mkdir(parents=True)
    (tmp_path / "v2").mkdir()
    (tmp_path / "mounts").write_text(
        f"cgroup {tmp_path}/mem\\040ory cgroup rw,relatime,memory 0 0\n"
        f"cgroup2 {tmp_path}/v2 cgroup2 rw 0 0\n"
        "proc /proc proc rw 0 0\n"
    )
    (tmp_path / "cgroup").write_text("9:name=systemd:/\n4:memory:/own\n0::/not/in/this/mount\n")

    mounts = read_mounts(tmp_path)

    assert mounts.v1["memory"] == memory
    assert mounts.unified == tmp_path / "v2"


def test_a_system_without_control_groups_has_none(tmp_path: Path) -> None:
    assert read_mounts(tmp_path / "nothing").unified is None
    groups = open_groups(tmp_path, 4096, read_mounts(tmp_path / "nothing"))
    assert groups.take() is None
