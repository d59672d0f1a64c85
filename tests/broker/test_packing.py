"""Commands as bytes: what redis-py would write, at once or around what was written before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker import functions, packing
from gpulayer_broker.functions import Stencil, Stencilled, Submission
from gpulayer_broker.packing import REMEMBERED, packed

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@pytest.mark.parametrize(
    "arg",
    ["", "é", "1", 1, 0, -7, 10**30, 1.0, 0.1, b"", b"\r\n", "x" * 48, "x" * 49, "x" * 20_000, b"x" * 20_000],
    ids=repr,
)
def test_an_argument_is_written_as_redis_py_writes_it_the_first_time_and_later(
    arg: bytes | str | float,
) -> None:
    """Equal numbers of two kinds (1 and 1.0) are two arguments."""
    command = ("SET", 1, arg, 1.0, arg)
    connection: Any = redis.Connection
    expected = b"".join(connection().pack_command(*command))

    assert [b"".join(packed([command])) for _ in range(3)] == [expected] * 3
    assert b"".join(packed([command, command])) == expected * 2


def test_what_is_no_argument_is_refused_even_where_it_equals_one() -> None:
    packed([("GET", 1)])
    with pytest.raises(TypeError, match="bool"):
        packed([("GET", True)])


def test_arguments_that_were_written_are_remembered_within_a_bound() -> None:
    for number in range(3 * REMEMBERED):
        packed([("GET", f"key-{number}")])
    assert 0 < len(packing._elements) <= REMEMBERED


SUBMISSIONS = st.builds(
    Submission,
    id=st.just(""),
    signature=TEXT,
    spec=st.just(b""),
    owner=TEXT,
    priority=st.integers(0, 4),
    client=TEXT,
    delay_ms=st.integers(0, 10**12),
    kind=TEXT,
    name=TEXT | st.just("$32\r\n"),
    permit=TEXT,
    keep_ms=st.integers(0, 9),
    lane=TEXT,
)


@given(SUBMISSIONS, st.from_regex(r"[a-z0-9_-]{1,64}", fullmatch=True), st.sampled_from([0, 1, 32, 20_000]))
def test_a_submit_by_a_stencil_is_written_as_one_in_full(job: Submission, job_id: str, size: int) -> None:
    stencil, spec = Stencil.of(job, "root:"), b"\n" * size
    by_stencil = functions.submit(Stencilled(job_id, spec, stencil)).command("root:")
    in_full = functions.submit(replace(job, id=job_id, spec=spec)).command("root:")

    assert b"".join(packed([by_stencil])) == b"".join(packed([in_full]))
    assert b"".join(packed([in_full, by_stencil, in_full])) == b"".join(packed([in_full] * 3))
