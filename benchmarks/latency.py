"""Single jobs on an idle worker, one after another: from submit to the first byte of output, and to the result.

    python -m benchmarks.latency [--repeats 5] [--scale 1.0] [--only gpulayer,rq] [--save FOLDER]

Peers beside GPUlayer for submit → result, by their plain roads. Of GPUlayer also a command, the first byte of output
(followed live, of jobs that write and then stay for a moment), and the memory of its processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

import gpulayer as gl
from benchmarks.common import median, save
from benchmarks.peers.contest import (
    OURS,
    Stage,
    System,
    await_workers,
    contest_arguments,
    named,
    on_stage,
    rotated,
)

OUTPUTS = 12
STAYS_S = 0.15
SETTLES_S = 2.0


def speak() -> None:
    print("x", flush=True)
    time.sleep(STAYS_S)


def submit_to_result(stage: Stage, scale: float) -> dict[str, list[float]]:
    """Milliseconds of each call, by road."""
    return {
        road: stage.client.ask("latency", road, max(2, round(calls * scale)))
        for road, calls in stage.system.calls.items()
    }


def submit_to_output(submit: Callable[[], gl.Job[Any]], times: int) -> list[float]:
    """Milliseconds from a submit to the first line of the job's output, which is followed while it runs."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        job = submit()
        assert next(iter(job.logs(follow=True))) == "x"
        found.append((time.perf_counter() - start) * 1000)
        job.wait(60)
    return found


def command_to_result(client: gl.Client, times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        assert client.submit(["true"]).wait(60) == "succeeded"
        found.append((time.perf_counter() - start) * 1000)
    return found


def ours(stage: Stage, scale: float) -> dict[str, Any]:
    """What only GPUlayer is asked for."""
    times = max(2, round(OUTPUTS * scale))
    with gl.Client(redis=f"unix://{stage.socket}") as client:
        kinds: dict[str, Callable[[], gl.Job[Any]]] = {
            "fresh": lambda: client.submit(speak),
            "warm": lambda: client.submit(speak, isolation="warm"),
            "command": lambda: client.submit(["sh", "-c", f"echo x; sleep {STAYS_S}"]),
        }
        for submit in kinds.values():
            submit().wait(60)
        output = {kind: submit_to_output(submit, times) for kind, submit in kinds.items()}
        return {"output_ms": output, "command_ms": command_to_result(client, 4 * times)}


def memory(processes: int) -> dict[str, dict[str, float]]:
    """MB of a worker that has run nothing, and of each process that it keeps after fresh and warm calls."""
    with on_stage(OURS, processes) as stage:
        worker = idle_worker(stage)
        found = {"worker, nothing run yet": megabytes(worker)}
        for road in OURS.calls:
            stage.client.ask("latency", road, 3)
        found["worker, after jobs"] = megabytes(worker)
        for number, child in enumerate(worker.children(recursive=True), 1):
            found[f"{role(child)} {number}"] = megabytes(child)
        return found


def idle_worker(stage: Stage) -> psutil.Process:
    """The worker, once the queue knows it."""
    stage.launch()
    assert stage.worker is not None
    with gl.Client(redis=f"unix://{stage.socket}") as client:
        await_workers(client, 1)
    time.sleep(SETTLES_S)
    return psutil.Process(stage.worker.pid)


def role(process: psutil.Process) -> str:
    """What a process below the worker is for."""
    words = " ".join(process.cmdline())
    parent = process.parent()
    forked = parent is not None and parent.cmdline() == process.cmdline()
    return "warm process" if forked else "fork server" if "runner" in words else "helper"


def megabytes(process: psutil.Process) -> dict[str, float]:
    """Resident memory, its proportional share, and what it has alone."""
    facts = process.memory_full_info()
    return {"rss": facts.rss / 1e6, "pss": facts.pss / 1e6, "uss": facts.uss / 1e6}


def measure(systems: Sequence[System], repeats: int, processes: int, scale: float) -> dict[str, Any]:
    """All figures; of each repeat a median."""
    found: dict[str, Any] = {
        system.name: {
            "title": system.title,
            "version": system.version,
            "roads": {road: [] for road in system.calls},
        }
        for system in systems
    }
    output: dict[str, list[float]] = {"fresh": [], "warm": [], "command": []}
    command: list[float] = []
    for repeat in range(repeats):
        for system in rotated(systems, repeat):
            with on_stage(system, processes) as stage:
                stage.start_workers()
                for road, times in submit_to_result(stage, scale).items():
                    found[system.name]["roads"][road].append(median(times))
                if system.own:
                    figures = ours(stage, scale)
                    command.append(median(figures["command_ms"]))
                    for kind, times in figures["output_ms"].items():
                        output[kind].append(median(times))
    result = {"repeats": repeats, "processes": processes, "systems": found}
    if OURS in systems:
        result |= {"output_ms": output, "command_ms": command, "memory_mb": memory(processes)}
    return result


def show(found: dict[str, Any]) -> None:
    rows = [
        (each["title"], road, times)
        for each in found["systems"].values()
        for road, times in each["roads"].items()
    ]
    if "output_ms" in found:
        rows.append(("GPUlayer", "command", found["command_ms"]))
        rows += [("GPUlayer", f"{kind}, output", times) for kind, times in found["output_ms"].items()]
    print(f"{'system':10} {'road':16} {'ms':>8} {'from':>8} {'to':>8}")
    for title, road, times in rows:
        print(f"{title:10} {road:16} {median(times):>8.2f} {min(times):>8.2f} {max(times):>8.2f}")
    for what, size in found.get("memory_mb", {}).items():
        print(
            f"{what:26} {size['rss']:5.1f} MB resident, {size['pss']:5.1f} shared out, {size['uss']:5.1f} alone"
        )


def main() -> None:
    args = contest_arguments(__doc__)
    found = measure(named(args.only), args.repeats, args.processes, args.scale)
    show(found)
    save("latency", found, args.save)


if __name__ == "__main__":
    main()
