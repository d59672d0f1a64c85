"""What a job's end gives its caller: the value, or an error of the right kind."""

from __future__ import annotations

import asyncio
import io
import json
import pickle

import numpy as np
import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer.handle import Job
from gpulayer.outcome import Failure, decoded
from gpulayer_broker.errors import (
    BlobMissing,
    JobNotFound,
    NotAllowed,
    ResultNotPicklable,
    UsageError,
)
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S


class OwnError(Exception):
    """An exception that only this module knows."""


def work() -> int:
    return 1


def submitted(client: Client) -> Job[int]:
    return client.submit(work)


def test_nothing_returned_is_none(client: Client, bench: Bench) -> None:
    job = submitted(client)
    bench.end(job.id, fields={"result": b"", "result_kind": "none"})

    assert job.result(PATIENCE_S) is None


def test_an_array_comes_back_without_a_pickle(client: Client, bench: Bench) -> None:
    job = submitted(client)
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(6).reshape(2, 3), allow_pickle=False)
    bench.end(job.id, fields={"result": file.getvalue(), "result_kind": "numpy"})

    assert np.array_equal(job.result(PATIENCE_S), np.arange(6).reshape(2, 3))


def test_a_large_result_is_read_from_the_store(client: Client, bench: Bench) -> None:
    job = submitted(client)
    data = json.dumps("x" * 100_000).encode()
    sha = client._session.store.put_bytes(data)
    named = {"sha256": sha, "size": len(data), "kind": "json"}
    bench.end(job.id, fields={"result": json.dumps(named).encode(), "result_kind": "blob"})

    assert str(job.result(PATIENCE_S)) == "x" * 100_000


def test_a_result_of_medium_size_is_fetched_from_the_record(client: Client, bench: Bench) -> None:
    job = submitted(client)
    bench.give(job.id, "y" * 50_000)

    assert str(job.result(PATIENCE_S)) == "y" * 50_000


def test_a_pickle_is_loaded_only_where_workers_are_trusted(
    client: Client, trusting: Client, bench: Bench
) -> None:
    job = submitted(client)
    bench.end(job.id, fields={"result": pickle.dumps((1, {2})), "result_kind": "pickle"})

    with pytest.raises(NotAllowed, match="trust_workers=True"):
        job.result(PATIENCE_S)
    assert trusting.get(job.id).result(PATIENCE_S) == (1, {2})


def test_a_trusted_worker_gives_the_original_exception_with_its_traceback(
    trusting: Client, bench: Bench
) -> None:
    job = submitted(trusting)
    bench.fail(job.id, OwnError("broken"), traceback="Traceback …\nline 7")

    with pytest.raises(OwnError, match="broken") as told:
        job.result(PATIENCE_S)
    assert "line 7" in told.value.__notes__[0]
    assert job.id in told.value.__notes__[0]


def test_elsewhere_an_exception_of_somebody_is_a_remote_error(client: Client, bench: Bench) -> None:
    job = submitted(client)
    bench.fail(job.id, OwnError("broken"), traceback="line 7")

    with pytest.raises(gl.RemoteError, match="OwnError: broken") as told:
        job.result(PATIENCE_S)
    assert told.value.traceback == "line 7"


@pytest.mark.parametrize("key", ["lr", 3, ("a", 1), "it's"])
def test_elsewhere_a_key_error_has_its_key(client: Client, bench: Bench, key: object) -> None:
    job = submitted(client)
    bench.fail(job.id, KeyError(key))

    with pytest.raises(KeyError) as raised:
        job.result(PATIENCE_S)
    assert raised.value.args == (key,)


def test_elsewhere_a_builtin_exception_is_rebuilt_by_name(client: Client, bench: Bench) -> None:
    job = submitted(client)
    bench.fail(job.id, ZeroDivisionError("by zero"))

    with pytest.raises(ZeroDivisionError, match="by zero"):
        job.result(PATIENCE_S)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_remote_exit_does_not_end_the_caller(
    client: Client, trusting: Client, bench: Bench, trusted: bool
) -> None:
    job = submitted(trusting if trusted else client)
    bench.fail(job.id, SystemExit(3))

    with pytest.raises(gl.RemoteError, match="SystemExit"):
        job.result(PATIENCE_S)


def test_an_exception_whose_class_is_not_here_is_a_remote_error(trusting: Client, bench: Bench) -> None:
    job = submitted(trusting)
    told = {"type": "Strange", "module": "strange", "message": "m", "pickle": "not base 85 \x00"}
    bench.end(job.id, "failed", reason="user_error", fields={"error": json.dumps(told)})

    with pytest.raises(gl.RemoteError, match="Strange: m"):
        job.result(PATIENCE_S)


@pytest.mark.parametrize(
    ("verdict", "reason", "error", "kind", "exit_code"),
    [
        ("cancelled", "cancelled", {}, gl.JobCancelled, 130),
        ("timed_out", "timeout", {}, gl.JobTimedOut, 124),
        ("failed", "worker_lost", {"message": "3 workers were lost"}, gl.WorkerLost, 75),
        ("failed", "result_error", {"message": "a lock"}, ResultNotPicklable, 1),
        ("failed", "oom", {"message": "out of memory", "signal": 9}, gl.JobFailed, 137),
        ("failed", "cannot_start", {"message": "no such program"}, gl.JobFailed, 1),
    ],
)
def test_every_end_has_an_error_of_its_own(
    client: Client,
    bench: Bench,
    verdict: str,
    reason: str,
    error: dict[str, object],
    kind: type[gl.GpulayerError],
    exit_code: int,
) -> None:
    job = submitted(client)
    bench.end(job.id, verdict, reason=reason, fields={"error": json.dumps(error)})

    with pytest.raises(kind, match=job.id) as told:
        job.result(PATIENCE_S)
    assert told.value.exit_code == exit_code
    assert job.end_reason == reason


