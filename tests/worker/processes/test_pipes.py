"""Reports as a job writes them into its pipe, and what a job may write that is none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from gpulayer_worker.processes.pipes import MAX_FRAME_BYTES, ReportPipe
from gpulayer_worker.runner import report


@pytest.fixture
def pipe() -> Iterator[ReportPipe]:
    pipe = ReportPipe()
    yield pipe
    pipe.close()


def frame(header: bytes, payload: bytes = b"") -> bytes:
    return report.LENGTH.pack(len(header)) + header + payload


PLAIN = {"ok": True, "kind": "json", "size": 4, "file": None}


@pytest.mark.parametrize(
    "header",
    [
        PLAIN,
        PLAIN | {"kind": "pickle"},
        {"ok": False, "type": "ValueError", "message": "ü", "size": 4, "file": None},
    ],
)
def test_a_report_is_read_as_it_was_sent(pipe: ReportPipe, header: dict[str, object]) -> None:
    report.send(pipe.writer, header, b"1234")
    pipe.read()

    read = pipe.report()
    assert read is not None
    assert (read.header, read.payload) == (header, b"1234")


def test_the_commonest_header_is_the_one_that_json_reads() -> None:
    assert json.loads(report.PLAIN % 4) == PLAIN


def test_a_report_in_pieces_is_there_with_the_last(pipe: ReportPipe) -> None:
    data = frame(report.PLAIN % 4, b"1234")
    for number in range(len(data)):
        assert pipe.report() is None
        os.write(pipe.writer, data[number : number + 1])
        pipe.read()

    assert pipe.report() is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0",
        frame(b""),
        frame(b"[]"),
        frame(b"\xff\xfe"),
        frame(b"[" * 50_000),
        frame(report.PLAIN % 5, b"1234"),
        frame(report.PLAIN % 3, b"1234"),
        frame(b'{"ok":true,"kind":"json","size":-4,"file":null}', b"1234"),
        frame(b'{"ok":true,"kind":"json","size":' + b"4" * 9000 + b',"file":null}', b"1234"),
        frame(b'{"ok":true,"kind":"json","size":,"file":null}', b"1234"),
    ],
)
def test_what_is_no_report_is_none(pipe: ReportPipe, data: bytes) -> None:
    os.write(pipe.writer, data)
    pipe.read()

    assert pipe.report() is None


def test_no_more_is_kept_than_a_report_may_have(pipe: ReportPipe) -> None:
    for _ in range(3 * MAX_FRAME_BYTES // 60_000):
        os.write(pipe.writer, b"x" * 60_000)
        pipe.read()

    assert len(pipe._data) == MAX_FRAME_BYTES
