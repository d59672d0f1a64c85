"""A job's record, as it is read back from the fields of its hash."""

from __future__ import annotations

import pytest

from gpulayer_broker.job import JobRecord, decode_record


def record(**fields: bytes) -> JobRecord:
    found = decode_record("j_1", {"state": b"succeeded", "ended_ms": b"5500", **fields})
    assert found is not None
    return found


def test_the_run_time_is_from_start_to_end() -> None:
    assert record(started_ms=b"5000", usage=b'{"wall_s": 9}').run_time_s == 0.5


def test_a_job_that_ended_before_its_start_was_told_has_the_time_that_its_worker_measured() -> None:
    assert record(started_ms=b"", usage=b'{"wall_s": 0.02}').run_time_s == 0.02


@pytest.mark.parametrize("usage", [b"", b"nonsense", b"{}", b"[]", b'{"wall_s": null}'])
def test_a_job_that_never_began_has_no_run_time(usage: bytes) -> None:
    assert record(started_ms=b"", usage=usage).run_time_s is None