@pytest.mark.parametrize(
    ("error", "exit_code", "text"),
    [({"exit_code": 3}, 3, "exited with code 3"), ({"signal": 11}, 139, r"signal 11 \(SIGSEGV\)")],
)
def test_a_command_fails_with_its_own_code(
    client: Client, bench: Bench, error: dict[str, object], exit_code: int, text: str
) -> None:
    job = client.submit(["false"])
    bench.end(job.id, "failed", reason="user_error", fields={"error": json.dumps(error)})

    with pytest.raises(gl.JobFailed, match=text) as told:
        job.result(PATIENCE_S)
    assert told.value.exit_code == exit_code


@pytest.mark.parametrize(
    ("kind", "verdict", "reason"),
    [
        ("JobFailed", "failed", "signal"),
        ("JobTimedOut", "timed_out", "timeout"),
        ("RemoteError", "failed", "user_error"),
    ],
)
def test_an_error_has_the_last_lines_of_the_log_of_a_job_that_died(
    client: Client, bench: Bench, kind: str, verdict: str, reason: str
) -> None:
    job = submitted(client)
    error = {"type": "NoReport", "message": "it ended", "tail": "loading\n\x1b[31mpart 17\x1b]0;title\x07"}
    bench.end(job.id, verdict, reason=reason, fields={"error": json.dumps(error)})

    with pytest.raises(getattr(gl, kind)) as told:
        job.result(PATIENCE_S)
    assert told.value.log_tail == "loading\npart 17"
    assert told.value.as_dict()["log_tail"] == "loading\npart 17"
    again = pickle.loads(pickle.dumps(told.value))
    assert again.__notes__ == told.value.__notes__ == ["the last lines of its log:\nloading\npart 17"]


@pytest.mark.parametrize("tail", [7, None, ["a"], "x\n" * 1000])
def test_a_tail_that_no_worker_writes_is_no_trouble(client: Client, bench: Bench, tail: object) -> None:
    job = client.submit(["false"])
    bench.end(
        job.id, "failed", reason="user_error", fields={"error": json.dumps({"exit_code": 3, "tail": tail})}
    )

    with pytest.raises(gl.JobFailed) as told:
        job.result(PATIENCE_S)
    assert len(told.value.log_tail) < 50


def test_a_command_that_succeeds_has_no_value(client: Client, bench: Bench) -> None:
    job = client.submit("echo 'two words'")
    bench.end(job.id)

    job.result(PATIENCE_S)
    assert job.state == "succeeded"


def test_a_wait_that_is_too_short_says_so_and_leaves_the_job(client: Client, bench: Bench) -> None:
    job = submitted(client)

    with pytest.raises(TimeoutError, match="it goes on"):
        job.result(0.05)
    bench.give(job.id, 1)
    assert job.result(PATIENCE_S) == 1


def test_a_result_past_its_time_is_told(client: Client, bench: Bench) -> None:
    job = submitted(client)
    bench.give(job.id, "z" * 50_000)
    job.wait(PATIENCE_S)
    bench.hand.link.call("HDEL", bench.hand.key(f"job:{job.id}"), "result")

    with pytest.raises(BlobMissing, match="no longer kept"):
        job.result(PATIENCE_S)


def test_a_job_can_be_awaited(client: Client, bench: Bench) -> None:
    async def both() -> list[int]:
        jobs = [submitted(client) for _ in range(2)]
        waiting = [asyncio.ensure_future(_value(job)) for job in jobs]
        for job in jobs:
            await asyncio.to_thread(bench.give, job.id, 7)
        return await asyncio.gather(*waiting)

    assert asyncio.run(both()) == [7, 7]


async def _value(job: Job[int]) -> int:
    return await job


def test_an_unknown_job_is_not_found(client: Client) -> None:
    with pytest.raises(JobNotFound, match="j_nothing"):
        client.get("j_nothing")
    with pytest.raises(JobNotFound, match="j_nothing"):
        client.cancel("j_nothing")


@pytest.mark.parametrize("command", ["", "   ", [], [""]])
def test_an_empty_command_is_refused(client: Client, command: str | list[str]) -> None:
    with pytest.raises(UsageError, match="empty"):
        client.submit(command)


def test_jobs_are_listed_with_the_open_ones_first(client: Client, bench: Bench) -> None:
    done, waiting = submitted(client), submitted(client)
    bench.give(done.id, 1)
    bench.hand.link.call("PING")

    listed = client.jobs()
    assert {record.id for record in listed} == {done.id, waiting.id}
    assert [record.id for record in client.jobs("succeeded")] == [done.id]
    with pytest.raises(UsageError, match="lost"):
        client.jobs("lost")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("json", b"{nonsense"),
        ("json", b"\xff"),
        ("numpy", b"nonsense"),
        ("numpy", b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (9,), }"),
        ("pickle", b"nonsense"),
    ],
)
def test_a_result_that_cannot_be_read_is_a_failure_that_names_its_job(kind: str, data: bytes) -> None:
    found = decoded(kind, data, "j_1", trusted=True)

    assert isinstance(found, Failure)
    assert found.error.__notes__ == ["the result of job j_1 cannot be loaded here"]


def test_a_result_of_an_unknown_kind_asks_for_an_update() -> None:
    found = decoded("arrow", b"", "j_1", trusted=True)

    assert isinstance(found, Failure)
    assert "update gpulayer" in str(found.error)
