"""What benchmarks share: a queue server of their own, jobs that cost nothing to describe, and one way to print."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpulayer_broker import spec
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.embedded import ensure_server, stop_server
from gpulayer_broker.folders import Folders
from gpulayer_broker.functions import Submission
from gpulayer_broker.job import new_job_id
from gpulayer_broker.queue import Queue
from gpulayer_broker.requirements import Requirements, build_requirements

LOAD_VARIABLE = "BENCH_LOAD"

_load_at_start = os.getloadavg()[0]


@contextmanager
def own_queue() -> Iterator[tuple[Endpoint, Queue]]:
    """The embedded server with the settings that users get, in a folder of its own."""
    with own_folders() as folders:
        endpoint = ensure_server(folders)
        queue = Queue(Link(endpoint), "bench")
        queue.load()
        yield endpoint, queue


@contextmanager
def own_folders() -> Iterator[Folders]:
    """Folders for a server that is stopped afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="gpb-", dir="/tmp"))
    folders = Folders(folder / "state" / "machine", folder / "run").create()
    try:
        yield folders
    finally:
        stop_server(folders)
        shutil.rmtree(folder, ignore_errors=True)


def requirements_of(n: int) -> Requirements:
    """One of many requirements that differ."""
    return build_requirements(labels={"lane": str(n)} if n else None)


def no_op_command(needs: Requirements) -> Submission:
    """A job as the command line makes it."""
    job_id = new_job_id()
    record = spec.Spec("command", name="true", argv=("true",), requirements=needs.canonical())
    return Submission(
        job_id,
        needs.signature,
        spec.encode(job_id, int(time.time() * 1000), record),
        kind="command",
        name="true",
        client="bench",
    )


def timed(action: Callable[[], object], times: int) -> list[float]:
    """Microseconds of each call."""
    out = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        out.append((time.perf_counter() - start) * 1e6)
    return out


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        # Of the minute before: what else the machine was doing. One value for all benchmarks of a run.
        "load": float(os.environ.get(LOAD_VARIABLE) or _load_at_start),
        "day": time.strftime("%Y-%m-%d"),
    }


def save(name: str, results: Any, folder: str | None) -> None:
    """Raw figures as JSON, beside those of other runs."""
    if folder is None:
        return
    place = Path(__file__).parent / "results" / folder
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{name}.json").write_text(
        json.dumps({"machine": machine(), "results": results}, indent=1) + "\n"
    )
