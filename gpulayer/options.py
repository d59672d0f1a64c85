"""The options of a job as users write them, and what they mean: one reader for SDK and command line.

`plan_of` refuses what is unknown or has no sense before anything is sent, in the words of whoever wrote it
(`timeout='x'` in Python, `--timeout x` on the command line).
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypedDict

from gpulayer_broker.arguments import Wording, count, one_of
from gpulayer_broker.errors import BadRequirement, BadSize, did_you_mean
from gpulayer_broker.failures import failure_names
from gpulayer_broker.job import PRIORITIES
from gpulayer_broker.requirements import ASKED, Requirements, build_requirements
from gpulayer_broker.units import parse_duration
from gpulayer_broker.versions import canonical_range


class Identified(Protocol):
    """What has the id of a job: its handle."""

    @property
    def id(self) -> str: ...


class Several(Protocol):
    """What has jobs: the result of a map."""

    @property
    def jobs(self) -> Sequence[Identified]: ...


# Jobs by handle or id, groups by id, or all jobs of a map.
Predecessors: TypeAlias = Identified | Several | str | Iterable[Identified | str]
# Exceptions, their names, exit codes and end reasons.
Failures: TypeAlias = "type[BaseException] | str | int | Iterable[type[BaseException] | str | int]"
Pairs = Mapping[str, str | None] | Iterable[str]

OUTAGES = ("keep",)
FRESH, WARM = "fresh", "warm"
NAME_CHARS = 200
MOST_RETRIES = 1000
# The year 9999: what lies behind is a mistake, such as milliseconds.
LATEST_S = 253_402_300_799
POLICIES = ("succeeded", "ended")
_JOB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# What may be part of a key in the queue.
_GATE_KEY = re.compile(r"[^\s:=/,]{1,200}")
_RATE = re.compile(r"(\d{1,6})\s*/\s*(.+)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class JobOptions(TypedDict, total=False):
    """Everything that a job can ask for, beside what it runs."""

    accelerator: str | None
    gpus: int | None
    gpu_memory: str | int | None
    gpu_model: str | Iterable[str] | None
    frameworks: Pairs | None
    profile: str | None
    cpus: int | None
    memory: str | int | None
    disk: str | int | None
    python: str | None
    labels: Pairs | None
    retries: int
    retry_on: Failures | None
    timeout: str | float | None
    priority: str
    name: str
    idempotency_key: str | None
    delay: str | float | None
    eta: datetime | str | float | None
    result_ttl: str | float | None
    env: Mapping[str, str] | None
    on_outage: str | None
    isolation: str
    after: Predecessors | None
    after_policy: str
    concurrency_key: str | None
    concurrency: int
    rate_limit: str | None


class RemoteOptions(JobOptions, total=False):
    """A remote function's options: a job's, and where it goes."""

    target: str | None


KNOWN = tuple(JobOptions.__annotations__)
KNOWN_REMOTE = (*KNOWN, "target")


@dataclass(frozen=True)
class Plan:
    """Options that were understood."""

    needs: Requirements
    name: str = ""
    priority: int = PRIORITIES["normal"]
    timeout_s: float | None = None
    delay_ms: int = 0
    eta_s: float | None = None
    keep_ms: int = 0
    idempotency_key: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    on_outage: str = ""
    retries: int = 0
    retry_on: tuple[str, ...] = ()
    isolation: str = FRESH
    after: tuple[str, ...] = ()
    after_policy: str = "succeeded"
    permit: str = ""
    rate: str = ""

    @property
    def message_options(self) -> dict[str, Any]:
        """What the message tells Dramatiq's middleware."""
        return {"max_retries": self.retries}

    def waits_ms(self) -> int:
        """How long from now it may not begin."""
        return self.delay_ms if self.eta_s is None else max(0, math.ceil(1000 * (self.eta_s - time.time())))

    def taking_turns(self, most: int, name: str = "max_parallel") -> Plan:
        """The same for the jobs of one map, of which so many run at once."""
        words = Wording(False)
        if self.permit:
            raise words.error(name, most, "the concurrency_key already says how many run at once")
        return replace(self, permit=_permit(words, f"map-{secrets.token_hex(8)}", most, name))

    def on_python(self, minor: str) -> Plan:
        """The same on a Python of this minor version, where the user asked for none; made once for all calls."""
        if self.needs.python:
            return self
        if (plan := self._by_python.get(minor)) is None:
            needs = replace(self.needs, python=canonical_range(f"=={minor}.*"))
            plan = self._by_python[minor] = replace(self, needs=needs)
        return plan

    @cached_property
    def _by_python(self) -> dict[str, Plan]:
        return {}


