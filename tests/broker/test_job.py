"""A job's states as one table, and its record, as it is read back from the fields of its hash."""

from __future__ import annotations

import re

import pytest

from gpulayer_broker import library
from gpulayer_broker.job import _LETTERS, FINAL, STATES, TRANSITIONS, JobRecord, decode_record, new_job_id
from tests.moves import strange


def record(**fields: bytes) -> JobRecord:
    found = decode_record("j_1", {"state": b"succeeded", "ended_ms": b"5500", **fields})
    assert found is not None
    return found


def test_an_id_is_twelve_letters_each_of_which_is_as_likely() -> None:
    ids = [new_job_id() for _ in range(500)]

    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"j_[0-9a-hjkmnp-tv-z]{12}", job_id) for job_id in ids)
    assert {_LETTERS.count(letter) for letter in set(_LETTERS)} == {256 // 32}


def test_the_run_time_is_from_start_to_end() -> None:
    assert record(started_ms=b"5000", usage=b'{"wall_s": 9}').run_time_s == 0.5


def test_a_job_that_ended_before_its_start_was_told_has_the_time_that_its_worker_measured() -> None:
    assert record(started_ms=b"", usage=b'{"wall_s": 0.02}').run_time_s == 0.02


@pytest.mark.parametrize("usage", [b"", b"nonsense", b"{}", b"[]", b'{"wall_s": null}'])
def test_a_job_that_never_began_has_no_run_time(usage: bytes) -> None:
    assert record(started_ms=b"", usage=usage).run_time_s is None


def test_every_transition_is_of_known_states_by_functions_that_there_are() -> None:
    functions = {name.removesuffix(".lua") for name in library.sources()}
    for t in TRANSITIONS:
        assert {t.source or "queued", t.target} <= set(STATES), t
        assert set(t.function.split(", ")) <= functions, t


def test_what_is_final_stays_so_but_for_messages_that_enter_anew_under_their_id() -> None:
    assert {(t.event, t.function) for t in TRANSITIONS if t.source in FINAL} == {
        ("requeued, a dead letter", "requeue"),
        ("a Dramatiq message, enqueued again", "submit, commit"),
    }


def test_a_move_that_is_not_in_the_table_is_seen() -> None:
    seen = [
        ("j_1", "queued"),
        ("j_1", "running"),
        ("j_2", "queued"),
        ("j_1", "succeeded"),
        ("j_1", "running"),
    ]

    assert strange(seen) == ["j_1: succeeded → running"]
