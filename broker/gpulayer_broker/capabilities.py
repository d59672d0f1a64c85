"""What a worker has: the static facts that matching judges, their canonical bytes and their class.

Equal machines have equal capabilities, and so one class; what changes while a worker runs (free memory,
jobs, state) is not here. Devices are counted by groups of equal ones, and a group's number is its place in
`groups`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from gpulayer_broker.errors import BadRequirement, FormatTooNew
from gpulayer_broker.names import canonical_name

FORMAT = 1
# A feature of workers whose GPUs are shared by jobs: a job must say how much of a GPU's memory it needs.
GPU_SHARE = "gpu-share"
WARM = "warm"


@dataclass(frozen=True, order=True)
class DeviceGroup:
    """Equal GPUs of one worker; a unified device's memory is the machine's own."""

    kind: str
    model: str
    memory_bytes: int
    count: int = 1
    unified: bool = False


@dataclass(frozen=True)
class Capabilities:
    """The static facts of a worker, in canonical form whatever order they are given in."""

    os: str
    arch: str
    cpus: int
    memory_bytes: int
    disk_bytes: int
    python: str
    groups: tuple[DeviceGroup, ...] = ()
    frameworks: tuple[tuple[str, str], ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    launchers: tuple[str, ...] = ("direct",)
    features: tuple[str, ...] = ()
    queues: tuple[str, ...] = ("gpulayer",)

    def __post_init__(self) -> None:
        spelled = {(canonical_name(name), version) for name, version in self.frameworks}
        object.__setattr__(self, "frameworks", tuple(sorted(spelled)))
        object.__setattr__(self, "groups", _merged(self.groups))
        for name in ("labels", "launchers", "features", "queues"):
            object.__setattr__(self, name, tuple(sorted(set(getattr(self, name)))))

    def group_of(self, kind: str, model: str, memory_bytes: int, unified: bool = False) -> int:
        """The number of the group that such a device belongs to; ValueError if there is none."""
        wanted = (kind, model, memory_bytes, unified)
        return [_identity(group) for group in self.groups].index(wanted)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of GPU that are here, sorted."""
        return tuple(sorted({group.kind for group in self.groups}))

    def canonical(self) -> bytes:
        """The same bytes for equal capabilities, on every machine; `decode` reads them."""
        import orjson

        return orjson.dumps({"v": FORMAT, **asdict(self)}, option=orjson.OPT_SORT_KEYS)

    @cached_property
    def class_id(self) -> str:
        """The name that workers with these capabilities share."""
        import hashlib

        return hashlib.sha256(self.canonical()).hexdigest()[:20]


def _identity(group: DeviceGroup) -> tuple[str, str, int, bool]:
    return group.kind, group.model, group.memory_bytes, group.unified


def _merged(groups: tuple[DeviceGroup, ...]) -> tuple[DeviceGroup, ...]:
    """Groups of equal devices counted as one, in canonical order."""
    counts: dict[tuple[str, str, int, bool], int] = {}
    for group in groups:
        counts[_identity(group)] = counts.get(_identity(group), 0) + group.count
    return tuple(
        DeviceGroup(kind, model, memory_bytes, count, unified)
        for (kind, model, memory_bytes, unified), count in sorted(counts.items())
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_amount(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_text, value))


def _is_list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


_KINDS_OF_FACTS: dict[str, Callable[[Any], bool]] = {
    "cpus": _is_amount,
    "memory_bytes": _is_amount,
    "disk_bytes": _is_amount,
    "groups": _is_list_of(lambda item: isinstance(item, dict)),
    "frameworks": _is_list_of(_is_pair),
    "labels": _is_list_of(_is_pair),
    "launchers": _is_list_of(_is_text),
    "features": _is_list_of(_is_text),
    "queues": _is_list_of(_is_text),
    "os": _is_text,
    "arch": _is_text,
    "python": _is_text,
}
_GROUP_FACTS: dict[str, Callable[[Any], bool]] = {
    "kind": _is_text,
    "model": _is_text,
    "memory_bytes": _is_amount,
    "count": _is_amount,
    "unified": lambda value: isinstance(value, bool),
}


def decode(data: bytes) -> Capabilities:
    """The capabilities that these canonical bytes hold.

    Facts that this version does not know are left out: nothing that it can judge depends on them.
    """
    import orjson

    try:
        record = orjson.loads(data)
        if (version := record.get("v")) != FORMAT:
            raise FormatTooNew(f"capabilities of format {version}: update gpulayer on this machine")
        facts = _known(record, _KINDS_OF_FACTS)
        facts["groups"] = [DeviceGroup(**_known(group, _GROUP_FACTS)) for group in facts.get("groups", ())]
        return Capabilities(**{name: _frozen(value) for name, value in facts.items()})
    except (orjson.JSONDecodeError, AttributeError, TypeError) as error:
        raise BadRequirement(f"capabilities are not readable: {error}") from None


def _known(record: dict[str, Any], kinds: dict[str, Callable[[Any], bool]]) -> dict[str, Any]:
    """The facts that this version knows, each of its kind; TypeError for one that is not."""
    for name in record.keys() & kinds.keys():
        if not kinds[name](record[name]):
            raise TypeError(f"{name} is {record[name]!r:.60}")
    return {name: record[name] for name in record.keys() & kinds.keys()}


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value
