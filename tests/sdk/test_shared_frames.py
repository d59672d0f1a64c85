"""A call whose function was called before enters the queue exactly as one that is put together from the ground up."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import Any

import numpy as np
import orjson
import pytest

from gpulayer.client import Client
from gpulayer.options import plan_of
from gpulayer.payload import PackedFunction, pack_function
from gpulayer.submitting import SHARED_KEPT
from gpulayer.unchanged import MOST_BYTES
from gpulayer_broker import spec as specs
from tests.support import PATIENCE_S, in_background, wait_until

HOSTILE = 'a","arguments":"\\ \u2028 é "kwargs":{"job":1}'


def plain(number: int = 0) -> int:
    return number


LARGE = PackedFunction(pack_function(plain).data + b"." * 5000, "m", "large", ())
BY_NAME = pack_function(np.linalg.norm)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"isolation": "warm", "priority": "high"},
    {
        "name": HOSTILE.replace("\u2028", ""),
        "env": {"A": HOSTILE, "arguments": "{", "Z": "\\"},
        "timeout": 2.5,
    },
    {"retries": 3, "retry_on": ValueError, "isolation": "warm", "on_outage": "keep", "result_ttl": "1h"},
    {"gpus": 1, "python": ">=3.8", "concurrency_key": "k", "rate_limit": "5/1m", "delay": "1h"},
    {"eta": "2100-01-01T00:00", "priority": "idle"},
]
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}),
    ((1, 2.5, "é", b"\0", None, True, 1j), {"name": HOSTILE}),
    (([1, 2], {"a": 1}, (None,)), {}),
    ((["x" * 5000],), {}),
    ((np.arange(3), {1: [2]}), {"nested": [[1]]}),
    (("a text with CodeType in it",), {}),
]


def stored(client: Client, job_id: str) -> dict[bytes, bytes]:
    queue = client._session.queue
    parts = queue.link.call("HGETALL", queue.keys.job(job_id))
    return dict(zip(parts[::2], parts[1::2], strict=True))


def lasting(fields: dict[bytes, bytes], job_id: str) -> dict[bytes, bytes]:
    """Without the id, the times and the places in the queue, in which any two jobs differ."""
    at_ms = str(orjson.loads(fields[b"spec"])["message_timestamp"]).encode()
    spec = fields[b"spec"].replace(job_id.encode(), b"ID").replace(at_ms, b"AT")
    own = {name for name in fields if name.endswith(b"_ms")} - {b"keep_ms"} | {b"entry", b"seq"}
    return {name: value for name, value in fields.items() if name not in own} | {b"spec": spec}


@pytest.mark.parametrize("parent", ["", "j_000000000001"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize("packed", [pack_function(plain), BY_NAME, LARGE], ids=lambda packed: packed.label)
def test_a_later_call_leaves_the_same_record_as_one_from_the_ground_up(
    client: Client,
    packed: PackedFunction,
    options: dict[str, Any],
    parent: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GPULAYER_JOB_ID", parent)
    plan = plan_of(options)
    for _ in range(2):
        client.submit_call(packed, ((), {}), plan)
    for arguments in ARGUMENTS:
        later = client.submit_call(packed, arguments, plan)
        other = client.submit_order(client._opened.submitter.function_order(packed, arguments, plan))

        assert lasting(stored(client, later.id), later.id) == lasting(stored(client, other.id), other.id)
        assert specs.job_of(later.record.spec).get("parent", "") == parent


def test_one_process_submits_for_the_job_that_it_runs_now(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plan, told = pack_function(plain), plan_of({}), []
    for parent in ("j_1", "j_2", "") * 3:
        monkeypatch.setenv("GPULAYER_JOB_ID", parent)
        told.append(specs.job_of(client.submit_call(packed, ((1,), {}), plan).record.spec).get("parent", ""))

    assert told == ["j_1", "j_2", ""] * 3


def test_a_call_after_another_job_waits_for_it(client: Client) -> None:
    packed, plan = pack_function(plain), plan_of({})
    first = client.submit_call(packed, ((1,), {}), plan)
    second = client.submit_call(packed, ((first,), {}), plan)
    third = client.submit_call(packed, ((1,), {}), plan_of({"after": second}))

    assert second.record.after == (first.id,)
    assert third.record.after == (second.id,)


def test_a_function_that_changed_is_not_taken_for_what_it_was(client: Client) -> None:
    plan, packed = plan_of({}), pack_function(plain)
    changed = packed._replace(data=packed.data + b".", modules=("numpy",))
    one, two = [client.submit_call(each, ((1,), {}), plan) for each in (packed, changed) * 3][-2:]

    calls = [specs.decode(job.record.spec).call for job in (one, two)]
    assert [call.function.data for call in calls if call] == [packed.data, changed.data]
    assert [call.modules for call in calls if call] == [(), ("numpy",)]


def test_a_blob_is_offered_again_once_it_may_have_been_forgotten(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sha = plan_of({}), sha256(LARGE.data).hexdigest()
    for _ in range(2):
        client.submit_call(LARGE, ((1,), {}), plan)
    client._session.queue.link.call("DEL", *client._session.queue.link.call("KEYS", f"*{sha}*"))

    client.submit_call(LARGE, ((1,), {}), plan)
    assert client._session.store.has([sha]) == {sha}
    monkeypatch.setattr("gpulayer.payload.RENEWED_S", 0.0)
    client.submit_call(LARGE, ((1,), {}), plan)
    assert not client._session.store.has([sha])


def test_what_calls_share_is_kept_of_so_many_functions(client: Client) -> None:
    submitter, packed, plans = (
        client._opened.submitter,
        pack_function(plain),
        [plan_of({}) for _ in range(300)],
    )
    assert len(plans) > SHARED_KEPT
    for plan in plans:
        assert submitter._shared_by(packed, plan, "client") is None
        assert submitter._shared_by(packed, plan, "client") is submitter._shared_by(packed, plan, "client")

    assert 0 < len(submitter._shared) <= SHARED_KEPT


def test_a_function_of_many_bytes_is_not_held(client: Client) -> None:
    submitter, plan = client._opened.submitter, plan_of({})
    large = LARGE._replace(data=b"." * (MOST_BYTES + 1))

    assert submitter._shared_by(large, plan, "client") is submitter._shared_by(large, plan, "client") is None
    assert not submitter._shared


def test_threads_that_call_one_function_at_once_have_jobs_of_their_own(client: Client) -> None:
    packed, plan = pack_function(plain), plan_of({})
    ids: list[str] = []

    def calls() -> None:
        for number in range(50):
            ids.append(client.submit_call(packed, ((number,), {}), plan).id)

    with in_background(*[calls] * 4):
        wait_until(lambda: len(ids) == 200, PATIENCE_S, "four threads have submitted")
    assert len(set(ids)) == 200
    assert {client.get(job_id).state for job_id in ids} == {"queued"}


def test_a_forked_child_calls_under_its_own_name(client: Client) -> None:
    packed, plan = pack_function(plain), plan_of({})
    for _ in range(2):
        client.submit_call(packed, ((1,), {}), plan)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, client.submit_call(packed, ((1,), {}), plan).id.encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    job_id = os.read(reader, 100).decode()
    os.close(reader)
    os.close(writer)
    mine = client.submit_call(packed, ((1,), {}), plan)

    names = [stored(client, each)[b"client"] for each in (job_id, mine.id)]
    assert names[0] != names[1]
