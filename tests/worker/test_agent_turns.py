"""A real worker that small commands keep busy gives a job that needs all of it its turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from gpulayer_broker.requirements import build_requirements
from gpulayer_broker.settings import Settings
from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.workers import Desk


def small_jobs(desk: Desk) -> Iterator[str]:
    """Commands without end, no two of which that run side by side end together."""
    for n in count():
        yield desk.shell(f"sleep 0.{3 + n % 2 * 2}")


def test_a_job_for_the_whole_worker_runs_though_small_ones_keep_coming(desk: Desk, hire: Hire) -> None:
    desk.queue.configure(Settings(earmark_s=0.5))
    hire(slots=2)
    coming = small_jobs(desk)
    waiting = [next(coming) for _ in range(6)]
    wait_until(lambda: desk.record(waiting[1]).state == "running", PATIENCE_S, "both slots are taken")
    whole = desk.submit(desk.command_spec("true"), needs=build_requirements(cpus=2))

    def has_run() -> bool:
        """As many small jobs wait as ever."""
        if desk.link.call("ZCARD", desk.queue.keys.jobs("queued")) < 5:
            waiting.append(next(coming))
        return desk.record(whole).final

    wait_until(has_run, PATIENCE_S, "the job that needs both slots has run")
    assert desk.record(whole).state == "succeeded"
    assert any(desk.record(job).state == "queued" for job in waiting)
