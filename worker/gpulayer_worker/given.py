"""Fetches what other jobs returned, for a call that takes it as an argument, into one file that the runner reads.

The file is a length, a JSON head and the results' bytes one after another (`runner/given.py` reads it). A result that
is not there (its job failed, or its time is over) is an error that names it: the call is not begun.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpulayer_broker.errors import BlobMissing, GpulayerError, StoreError
from gpulayer_broker.given import Given
from gpulayer_broker.items import read_outcomes
from gpulayer_broker.job import SUCCEEDED
from gpulayer_broker.queue import Queue
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.units import format_size

LENGTH = struct.Struct("!I")
PAGE = 500
_FIELDS = ("state", "count", "result_kind", "result")

Result = tuple[str, bytes]


def write_given(given: Iterable[Given], queue: Queue, store: BlobStore, path: Path, limit_bytes: int) -> Path:
    """Writes all results into the file, which may have so many bytes; its path."""
    head, results, left_bytes = [], list[bytes](), limit_bytes
    for each in given:
        values = []
        for result in _results(each, queue):
            kind, data = _unpacked(result, store, limit_bytes)
            left_bytes -= len(data)
            if left_bytes < 0:
                raise StoreError(
                    f"the results that it takes are over the limit of {format_size(limit_bytes)}: "
                    "return less, or write files to a place that all machines share"
                )
            values.append((kind, len(data)))
            results.append(data)
        head.append({"at": each.place, "many": each.many or _is_array(each, queue), "values": values})
    text = json.dumps(head).encode()
    with path.open("wb") as file:
        file.writelines((LENGTH.pack(len(text)), text, *results))
    return path


def _results(given: Given, queue: Queue) -> Iterator[Result]:
    ids = given.jobs
    for start in range(0, len(ids), PAGE):
        page = ids[start : start + PAGE]
        commands = [("HMGET", queue.keys.job(job_id), *_FIELDS) for job_id in page]
        for job_id, row in zip(page, queue.link.pipeline(commands), strict=True):
            if isinstance(row, GpulayerError):
                raise row
            state, count, kind, data = row
            if state is None or state.decode() != SUCCEEDED:
                raise _missing(
                    given, job_id, "is no longer kept" if state is None else f"is {state.decode()}"
                )
            if count:
                yield from _items(given, queue, job_id, int(count))
            elif data is None and kind not in (None, b"", b"none"):
                raise _missing(given, job_id, "keeps its result no longer")
            else:
                yield (kind or b"none").decode(), data or b""


def _is_array(given: Given, queue: Queue) -> bool:
    """Whether one record stands for many calls: its result is a list, of one value too."""
    return bool(queue.link.call("HGET", queue.keys.job(given.job), "count"))


def _items(given: Given, queue: Queue, job_id: str, count: int) -> Iterator[Result]:
    """The results of an array's items in their order."""
    outcomes = {
        number: outcome
        for start, page in queue.pages(job_id).items()
        for number, outcome in read_outcomes(start, page)
    }
    for number in range(count):
        outcome = outcomes.get(number)
        if outcome is None:
            raise _missing(given, job_id, f"keeps the result of item {number} no longer")
        yield outcome.kind, outcome.data


def _unpacked(result: Result, store: BlobStore, limit_bytes: int) -> Result:
    """The result itself, where its bytes are in the store."""
    kind, data = result
    if kind != "blob":
        return result
    named = json.loads(data)
    return str(named["kind"]), store.read_bytes(str(named["sha256"]), limit_bytes)


def _missing(given: Given, job_id: str, why: str) -> GpulayerError:
    place = (
        f"argument '{given.place}'" if isinstance(given.place, str) else f"argument number {given.place + 1}"
    )
    return BlobMissing(f"its {place} is what job {job_id} returned, which {why}", job_id=job_id)
