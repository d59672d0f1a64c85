"""Which workers can run what is asked for, and of each other one why not, from the tables of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulayer_broker.availability import cpus_text
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.gpu_matching import gpus_text
from gpulayer_broker.matching import Fits, Reason, summary, verdict
from gpulayer_broker.matching import explain as judge
from gpulayer_broker.requirements import Requirements
from gpulayer_broker.units import format_size
from gpulayer_broker.workers import WorkerRecord, shown_frameworks


@dataclass(frozen=True)
class WorkerVerdict:
    """One worker's answer: never, busy or yes, with all reasons, and what it provides."""

    worker: str
    fits: Fits
    reasons: tuple[str, ...]
    provides: str


@dataclass(frozen=True)
class Explanation:
    """All workers' answers to one request, and the line that sums them up."""

    needs: str
    workers: tuple[WorkerVerdict, ...]
    summary: str

    @property
    def fits(self) -> Fits:
        """never, if no known worker can ever run it; busy, if none can now; else yes."""
        verdicts = {worker.fits for worker in self.workers}
        return "yes" if "yes" in verdicts else "busy" if "busy" in verdicts else "never"

    def __str__(self) -> str:
        lines = [f"{worker.worker}: {'; '.join(worker.reasons)}" for worker in self.workers]
        return "\n".join([f"needs {self.needs}", *lines, self.summary])


def explain(needs: Requirements, workers: Sequence[WorkerRecord], runs_on: str = "") -> Explanation:
    """Every worker's answer; what a newer release wrote cannot be judged, and its worker is left out.

    `runs_on` is the id of the worker that runs the job already: it is not held against it that the job is there.
    """
    judged = [
        (worker, _reasons(needs, worker, worker.capabilities, runs_on))
        for worker in workers
        if worker.capabilities
    ]
    verdicts = tuple(
        WorkerVerdict(
            worker.name, verdict(found), tuple(r.text for r in found), provides(worker.capabilities, needs)
        )
        for worker, found in judged
        if worker.capabilities
    )
    runner = next((f"it runs on {worker.name}" for worker in workers if worker.id == runs_on), "")
    return Explanation(needed(needs), verdicts, runner or summary([found for _, found in judged]))


def _reasons(
    needs: Requirements, worker: WorkerRecord, capabilities: Capabilities, runs_on: str
) -> list[Reason]:
    if worker.id == runs_on:
        return [Reason("yes", "runs it")]
    return judge(needs, capabilities, worker.live(needs))


def provides(capabilities: Capabilities, needs: Requirements) -> str:
    """What a worker has, in a line."""
    groups = [
        f"{group.count} \N{MULTIPLICATION SIGN} {group.model} ({group.kind}, {format_size(group.memory_bytes)})"
        for group in capabilities.groups
    ]
    frameworks = [
        f"{name} {version}"
        for name, version in shown_frameworks(capabilities, (name for name, _ in needs.frameworks)).items()
    ]
    parts = [
        cpus_text(capabilities.cpus),
        f"{format_size(capabilities.memory_bytes)} memory",
        *(groups or ["no GPU"]),
        f"python {capabilities.python}",
        *frameworks,
    ]
    return ", ".join(parts)


def needed(needs: Requirements) -> str:
    """What is asked for, in a line."""
    parts = [f"accelerator {needs.accelerator}"]
    if needs.gpus:
        parts.append(gpus_text(needs.gpus))
    if needs.gpu_memory_bytes:
        parts.append(f"{format_size(needs.gpu_memory_bytes)} GPU memory")
    if needs.gpu_models:
        parts.append(f"gpu model {' or '.join(needs.gpu_models)}")
    parts += [f"{name} {wanted}".rstrip() for name, wanted in needs.frameworks]
    if needs.cpus:
        parts.append(cpus_text(needs.cpus))
    for size_bytes, what in ((needs.memory_bytes, "memory"), (needs.disk_bytes, "disk")):
        if size_bytes:
            parts.append(f"{format_size(size_bytes)} {what}")
    if needs.python:
        parts.append(f"python {needs.python}")
    parts += [f"label {key}={value}" for key, value in needs.labels]
    return ", ".join(parts)
