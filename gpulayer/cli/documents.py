"""How a job is shown: as the facts of `show`, as a row of `jobs`, as the document of `--json`."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from gpulayer.cli.terminal import progress_text
from gpulayer.outcome import error_of, exit_code_of, tail_of
from gpulayer_broker.damage import document
from gpulayer_broker.errors import GpulayerError
from gpulayer_broker.job import FAILED, PRIORITIES, SUCCEEDED, JobRecord
from gpulayer_broker.units import format_size

_PRIORITY_NAMES = {number: name for name, number in PRIORITIES.items()}


def job_document(record: JobRecord) -> dict[str, Any]:
    """The record for scripts: unknown values are null."""
    return {
        "schema": 1,
        "id": record.id,
        "name": record.name,
        "kind": record.kind,
        "state": record.state,
        "phase": record.phase or None,
        "end_reason": record.end_reason or None,
        "exit_code": exit_code(record),
        "worker": record.worker or None,
        "attempt": record.attempt,
        "priority": _PRIORITY_NAMES.get(record.priority, str(record.priority)),
        "owner": record.owner,
        "created_at": _utc(record.created_ms),
        "started_at": _utc(record.started_ms),
        "ended_at": _utc(record.ended_ms),
        "queue_wait_s": record.queue_wait_s,
        "run_time_s": record.run_time_s,
        "needs": needs_of(record),
        "command": command_of(record),
        "error": _loaded(record.error),
        "usage": _loaded(record.usage),
        "progress": _loaded(record.progress.encode()),
        "items": {"count": record.count} if record.is_array else None,
        "notes": _list(record.notes),
        "outputs": record.outputs or None,
    }


def job_facts(record: JobRecord, worker_name: str) -> list[tuple[str, str]]:
    """What `show` prints, label and text."""
    facts = [
        ("job", record.id),
        ("name", record.name),
        ("state", _state(record)),
        ("worker", worker_name or "-"),
        ("attempt", str(record.attempt)),
        ("queue wait", seconds(record.queue_wait_s)),
        ("run time", seconds(record.run_time_s)),
        ("priority", _PRIORITY_NAMES.get(record.priority, str(record.priority))),
        ("owner", record.owner),
        ("created", _utc(record.created_ms) or "-"),
        ("needs", needs_of(record) or "-"),
    ]
    if command := command_of(record):
        facts.append(("command", " ".join(command)))
    if usage := document(record.usage):
        facts.append(("usage", _usage(usage)))
        facts += [("gpu", _device_usage(each)) for each in _devices(usage)]
    if progress := progress_text(record.progress):
        facts.append(("progress", progress))
    if record.final and record.state != SUCCEEDED:
        facts.append(("error", why_it_failed(record)))
        # What it said last often says why.
        facts += [("log", f"gpulayer logs --tail 20 {record.id}")] if record.attempt else []
        facts += [("", line) for line in last_words(record)]
    facts += [("note", str(note)) for note in _list(record.notes)]
    if record.outputs:
        facts.append(("outputs", f"gpulayer outputs {record.id}"))
    return facts


def _state(record: JobRecord) -> str:
    detail = record.end_reason or ("" if record.final else record.phase)
    asked = ", cancel asked" if record.cancel_asked and not record.final else ""
    return f"{record.state} ({detail}{asked})" if detail or asked else record.state


def exit_code(record: JobRecord) -> int | None:
    """The code that a command which follows the job ends with; None while it has not ended."""
    if not record.final:
        return None
    return 0 if record.state == SUCCEEDED else exit_code_of(error_of(record, trusted=False))


def seconds(value: float | None) -> str:
    """A span for people."""
    return "-" if value is None else f"{value:.2f} s"


def needs_of(record: JobRecord) -> str | None:
    """The requirements in a line; None where the record cannot be read."""
    from gpulayer.explaining import needed
    from gpulayer_broker import requirements, spec

    try:
        return needed(requirements.decode(spec.decode(record.spec).requirements))
    except GpulayerError:
        return None


def command_of(record: JobRecord) -> list[str] | None:
    """The command's words; None for a function."""
    from gpulayer_broker import spec

    try:
        return list(spec.decode(record.spec).argv) or None
    except GpulayerError:
        return None


def _usage(usage: Any) -> str:
    parts = []
    if isinstance(usage.get("wall_s"), (int, float)):
        parts.append(f"wall {usage['wall_s']:.2f} s")
    if isinstance(usage.get("cpu_s"), (int, float)):
        parts.append(f"cpu {usage['cpu_s']:.2f} s")
    # That of the whole tree, where the system counts it; else that of its largest process.
    for key in ("peak_memory_bytes", "max_rss_bytes"):
        if isinstance(usage.get(key), int):
            parts.append(f"memory {format_size(usage[key])}")
            break
    return ", ".join(parts)


def _devices(usage: Any) -> list[dict[str, Any]]:
    listed = usage.get("devices")
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _device_usage(usage: dict[str, Any]) -> str:
    """One GPU's peak and mean, as far as its driver told them."""
    told = []
    if isinstance(usage.get("peak_memory_bytes"), int):
        told.append(f"{format_size(usage['peak_memory_bytes'])} at most")
    if isinstance(usage.get("mean_utilisation"), (int, float)):
        told.append(f"{usage['mean_utilisation']:g} % busy")
    return f"{usage.get('uuid')}: {', '.join(told) or 'not told by its driver'}"


def _utc(time_ms: int | None) -> str | None:
    if not time_ms:
        return None
    return (
        datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


def _loaded(raw: bytes) -> Any:
    try:
        return json.loads(raw) if raw else None
    except (ValueError, RecursionError):
        return None


def _list(raw: bytes) -> list[Any]:
    found = _loaded(raw)
    return found if isinstance(found, list) else []


def last_words(record: JobRecord) -> list[str]:
    """The last lines of the log of a job that died without a traceback; none of any other."""
    told = _loaded(record.error)
    return tail_of(told).splitlines() if isinstance(told, dict) else []


def why_it_failed(record: JobRecord) -> str:
    """Why a job ended without success, in a line: what a function raised with its type, what happened else as it is."""
    if record.is_array and record.state == FAILED:
        return f"not all of its {record.count} calls succeeded: gpulayer retry {record.id} --failed runs those again"
    error = error_of(record, trusted=False)
    text = " ".join(str(error).split())
    return text if isinstance(error, GpulayerError) else f"{type(error).__name__}: {text}".rstrip(": ")
