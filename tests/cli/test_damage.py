"""Rubbish in the queue's records: what is damaged is left out, everybody else's jobs and workers are shown as ever."""

from __future__ import annotations

import json

import pytest

from gpulayer_broker.connection import Link
from gpulayer_broker.job import RECORD_FIELDS
from gpulayer_broker.keys import Keys
from tests.cli.conftest import Cli
from tests.sdk.benches import Bench

RUBBISH = (
    b"nan",
    b"1e999",
    b"9" * 5000,
    b'{"a":[',
    b"[" * 5000,
    b"[1]",
    b"\xff\xfe",
    b"\x1b[31mred\n",
)
WORKER_FIELDS = ("node", "class", "slots", "cpus", "memory", "heartbeat_ms", "state", "since_ms", "info")
INFOS = (
    b'{"devices": 5}',
    b'{"devices": [5]}',
    b'{"devices": [{}]}',
    b'{"devices": [{"usable": true, "foreign": 3}]}',
    b'{"started_s": 1e300}',
    b'{"started_s": NaN}',
    b'{"python": "no"}',
    b'{"name": 5, "gpu_share": "x", "disk_free_bytes": "much"}',
)


@pytest.mark.parametrize("rubbish", RUBBISH, ids=range(len(RUBBISH)))
def test_a_damaged_job_hides_no_other(cli: Cli, address: str, link: Link, keys: Keys, rubbish: bytes) -> None:
    sound = cli("submit", "--detach", "--", "true").out.strip()
    damaged = cli("submit", "--detach", "--", "true").out.strip()
    for field in RECORD_FIELDS:
        before = link.call("HGET", keys.job(damaged), field)
        link.call("HSET", keys.job(damaged), field, rubbish)

        listed = cli("jobs", "--limit", "1000")
        assert listed.err == "", field
        assert sound in listed.out
        for command in ("show", "explain"):
            told = cli(command, damaged)
            assert "GPULAYER_DEBUG" not in told.err, (command, field, told.err)
        restore = ("HDEL",) if before is None else ("HSET",)
        link.call(*restore, keys.job(damaged), field, *([] if before is None else [before]))


@pytest.mark.parametrize(
    "logs", [b"nan", b"[1]", b"5", b'{"0": 5}', b'{"0": {}}', b'{"0": {"sha256": 1, "size": "x"}}', b"\xff"]
)
def test_a_log_whose_record_is_damaged_is_told_in_one_line(cli: Cli, bench: Bench, logs: bytes) -> None:
    job_id = cli("submit", "--detach", "--", "true").out.strip()
    bench.end(job_id, fields={"logs": logs})

    outcome = cli("logs", job_id)
    assert outcome.code == 1
    assert f"the log of job {job_id} cannot be read" in outcome.err
    assert len(outcome.err.splitlines()) == 1


@pytest.mark.parametrize("field", ["error", "usage", "progress"])
def test_a_number_of_any_length_is_shown_as_it_is(
    cli: Cli, address: str, link: Link, keys: Keys, field: str
) -> None:
    job_id = cli("submit", "--detach", "--", "true").out.strip()
    link.call("HSET", keys.job(job_id), field, b"9" * 50)

    assert json.loads(cli("show", "--json", job_id).out)[field] == int("9" * 50)


def test_a_damaged_worker_hides_no_other(cli: Cli, address: str, link: Link, keys: Keys) -> None:
    job_id = cli("submit", "--detach", "--", "true").out.strip()
    link.call("HSET", keys.job(job_id), "worker", "damaged")
    for name in ("sound", "damaged"):
        link.call("ZADD", keys.named("workers"), 0, name)
        link.call("HSET", keys.worker(name), "node", "n1", "state", "online", "slots", 2, "cpus", 2)
    link.call("HSET", keys.held("n1"), "j_1", "rubbish", "j_2", "w 1e9 nan", "j_3", b"\xff 1 1")
    for field, rubbish in [(field, value) for field in WORKER_FIELDS for value in RUBBISH] + [
        ("info", info) for info in INFOS
    ]:
        link.call("HSET", keys.worker("damaged"), field, rubbish)
        for command in (
            ("workers",),
            ("status",),
            ("worker", "status", "damaged"),
            ("workers", "--json"),
            ("show", job_id),
        ):
            told = cli(*command)
            assert told.err == "", (field, rubbish, command)
        assert "sound" in cli("workers").out
        link.call("HSET", keys.worker("damaged"), field, "")
    link.call("HDEL", keys.job(job_id), "worker")
    link.call("DEL", keys.held("n1"), keys.named("workers"), keys.worker("sound"), keys.worker("damaged"))
