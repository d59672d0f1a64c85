"""The record of a job: one encoding, and nothing that arrives is trusted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpulayer_broker import spec
from gpulayer_broker.errors import FormatTooNew, UsageError
from gpulayer_broker.spec import FunctionCall, Payload, Spec, UndecodableSpec

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
PAYLOADS = st.one_of(
    st.binary(max_size=50).map(lambda data: Payload(data, "", len(data))),
    st.builds(Payload, st.none(), st.just("ab" * 32), st.integers(0, 10**9)),
)
SPECS = st.builds(
    Spec,
    kind=st.sampled_from(["command", "function"]),
    name=TEXT,
    argv=st.lists(TEXT, max_size=4).map(tuple),
    call=st.none()
    | st.builds(FunctionCall, PAYLOADS, PAYLOADS, TEXT, TEXT, TEXT, st.lists(TEXT, max_size=2).map(tuple)),
    outputs=st.lists(TEXT, max_size=2).map(tuple),
    env=st.dictionaries(TEXT, TEXT, max_size=3),
    timeout_s=st.none() | st.floats(0.1, 1e6),
    isolation=st.sampled_from(["fresh", "warm"]),
)


@given(SPECS)
def test_a_spec_comes_back_as_it_went(job: Spec) -> None:
    assert spec.decode(spec.encode("j_1", 1, job)) == job


@given(SPECS)
def test_the_encoding_is_canonical(job: Spec) -> None:
    data = spec.encode("j_1", 1, job)

    assert orjson.dumps(orjson.loads(data), option=orjson.OPT_SORT_KEYS) == data


@given(
    SPECS.filter(lambda job: job.call is not None),
    st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    st.integers(0, 2**53),
    PAYLOADS | st.integers(90, 5000).map(lambda size: Payload(b"a" * size, "", size)),
    st.dictionaries(TEXT, st.integers(0, 9) | TEXT, max_size=3),
    st.dictionaries(TEXT.filter(lambda name: name not in spec._KNOWN), TEXT, max_size=3),
)
def test_a_filled_frame_is_what_would_be_encoded(
    job: Spec,
    job_id: str,
    created_ms: int,
    arguments: Payload,
    options: dict[str, object],
    extra: dict[str, object],
) -> None:
    call, job = job.call, replace(job, extra=extra)
    assert call is not None
    whole = replace(job, call=replace(call, arguments=arguments))

    filled = spec.frame(job, options).filled(job_id, created_ms, arguments)
    assert filled == spec.encode(job_id, created_ms, whole, options)


def test_what_is_no_utf_8_is_refused_where_it_is_submitted() -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        spec.encode("j_1", 1, Spec("command", argv=("echo", "\udcff")))


def test_fields_of_a_newer_release_survive() -> None:
    raw = orjson.loads(spec.encode("j_1", 1, Spec("command", argv=("true",))))
    raw["kwargs"]["job"]["colour"] = "blue"

    again = spec.encode("j_1", 1, spec.decode(orjson.dumps(raw)))

    assert orjson.loads(again)["kwargs"]["job"]["colour"] == "blue"


JSON = st.recursive(
    st.none() | st.integers(-(2**53), 2**53) | TEXT, lambda c: st.lists(c) | st.dictionaries(TEXT, c)
)


@given(st.binary(max_size=100) | JSON.map(orjson.dumps))
def test_rubbish_is_refused_by_one_error(data: bytes) -> None:
    with pytest.raises(UndecodableSpec):
        spec.decode(data)


@given(
    SPECS,
    st.sampled_from(["kind", "argv", "call", "env", "timeout_s", "v"]),
    st.sampled_from([None, [], {}, "x", {"a": []}, [1], 99]),
)
def test_a_field_of_another_type_is_read_or_refused_as_such(job: Spec, name: str, value: object) -> None:
    raw = orjson.loads(spec.encode("j_1", 1, job))
    raw["kwargs"]["job"][name] = value

    with suppress(UndecodableSpec, FormatTooNew):
        assert isinstance(spec.decode(orjson.dumps(raw)), Spec)


def test_the_digest_of_a_function_looks_past_its_pickle() -> None:
    def call(pickle: bytes, arguments: bytes) -> Spec:
        return Spec("function", call=FunctionCall(Payload(pickle), Payload(arguments), "m", "f"))

    assert spec.request_digest(call(b"one", b"a")) == spec.request_digest(call(b"two", b"a"))
    assert spec.request_digest(call(b"one", b"a")) != spec.request_digest(call(b"one", b"b"))
