"""What a job is bounded by and what it used, through real workers: memory, processes, records, samples."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.spec import Spec
from gpulayer_worker.processes.cgroup_mounts import read_mounts
from tests.reliability.nemesis import fork_servers
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, WorkerProcess

from .conftest import Hire

MIB = 1 << 20
needs_memory_groups = pytest.mark.skipif(
    "memory" not in read_mounts().v1 and not read_mounts().unified,
    reason="no control group bounds memory here",
)


def with_memory(desk: Desk, spec: Spec, memory: str) -> str:
    needs = build_requirements(memory=memory)
    return desk.submit(replace(spec, requirements=needs.canonical()), needs=needs)


def with_disk(desk: Desk, spec: Spec, disk: str) -> str:
    needs = build_requirements(disk=disk)
    return desk.submit(replace(spec, requirements=needs.canonical()), needs=needs)


def usage(desk: Desk, job_id: str) -> dict[str, Any]:
    return dict(orjson.loads(desk.record(job_id).usage))


@needs_memory_groups
def test_a_job_over_its_memory_fails_for_that_reason_with_its_limit(
    desk: Desk, worker: WorkerProcess
) -> None:
    job = with_memory(desk, desk.command_spec(sys.executable, "-c", "b = bytearray(200 << 20)"), "64MiB")

    record = desk.final(job)
    assert (record.state, record.end_reason) == ("failed", "oom")
    assert "64.0 MB" in desk.error(job)["message"]


@needs_memory_groups
def test_a_function_over_its_memory_fails_for_that_reason(desk: Desk, worker: WorkerProcess) -> None:
    def fill() -> int:
        return len(bytearray(200 << 20))

    job = with_memory(desk, desk.function_spec(fill), "64MiB")

    assert desk.final(job).end_reason == "oom"


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: the kernel's choice of whom to kill")
def test_when_memory_is_over_the_kernel_takes_a_job_before_what_keeps_it(
    desk: Desk, worker: WorkerProcess
) -> None:
    def own_score() -> int:
        from pathlib import Path

        return int(Path("/proc/self/oom_score_adj").read_text())

    command, function = desk.shell("cat /proc/self/oom_score_adj"), desk.function(own_score)
    desk.final(command)
    desk.final(function)

    jobs = {int(desk.whole_log(command)), desk.value(function)}
    keepers = {
        int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (worker.pid, *fork_servers(worker.pid))
    }
    assert len(keepers) == 1
    assert min(jobs) > max(keepers)


def test_a_job_killed_otherwise_is_told_by_its_signal(desk: Desk, worker: WorkerProcess) -> None:
    job = with_memory(desk, desk.command_spec("sh", "-c", "kill -9 $$"), "64MiB")

    assert desk.final(job).end_reason == "signal"


def test_a_job_over_its_disk_is_ended_for_that_reason_with_its_limit(
    desk: Desk, worker: WorkerProcess
) -> None:
    script = "head -c 100000000 /dev/zero > $HOME/big; trap '' TERM; sleep 1000"
    job = with_disk(desk, desk.command_spec("sh", "-c", script), "64MiB")

    record = desk.final(job)
    assert (record.state, record.end_reason) == ("failed", "disk")
    assert "its disk is 64.0 MB: ask for more with disk=" in desk.error(job)["message"]


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_function_over_its_disk_is_ended_wherever_it_runs(
    desk: Desk, worker: WorkerProcess, isolation: str
) -> None:
    def write() -> None:
        import time
        from pathlib import Path

        Path("some").write_bytes(b"x" * 100_000_000)
        time.sleep(1000)

    job = with_disk(desk, desk.function_spec(write, isolation=isolation), "64MiB")

    record = desk.final(job)
    assert (record.state, record.end_reason) == ("failed", "disk")
    assert desk.final(desk.function(int, isolation=isolation)).state == "succeeded"


def test_a_function_within_its_disk_is_left_alone(desk: Desk, worker: WorkerProcess) -> None:
    def write() -> int:
        import time
        from pathlib import Path

        Path("some").write_bytes(b"x" * 10_000_000)
        time.sleep(3)
        return Path("some").stat().st_size

    job = with_disk(desk, desk.function_spec(write), "64MiB")

    assert desk.final(job).state == "succeeded", desk.error(job)
    assert desk.value(job) == 10_000_000


def test_a_fork_bomb_ends_with_its_timeout_and_leaves_the_worker_at_work(desk: Desk, hire: Hire) -> None:
    hire("", job_processes=64)
    bomb = desk.shell("bomb() { bomb | bomb & }; bomb; exec sleep 1000", timeout_s=4)

    assert desk.final(bomb).state == "timed_out"
    assert any("refused new processes" in note for note in desk.notes(bomb))
    assert desk.final(desk.command("true")).state == "succeeded"


def test_the_record_says_what_the_job_used(desk: Desk, worker: WorkerProcess) -> None:
    script = "import time; b = bytearray(100 << 20); time.sleep(0.2)\nwhile time.process_time() < 0.3: pass"
    job = desk.python(script)

    desk.final(job)
    used = usage(desk, job)
    assert 0.3 <= used["wall_s"] < PATIENCE_S
    assert 0.3 <= used["cpu_s"] < PATIENCE_S
    assert 100 * MIB < used["max_rss_bytes"] < 300 * MIB
    assert used.get("peak_memory_bytes", 100 * MIB) >= 100 * MIB


def test_a_job_that_met_a_full_disk_is_told(desk: Desk, worker: WorkerProcess) -> None:
    def fill() -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    job = desk.function(fill)

    assert desk.final(job).state == "failed"
    assert any("disk is full" in note for note in desk.notes(job))


def test_the_machines_use_is_sampled_with_the_heartbeat(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.command("sleep", "1000")
    desk.reaches(job, "running")
    name = next(iter(desk.workers()))

    def samples() -> list[dict[str, str]]:
        entries = desk.link.call("XRANGE", desk.queue.keys.samples(name), "-", "+")
        texts = [[value.decode() for value in values] for _, values in entries]
        return [dict(zip(each[::2], each[1::2], strict=True)) for each in texts]

    wait_until(lambda: any(each["tasks"] == "1" for each in samples()), PATIENCE_S, "a sample has the job")

    last = samples()[-1]
    assert 0 <= float(last["cpu"]) <= 100
    assert 0 < int(last["memory_bytes"]) < int(last["memory_total_bytes"])
