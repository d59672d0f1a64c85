"""Which workers can run what is asked for, and of each other one why not, from the tables of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpulayer.narrowing import Condition, condition_texts, narrowing, narrowing_line
from gpulayer_broker.availability import cpus_text
from gpulayer_broker.capabilities import Capabilities
from gpulayer_broker.job import PRIORITIES, RUNNING, SCHEDULED, JobRecord
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


@dataclass(frozen=True, repr=False)
class Explanation:
    """All workers' answers to one request, and the line that sums them up."""

    needs: str
    workers: tuple[WorkerVerdict, ...]
    conditions: tuple[Condition, ...]
    summary: str

    @property
    def fits(self) -> Fits:
        """never, if no known worker can ever run it; busy, if none can now; else yes."""
        verdicts = {worker.fits for worker in self.workers}
        return "yes" if "yes" in verdicts else "busy" if "busy" in verdicts else "never"

    def __repr__(self) -> str:
        return str(self)  # what a notebook shows

    def __str__(self) -> str:
        lines = [f"{worker.worker}: {'; '.join(worker.reasons)}" for worker in self.workers]
        return "\n".join([f"needs {self.needs}", *lines, *self.narrowing, self.summary])

    @property
    def narrowing(self) -> list[str]:
        """The line about the conditions; of one worker its own reasons say as much."""
        return [narrowing_line(self.conditions, len(self.workers))] if len(self.workers) > 1 else []


@dataclass(frozen=True)
class Asker:
    """The job that is asked about: the worker that runs it already does not hold against it that it is there, and what
    a machine is kept for depends on who asks."""

    job: str = ""
    priority: int = PRIORITIES["normal"]
    runs_on: str = ""

    @classmethod
    def of(cls, record: JobRecord) -> Asker:
        runs = record.state in (SCHEDULED, RUNNING)
        return cls(record.id, record.priority, record.worker if runs else "")


NOBODY = Asker()


def explain(needs: Requirements, workers: Sequence[WorkerRecord], asker: Asker = NOBODY) -> Explanation:
    """Every worker's answer; what a newer release wrote cannot be judged, and its worker is left out."""
    judged = [
        (worker, _reasons(needs, worker, worker.capabilities, asker))
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
    able = [worker.capabilities for worker, _ in judged if worker.capabilities]
    runner = next((f"it runs on {worker.name}" for worker in workers if worker.id == asker.runs_on), "")
    told = runner or summary([found for _, found in judged])
    return Explanation(needed(needs), verdicts, narrowing(needs, able), told)


def _reasons(
    needs: Requirements, worker: WorkerRecord, capabilities: Capabilities, asker: Asker
) -> list[Reason]:
    if worker.id == asker.runs_on:
        return [Reason("yes", "runs it")]
    found, kept = judge(needs, capabilities, worker.live(needs)), worker.earmark
    if kept is None or verdict(found) == "never":
        return found
    if verdict(found) == "busy":
        here = (kept.job, kept.worker) == (asker.job, worker.id)
        return [*found, Reason("busy", "kept for this job")] if here else found
    if kept.binds(asker.job, asker.priority):
        beside = judge(needs, capabilities, worker.live_beside(needs))
        return found if verdict(beside) == "yes" else [Reason("busy", f"kept for job {kept.job}")]
    return found


def provides(capabilities: Capabilities, needs: Requirements) -> str:
    """What a worker has, in a line."""
    groups = [
        f"{group.count} \u00d7 {group.model} ({group.kind}, {format_size(group.memory_bytes)})"
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
    return ", ".join(condition_texts(needs))
