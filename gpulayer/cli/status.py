"""`gpulayer status`: what runs where. It starts nothing."""

from __future__ import annotations

from typing import Any

from gpulayer.cli import options as opt
from gpulayer.cli.output import print_facts, print_json

PARTS = ("supervisor", "server", "worker")


def show_status(
    target: opt.TargetOption = None, redis: opt.RedisOption = None, json: opt.JsonOption = False
) -> int:
    """Show what runs of the target: its processes, workers and jobs. Starts nothing.

    Example: gpulayer status
    """
    from gpulayer.targets import resolve_target

    found = resolve_target(target, redis=redis)
    document: dict[str, Any] = {"schema": 1, "target": found.name}
    if found.is_private:
        from gpulayer.private import status
        from gpulayer_broker.endpoint import Endpoint

        document.update(status())
        if _answers(document["server"]):
            # Not by way of the target, which would start what is missing.
            document.update(_queue(None, Endpoint.unix(document["socket"]).url))
    else:
        document.update(_queue(target, redis))
    if json:
        print_json(document)
    else:
        print_facts(_facts(document))
    return 0


def _answers(server: dict[str, Any] | None) -> bool:
    return server is not None and server["answers"]


def _queue(target: str | None, redis: str | None) -> dict[str, Any]:
    """What the queue itself tells."""
    from gpulayer_broker.job import ACTIVE

    with opt.open_client(target, redis) as client:
        session = client._session
        counts = session.attempt(
            lambda queue: {state: queue.link.call("ZCARD", queue.keys.jobs(state)) for state in ACTIVE}
        )
        workers = {worker.name: worker.state for worker in client.workers()}
        return {"queue": str(session.endpoint), "jobs": counts, "workers": workers}


def _facts(document: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [("target", str(document["target"]))]
    facts += [(part, _process(document[part])) for part in PARTS if part in document]
    if "queue" in document:
        facts.append(("queue", document["queue"]))
        facts.append(
            ("workers", ", ".join(f"{name} {state}" for name, state in document["workers"].items()) or "none")
        )
        facts.append(("jobs", ", ".join(f"{count} {state}" for state, count in document["jobs"].items())))
    facts += [(part, str(document[part])) for part in ("socket", "data") if part in document]
    return facts


def _process(facts: dict[str, Any] | None) -> str:
    from gpulayer_broker.units import format_duration

    if facts is None:
        return "not running"
    up = f", up {format_duration(facts['uptime_s'])}" if facts.get("uptime_s") is not None else ""
    version = f" {facts['version']}" if facts.get("version") else ""
    silent = "" if facts.get("answers", True) else ", does not answer"
    if not facts.get("writes", True):
        silent += ", cannot write: its disk is full"
    stopped = f", stopped (kill -CONT {facts['pid']} lets it go on)" if facts["stopped"] else ""
    return f"pid {facts['pid']}{version}{up}{silent}{stopped}"
