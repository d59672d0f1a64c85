"""What a worker and a restart meet when a great many jobs are queued: the time of a claim, and of coming back.

Claims are a worker's, one slot at a time, over every signature of the queue; each job is ended before the next claim.
The restart is a kill -9 of the server: measured is the time until it answers again, and until a claim is granted.
"""

from __future__ import annotations

import secrets
import signal
import time
from typing import Any

from benchmarks.common import requirements_of
from gpulayer_broker import functions
from gpulayer_broker.answers import Grant
from gpulayer_broker.connection import Link
from gpulayer_broker.embedded import ensure_server, terminate_server
from gpulayer_broker.folders import Folders
from gpulayer_broker.functions import Ending, Offer, Registration
from gpulayer_broker.locks import wait_until_free
from gpulayer_broker.queue import Queue

WORKER, INCARNATION = "w_bench", "i1"
CLAIMS = 5000
WARM_UP = 200
MOST_S = 300.0


def join(queue: Queue, signatures: int) -> None:
    """A worker that fits every signature."""
    fits: dict[str, tuple[int, ...]] = {requirements_of(n).signature: () for n in range(signatures)}
    version = (queue.link.call("GET", f"{queue.keys.root}signatures_version") or b"0").decode()
    worker = Registration(
        WORKER, "n_bench", INCARNATION, "k_bench", 64, 64, 1 << 20, 60_000, 60_000, b"{}", b"{}"
    )
    answer = queue.run(functions.register(worker, version, fits))
    if answer.outcome != "ok":
        raise AssertionError(f"the worker was not taken: {answer.outcome}")


def claim(queue: Queue) -> Grant:
    offer = Offer(WORKER, INCARNATION, 1, secrets.token_hex(16), 60_000, 1_000_000)
    [grant] = queue.run(functions.claim(offer)).grants
    return grant


def end(queue: Queue, grant: Grant) -> None:
    queue.run(functions.commit(Ending(grant.id, grant.token, "succeeded")))


def claims(queue: Queue, signatures: int) -> dict[str, float]:
    """Milliseconds of a claim, as its worker waits for it."""
    join(queue, signatures)
    took_ms = []
    for number in range(WARM_UP + CLAIMS):
        start = time.perf_counter()
        grant = claim(queue)
        if number >= WARM_UP:
            took_ms.append((time.perf_counter() - start) * 1000)
        end(queue, grant)
    took_ms.sort()
    return {"claim_p50_ms": took_ms[CLAIMS // 2], "claim_p99_ms": took_ms[CLAIMS * 99 // 100]}


def restart(queue: Queue, folders: Folders, signatures: int) -> dict[str, float]:
    """Seconds after a kill -9 of the server, with a look that nothing was lost."""
    before = queued(queue)
    size_bytes = sum(path.stat().st_size for path in folders.queue.rglob("*") if path.is_file())
    terminate_server(folders, signal.SIGKILL)
    if not wait_until_free(folders.server_lock, MOST_S):
        raise AssertionError("the server does not end")
    start = time.perf_counter()
    with Link(ensure_server(folders, deadline_s=MOST_S)) as link:
        answers_s = time.perf_counter() - start
        again = Queue(link, "bench")
        join(again, signatures)
        claim(again)
        claims_s = time.perf_counter() - start
        if queued(again) != before - 1:
            raise AssertionError(f"{before} jobs were queued, {queued(again) + 1} are")
    return {"answers_s": answers_s, "claims_s": claims_s, "file_bytes": size_bytes, "queued": before}


def queued(queue: Queue) -> int:
    count: int = queue.link.call("ZCARD", f"{queue.keys.root}jobs:queued")
    return count


def measure(queue: Queue, folders: Folders, signatures: int) -> dict[str, Any]:
    """Both, in that order: the server is another one afterwards."""
    found = claims(queue, signatures)
    return {**found, "restart": restart(queue, folders, signatures)}
