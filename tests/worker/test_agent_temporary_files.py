"""Temporary files of a job that asked for disk count as its disk, and go with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.spec import Spec
from tests.support import PATIENCE_S, wait_until
from tests.workers import Desk, WorkerProcess

FILL = 'echo "$TMPDIR"; head -c 100000000 /dev/zero > "$TMPDIR/big"; trap "" TERM; sleep 1000'


def with_disk(desk: Desk, spec: Spec) -> str:
    needs = build_requirements(disk="64MiB")
    return desk.submit(replace(spec, requirements=needs.canonical()), needs=needs)


def place_told(desk: Desk, job: str) -> Path:
    return Path(desk.whole_log(job).decode().strip())


def test_temporary_files_count_as_the_disk_that_a_job_asked_for(desk: Desk, worker: WorkerProcess) -> None:
    job = with_disk(desk, desk.command_spec("sh", "-c", FILL))

    assert desk.final(job).end_reason == "disk"
    place = place_told(desk, job)
    wait_until(lambda: not place.exists(), PATIENCE_S, "the files are gone with the job")


def test_a_place_for_temporary_files_that_the_submitter_named_is_kept(
    desk: Desk, worker: WorkerProcess, tmp_path: Path
) -> None:
    spec = replace(desk.command_spec("sh", "-c", 'echo "$TMPDIR"'), env={"TMPDIR": str(tmp_path)})
    job = with_disk(desk, spec)

    desk.final(job)
    assert place_told(desk, job) == tmp_path
