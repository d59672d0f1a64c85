"""Commands through a real worker: how they end, what they see, what they give back."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.workers import Desk, WorkerProcess

pytestmark = pytest.mark.usefixtures("worker")

TELL = "import json, os, sys; print(json.dumps([dict(os.environ), os.getcwd(), sys.stdin.read()]))"
# What the shell, the runner's bookkeeping and the coverage of a test run may add.
INCIDENTAL = {"PWD", "SHLVL", "_", "GPULAYER_PROCESS", "GPULAYER_PROGRESS_FD", "LC_CTYPE"}
GRANT = {
    *("GPULAYER_JOB_ID", "GPULAYER_ATTEMPT", "GPULAYER_NAME", "GPULAYER_ACCELERATOR", "GPULAYER_GPUS"),
    *("GPULAYER_OUTPUTS", "GPULAYER_SCRATCH", "GPULAYER_CACHE", "GPULAYER_RESUME", "GPULAYER_RANK"),
    *("GPULAYER_WORLD_SIZE", "GPULAYER_NODES", "GPULAYER_NODE_RANK", "CUDA_DEVICE_ORDER"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HOME", "XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME"),
    *("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"),
    *("GPULAYER_REDIS_URL", "GPULAYER_NAMESPACE", "GPULAYER_STORE", "GPULAYER_OWNER"),
}
FROM_THE_WORKER = {"LANG", "TZ", "TMPDIR", "SSL_CERT_FILE", "SSL_CERT_DIR"}


def seen_by(desk: Desk, **fields: Any) -> tuple[dict[str, str], str, str]:
    job = desk.python(TELL, **fields)
    assert desk.final(job).state == "succeeded", desk.error(job)
    environment, folder, stdin = json.loads(desk.whole_log(job))
    return environment, folder, stdin


def test_a_command_that_exits_with_zero_has_succeeded(desk: Desk) -> None:
    job = desk.command("true")
    record = desk.final(job)
    assert (record.state, record.end_reason, desk.queue.result(job)[0]) == ("succeeded", "", "none")


def test_a_command_that_exits_otherwise_has_failed_with_its_code(desk: Desk) -> None:
    job = desk.shell("exit 3")
    record = desk.final(job)
    assert (record.state, record.end_reason) == ("failed", "user_error")
    assert desk.error(job)["exit_code"] == 3


def test_a_command_ended_by_a_signal_names_it(desk: Desk) -> None:
    job = desk.shell("kill -SEGV $$")
    record = desk.final(job)
    assert (record.state, record.end_reason, desk.error(job)["signal"]) == ("failed", "signal", 11)


def test_a_command_that_does_not_exist_has_the_shells_code_and_says_so(desk: Desk) -> None:
    job = desk.command("no-such-program")
    assert desk.final(job).state == "failed"
    assert desk.error(job)["exit_code"] == 127
    assert b"no-such-program: command not found" in desk.whole_log(job)


def test_both_streams_are_kept_apart_in_one_log(desk: Desk) -> None:
    job = desk.shell("echo one; echo two >&2; echo three")
    desk.final(job)
    assert desk.stream(job, "out") == b"one\nthree\n"
    assert desk.stream(job, "err") == b"two\n"


def test_what_is_written_below_the_outputs_folder_comes_back(desk: Desk) -> None:
    job = desk.shell('mkdir "$GPULAYER_OUTPUTS/deep" && echo hello > "$GPULAYER_OUTPUTS/deep/file"')
    desk.final(job)
    assert desk.output(job, "outputs/deep/file") == b"hello\n"


def test_a_failed_command_gives_its_outputs_back_too(desk: Desk) -> None:
    job = desk.shell("echo partial > outputs/file; exit 1")
    assert desk.final(job).state == "failed"
    assert desk.output(job, "outputs/file") == b"partial\n"


def test_files_that_an_output_glob_names_come_back(desk: Desk) -> None:
    job = desk.shell("mkdir run; echo a > run/a.csv; echo b > run/b.txt", outputs=("run/*.csv",))
    desk.final(job)
    assert [entry.path for entry in desk.outputs(job).of_kind("file")] == ["run/a.csv"]


def test_new_files_that_nothing_named_are_told_in_one_line(desk: Desk) -> None:
    job = desk.shell("echo lost > forgotten.txt")
    desk.final(job)
    assert desk.notes(job) == [
        "new files were not returned: forgotten.txt; write them to $GPULAYER_OUTPUTS, or name them with --output"
    ]


def test_a_job_sees_every_variable_of_its_grant_and_nothing_else(desk: Desk) -> None:
    environment, _, _ = seen_by(desk, name="night run")
    names = {name for name in environment if name not in INCIDENTAL and not name.startswith("LC_")}
    assert GRANT - names == set()
    assert names - GRANT <= FROM_THE_WORKER
    assert "GPULAYER_TEST_RUN" not in names


def test_the_values_of_the_grant_are_those_of_the_contract(desk: Desk) -> None:
    job = desk.python(TELL, name="night run")
    desk.final(job)
    seen, folder, _ = json.loads(desk.whole_log(job))
    expected = {
        "GPULAYER_JOB_ID": job,
        "GPULAYER_ATTEMPT": "1",
        "GPULAYER_NAME": "night run",
        "GPULAYER_ACCELERATOR": "cpu",
        "GPULAYER_GPUS": "0",
        "GPULAYER_RESUME": "",
        "GPULAYER_RANK": "0",
        "GPULAYER_WORLD_SIZE": "1",
        "GPULAYER_NODES": "1",
        "GPULAYER_NODE_RANK": "0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "-1",
        "HIP_VISIBLE_DEVICES": "-1",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GPULAYER_OUTPUTS": f"{folder}/outputs",
        "HOME": f"{seen['GPULAYER_SCRATCH']}/home",
        "XDG_CACHE_HOME": seen["GPULAYER_CACHE"],
        "HF_HOME": f"{seen['GPULAYER_CACHE']}/huggingface",
        "TORCH_HOME": f"{seen['GPULAYER_CACHE']}/torch",
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert seen["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)


def test_the_submitters_variables_arrive_and_never_override_the_grant(desk: Desk) -> None:
    given = {"MINE": "yes", "OMP_NUM_THREADS": "7", "GPULAYER_JOB_ID": "forged", "CUDA_VISIBLE_DEVICES": "0"}
    environment, _, _ = seen_by(desk, env=given)
    assert (environment["MINE"], environment["OMP_NUM_THREADS"]) == ("yes", "7")
    assert environment["GPULAYER_JOB_ID"].startswith("j_")
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"


def test_stdin_is_empty(desk: Desk) -> None:
    assert seen_by(desk)[2] == ""


def test_a_job_runs_in_a_folder_of_its_own_which_is_gone_after_it(desk: Desk) -> None:
    environment, folder, _ = seen_by(desk)
    assert folder == f"{environment['GPULAYER_SCRATCH']}/work"
    wait_until(
        lambda: not Path(environment["GPULAYER_SCRATCH"]).exists(), PATIENCE_S, "the job's folder is removed"
    )


def test_two_jobs_share_the_cache_and_not_the_home(desk: Desk) -> None:
    first = desk.shell('echo kept > "$GPULAYER_CACHE/mark"; echo own > "$HOME/mark"')
    desk.final(first)
    second = desk.shell('cat "$GPULAYER_CACHE/mark"; ls "$HOME"')
    desk.final(second)
    assert desk.whole_log(second) == b"kept\n"


def test_usage_is_told(desk: Desk) -> None:
    job = desk.python("sum(range(3_000_000))")
    usage = json.loads(desk.final(job).usage)
    assert usage["cpu_s"] > 0
    assert usage["max_rss_bytes"] > 1_000_000


def test_a_background_child_that_holds_stdout_does_not_keep_the_job(desk: Desk) -> None:
    job = desk.shell("sleep 300 & echo done")
    assert desk.final(job).state == "succeeded"
    assert any(note.startswith("ended with the job:") and "sleep" in note for note in desk.notes(job))


def test_only_as_many_jobs_run_as_there_are_slots(desk: Desk, hire: Hire, worker: WorkerProcess) -> None:
    jobs = [desk.shell("sleep 300") for _ in range(4)]
    for job in jobs[:2]:
        desk.reaches(job, "running")
    assert [desk.record(job).state for job in jobs[2:]] == ["queued", "queued"]
    for job in jobs:
        cancel(desk, job)
    for job in jobs:
        assert desk.final(job).state == "cancelled"


def cancel(desk: Desk, job: str) -> None:
    from gpulayer_broker import functions

    desk.queue.run(functions.cancel(job))
