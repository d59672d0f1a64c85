"""Bursts of no-op jobs, every result awaited: jobs a second, microseconds to submit one, and memory of one that waits.

    python -m benchmarks.burst [--repeats 5] [--scale 1.0] [--only gpulayer,rq] [--save FOLDER]

Each system runs by its plain road and by its own fastest documented one, on a server of its own with the same settings,
with two worker processes. Repeats are interleaved: each runs every system, in another order. A road is
given as many jobs as take about a second, for what does not depend on the number; `--scale` multiplies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.common import median, save
from benchmarks.peers.contest import System, contest_arguments, named, on_stage, rotated
from gpulayer_broker.queue import Queue

WAITING = 1000


def memory_bytes(queue: Queue) -> int:
    text = queue.link.call("INFO", "memory").decode()
    return int(next(line for line in text.splitlines() if line.startswith("used_memory:")).split(":")[1])


def waiting_bytes(system: System, processes: int) -> dict[str, float]:
    """Bytes of the server's memory for each job that waits, by road; nothing of Ray, which has no server."""
    found: dict[str, float] = {}
    for road in system.burst if system.worker is not None else ():
        with on_stage(system, processes) as stage:
            stage.client.ask("send", road, 1)
            before = memory_bytes(stage.queue)
            stage.client.ask("send", road, WAITING)
            found[road] = (memory_bytes(stage.queue) - before) / WAITING
    return found


def bursts(system: System, processes: int, scale: float) -> dict[str, dict[str, float]]:
    """One burst by each road, after a warm-up."""
    with on_stage(system, processes) as stage:
        stage.start_workers()
        return {
            road: stage.client.ask("burst", road, max(1, round(jobs * scale)))
            for road, jobs in system.burst.items()
        }


def measure(systems: Sequence[System], repeats: int, processes: int, scale: float) -> dict[str, Any]:
    """All figures, by system and road."""
    found: dict[str, Any] = {}
    for system in systems:
        waiting = waiting_bytes(system, processes)
        roads: dict[str, dict[str, Any]] = {
            road: {"per_s": [], "submit_us": [], "waiting_bytes": waiting.get(road)} for road in system.burst
        }
        found[system.name] = {"title": system.title, "version": system.version, "roads": roads}
    for repeat in range(repeats):
        for system in rotated(systems, repeat):
            for road, run in bursts(system, processes, scale).items():
                figures = found[system.name]["roads"][road]
                figures["jobs"] = run["jobs"]
                figures["per_s"].append(run["jobs"] / run["whole_s"])
                figures["submit_us"].append(run["send_s"] / run["jobs"] * 1e6)
    return {"repeats": repeats, "processes": processes, "systems": found}


def show(found: dict[str, Any]) -> None:
    print(
        f"{'system':10} {'road':14} {'jobs':>6} {'jobs/s':>9} {'from':>9} {'to':>9} {'submit us':>10} {'bytes':>7}"
    )
    for each in found["systems"].values():
        for road, run in each["roads"].items():
            speeds, waiting = run["per_s"], run["waiting_bytes"]
            print(
                f"{each['title']:10} {road:14} {run['jobs']:>6} {median(speeds):>9.0f} {min(speeds):>9.0f} "
                f"{max(speeds):>9.0f} {median(run['submit_us']):>10.1f} "
                f"{'-' if waiting is None else format(waiting, '.0f'):>7}"
            )


def main() -> None:
    args = contest_arguments(__doc__)
    found = measure(named(args.only), args.repeats, args.processes, args.scale)
    show(found)
    save("burst", found, args.save)


if __name__ == "__main__":
    main()