def refuse_unknown(what: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """TypeError for an option that this release does not honour."""
    names = tuple(known)
    for name in options:
        if name not in names:
            raise TypeError(f"{what} has no option '{name}': {did_you_mean(name, names)}")


def plan_of(options: Mapping[str, Any], *, flags: bool = False) -> Plan:
    """What the options mean; BadRequirement or UnknownName names the one that has no sense."""
    words = Wording(flags)
    wanted: dict[str, Any] = {name: options.get(name) for name in ASKED}
    isolation = one_of(words, "isolation", options.get("isolation") or FRESH, (FRESH, WARM))
    # Only a worker that keeps warm processes may take it, so that another never runs it otherwise than asked.
    features = (WARM,) if isolation == WARM else ()
    return Plan(
        needs=build_requirements(**wanted, features=features, wording="flag" if flags else "argument"),
        name=_name(words, options.get("name") or ""),
        priority=_priority(words, options.get("priority") or "normal"),
        timeout_s=_timeout_s(words, options.get("timeout")),
        delay_ms=round(1000 * (_duration_s(words, "delay", options.get("delay")) or 0)),
        eta_s=_eta_s(words, options.get("eta"), options.get("delay")),
        keep_ms=_keep_ms(words, options.get("result_ttl")),
        idempotency_key=_key(words, options.get("idempotency_key") or ""),
        env=_env(words, options.get("env") or {}),
        on_outage=_on_outage(words, options.get("on_outage") or ""),
        retries=_retries(words, options.get("retries") or 0),
        retry_on=_retry_on(words, options.get("retry_on"), options.get("retries") or 0),
        isolation=isolation,
        after=_after(words, options.get("after")),
        after_policy=one_of(words, "after_policy", options.get("after_policy") or "succeeded", POLICIES),
        permit=_permit(words, options.get("concurrency_key"), _at_once(options)),
        rate=_rate(words, options.get("rate_limit"), options.get("concurrency_key")),
    )


def _duration_s(words: Wording, argument: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        return parse_duration(value)
    except BadSize as error:
        raise words.error(argument, value, str(error)) from None


def _timeout_s(words: Wording, value: Any) -> float | None:
    seconds = _duration_s(words, "timeout", value)
    if seconds == 0:
        raise words.error("timeout", value, "a job needs some time: leave it out for no limit")
    return seconds


def _retries(words: Wording, value: Any) -> int:
    retries = count(words, "retries", value, least=0)
    if retries > MOST_RETRIES:
        raise words.error("retries", value, f"retries must be {MOST_RETRIES} or less")
    return retries


def _retry_on(words: Wording, given: Any, retries: Any) -> tuple[str, ...]:
    if given is not None and not retries:
        raise words.error("retry_on", given, "how often? give retries too")
    return failure_names(words, given)


def _eta_s(words: Wording, given: Any, delay: Any) -> float | None:
    """The moment, in seconds since 1970; one without a time zone is this machine's."""
    if given is None:
        return None
    if delay is not None:
        raise words.error("eta", given, "eta is a moment and delay a span: give one of them")
    try:
        moment = datetime.fromisoformat(given.strip()) if isinstance(given, str) else given
        seconds = moment.timestamp() if isinstance(moment, datetime) else float(moment)
    except (ValueError, TypeError, OverflowError, OSError):
        seconds = math.nan
    if isinstance(given, bool) or not 0 <= seconds <= LATEST_S:
        raise words.error("eta", given, "write a moment such as 2027-01-31T08:00, or seconds since 1970")
    return seconds


def _keep_ms(words: Wording, value: Any) -> int:
    seconds = _duration_s(words, "result_ttl", value)
    if seconds == 0:
        raise words.error("result_ttl", value, "a result needs some time to be read in")
    return 0 if seconds is None else max(1, round(1000 * seconds))


def _priority(words: Wording, value: Any) -> int:
    if not isinstance(value, str) or value not in PRIORITIES:
        raise words.error("priority", value, f"not known: {did_you_mean(str(value), PRIORITIES)}")
    return PRIORITIES[value]


def _name(words: Wording, value: Any) -> str:
    if not isinstance(value, str) or len(value) > NAME_CHARS or not value.isprintable():
        raise words.error("name", value, f"a name is one printable line of {NAME_CHARS} characters at most")
    return value


def _key(words: Wording, value: Any) -> str:
    if not isinstance(value, str) or len(value) > NAME_CHARS or not value.isprintable():
        raise words.error(
            "idempotency_key", value, f"a key is one printable line of {NAME_CHARS} characters at most"
        )
    return value


def _on_outage(words: Wording, value: Any) -> str:
    if value and value not in OUTAGES:
        raise words.error("on_outage", value, "'keep' lets a job outlive its lease; leave it out otherwise")
    return str(value)


def _env(words: Wording, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise words.error("env", value, "write a mapping of names to texts")
    for name, text in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise words.error("env", name, "a variable's name is letters, digits and '_', a letter first")
        if name.startswith("GPULAYER_") and name not in ("GPULAYER_REDIS_URL", "GPULAYER_NAMESPACE"):
            raise words.error("env", name, "names that start with GPULAYER_ are the worker's to set")
        if not isinstance(text, str) or "\0" in text:
            raise BadRequirement(f"env: the value of {name} is no text that a process can have", value=name)
    return dict(value)


def _after(words: Wording, value: Any) -> tuple[str, ...]:
    """The ids of the jobs that have to end first."""
    if value is None:
        return ()
    # A map is asked for its jobs: iterating over it would wait for their results.
    several = getattr(value, "jobs", value)
    if isinstance(several, str) or not isinstance(several, Iterable):
        several = [several]
    found: dict[str, None] = {}
    for each in several:
        job_id = getattr(each, "id", each)
        if not isinstance(job_id, str) or not _JOB_ID.fullmatch(job_id):
            raise words.error("after", each, "give jobs, ids of jobs or groups, or the result of a map")
        found[job_id] = None
    return tuple(found)


def _gate_key(words: Wording, key: Any) -> str:
    if not isinstance(key, str) or not _GATE_KEY.fullmatch(key):
        raise words.error(
            "concurrency_key", key, "a key is 200 characters at most, no blank, ':', '=', '/' or ','"
        )
    return key


def _at_once(options: Mapping[str, Any]) -> Any:
    """How many jobs of one key may run at once: one, unless a number or only a rate is given."""
    given = options.get("concurrency")
    if given is not None or options.get("concurrency_key") is None or options.get("rate_limit") is not None:
        return given
    return 1


def _permit(words: Wording, key: Any, most: Any, name: str = "concurrency") -> str:
    """`key=limit`: at most so many jobs of this key run at once."""
    if most is None:
        return ""
    if key is None:
        raise words.error("concurrency", most, "of which jobs? give a concurrency_key too")
    return f"{_gate_key(words, key)}={count(words, name, most, least=1)}"


def _rate(words: Wording, text: Any, key: Any) -> str:
    """`key=limit/window_ms`: at most so many jobs of this key begin within any such time."""
    if text is None:
        return ""
    if key is None:
        raise words.error("rate_limit", text, "of which jobs? give a concurrency_key too")
    match = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or not int(match[1]):
        raise words.error("rate_limit", text, "write NUMBER/TIME, such as 100/1m")
    try:
        window_s = parse_duration(match[2] if match[2][0].isdigit() else f"1{match[2]}")
    except BadSize:
        raise words.error("rate_limit", text, "write NUMBER/TIME, such as 100/1m") from None
    if not window_s:
        raise words.error("rate_limit", text, "the time must be more than nothing")
    return f"{_gate_key(words, key)}={int(match[1])}/{max(1, round(window_s * 1000))}"
