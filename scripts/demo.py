"""The main job, end to end, on a queue and a worker of its own, beside whatever this user already runs.

A folder is shipped, its input counted, its output brought back; then a function that uses numpy is mapped over a list.
Ends non-zero unless the returned file is the one that the same code makes here, the list is numpy's own, both records
say succeeded, and nothing of the demo is left running.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "first_job"
MARK = "GPULAYER_STATE_DIR"
NUMBERS = [100, 1_000, 10_000, 100_000]


class Unexpected(Exception):
    """What came back is not what was computed beside it."""


def expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise Unexpected(f"{what}: got {got!r}, wanted {wanted!r}")
    print(f"  ok: {what}")


def gpulayer(*words: str) -> str:
    """What the command prints on stdout; its words and the job's log go to the terminal."""
    command = [str(Path(sys.executable).parent / "gpulayer"), *words]
    print(f"$ gpulayer {shlex.join(words)}", flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def ship_a_folder(folder: Path) -> dict[str, Any]:
    """Submits the example; its record."""
    shipped = gpulayer(
        "submit",
        "--json",
        "--source",
        str(EXAMPLE),
        "--outputs-to",
        str(folder),
        "--",
        "python",
        "count.py",
        "data.txt",
    )
    returned = (folder / "outputs" / "words.tsv").read_bytes()
    sys.path.insert(0, str(EXAMPLE))
    from count import table

    wanted = table((EXAMPLE / "data.txt").read_text()).encode()
    expect("SHA-256 of the returned file", sha256(returned), sha256(wanted))
    return record_of(json.loads(shipped)["id"])


def map_a_function() -> dict[str, Any]:
    """Maps a numpy function; the record of its last call."""
    import numpy as np

    import gpulayer as gl

    @gl.remote
    def spread(n: int) -> float:
        return float(np.std(np.sqrt(np.arange(n))))

    print(f"$ python: spread.map({NUMBERS})", flush=True)
    results = spread.map(NUMBERS)
    expect("the map's list", list(results), [float(np.std(np.sqrt(np.arange(n)))) for n in NUMBERS])
    return record_of(results.jobs[-1].id)


def record_of(job_id: str) -> dict[str, Any]:
    return dict(json.loads(gpulayer("show", job_id, "--json")))


def report(record: dict[str, Any]) -> None:
    """The figures of a record; all of them have to be there."""
    expect(f"state of {record['id']}", record["state"], "succeeded")
    for name in ("worker", "attempt", "queue_wait_s", "run_time_s"):
        if record.get(name) is None:
            raise Unexpected(f"the record of {record['id']} has no {name}")
        print(f"    {name:13} {record[name]}")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def left_running(state: str) -> list[str]:
    """Processes whose environment names the demo's folder, other than this one and its parents."""
    found = []
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if process.pid not in mine and process.environ().get(MARK) == state:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    return found


def demo(folder: Path) -> None:
    try:
        records = [ship_a_folder(folder / "back"), map_a_function()]
        for record in records:
            report(record)
    finally:
        gpulayer("down")
    expect("processes left after gpulayer down", left_running(os.environ[MARK]), [])


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="gpulayer-demo-"))
    os.environ[MARK] = str(folder / "state")
    try:
        demo(folder)
    except (Unexpected, subprocess.CalledProcessError, OSError) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("demo: all as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
