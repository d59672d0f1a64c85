"""Every setting, typed, from the nearest place that gives it: flag, environment, project file, user file,
default.

A flag wins over `GPULAYER_<NAME>`, that over `.gpulayer/config.toml` of the current folder or the nearest one
above, that over `~/.config/gpulayer/config.toml`, that over the default. A file's unknown key is an error
that names file and key; an unknown `GPULAYER_` variable is none, for jobs have many of their own. A project
file that somebody else may write is not read: it could send this user's jobs elsewhere.

Durations are seconds or text such as "5m", sizes bytes or text such as "64MiB".
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from gpulayer_broker.errors import BadSetting, BadSize, did_you_mean
from gpulayer_broker.keys import root_of
from gpulayer_broker.units import GIB, MIB, parse_duration, parse_size, shown

PREFIX = "GPULAYER_"
PROJECT_FILE = Path(".gpulayer", "config.toml")
DAY_S = 86400.0
PLACEMENTS = ("spread", "pack")
# What a file may hold beside settings.
TABLES = ("profiles",)
# The queue's functions count in doubles, which hold so many digits.
_MOST_DIGITS = 15

log = logging.getLogger("gpulayer")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What holds for this process. The address of the queue may hold a password: it is not in the repr."""

    redis_url: str | None = field(default=None, repr=False)
    namespace: str = "default"
    private: bool = True

    lease_s: float = 60.0
    heartbeat_s: float = 10.0
    lease_grace_s: float = 10.0
    term_grace_s: float = 10.0
    idle_stop_s: float = 900.0
    probe_limit_s: float = 10.0
    probe_every_s: float = 60.0
    lost_workers: int = 3
    earmark_s: float = 60.0
    placement: str = "spread"

    argument_inline_bytes: int = MIB
    argument_blob_bytes: int = 256 * MIB
    result_bytes: int = 256 * MIB
    source_bytes: int = 512 * MIB
    source_files: int = 100_000
    artifact_bytes: int = 50 * GIB
    queue_blob_bytes: int = 64 * MIB
    log_tail_bytes: int = MIB
    log_bytes: int = GIB
    queued_jobs: int = 2_000_000
    job_processes: int = 4096
    cache_bytes: int = 20 * GIB

    result_keep_s: float = 7 * DAY_S
    job_keep_s: float = 30 * DAY_S
    outputs_keep_s: float = 30 * DAY_S

    def __post_init__(self) -> None:
        for name, low in _LEAST.items():
            if getattr(self, name) < low:
                raise BadSetting(f"{name} is {getattr(self, name):g}: it is at least {low:g}", value=name)
        if self.heartbeat_s * 2 > self.lease_s:
            raise BadSetting(
                f"heartbeat_s ({self.heartbeat_s:g}) is at most half of lease_s ({self.lease_s:g}): "
                "one lost heartbeat must not cost the lease"
            )
        try:
            root_of(self.namespace)
        except ValueError as error:
            raise BadSetting(str(error), value=self.namespace) from None

    def changed(self, **values: Any) -> Settings:
        """These settings with some values replaced, read as a file's would be."""
        return replace(self, **_typed(values, "setting"))

    def as_environment(self) -> dict[str, str]:
        """The variables that give another process these settings, wherever it runs."""
        default = Settings()
        changed = {
            name: value for name in _READERS if (value := getattr(self, name)) != getattr(default, name)
        }
        return {PREFIX + name.upper(): _as_text(value) for name, value in changed.items()}


def load_settings(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    folder: Path | None = None,
) -> Settings:
    """The settings of this process; a flag that is None was not given."""
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for path in _files(environ, folder):
        values.update(found := _from_file(path))
        places.update(dict.fromkeys(found, str(path)))
    values.update(found := _from_environment(environ))
    places.update({name: PREFIX + name.upper() for name in found})
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    values.update(found := _typed(given, "flag"))
    places.update(dict.fromkeys(found, "flag"))
    return _together(values, places)


def _together(values: dict[str, Any], places: dict[str, str]) -> Settings:
    """The settings; what is wrong with one, or with two beside each other, is told with where they came from."""
    try:
        return Settings(**values)
    except BadSetting as error:
        words = set(re.findall(r"\w+", str(error)))
        given = dict.fromkeys(place for name, place in places.items() if name in words)
        raise BadSetting(f"{', '.join(given)}: {error}", value=error.value) from None


def table(
    name: str, *, environ: Mapping[str, str] = os.environ, folder: Path | None = None
) -> dict[str, tuple[Any, str]]:
    """The entries of one of the files' tables with where each stands; the project's win over the user's."""
    found: dict[str, tuple[Any, str]] = {}
    for path in _files(environ, folder):
        entries = _content(path).get(name, {})
        if not isinstance(entries, dict):
            raise BadSetting(f"{path}: {name} is not a table: write [{name}.NAME]", value=name)
        found.update((key, (value, f"{path}: {name}.{key}")) for key, value in entries.items())
    return found


def _files(environ: Mapping[str, str], folder: Path | None) -> list[Path]:
    """The files that are read, the one that wins last."""
    return [path for path in (user_file(environ), project_file(folder or Path.cwd())) if path is not None]


def user_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """The user's own file, if there is one."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(
        environ.get("HOME") or os.path.expanduser("~"), ".config"
    )
    path = Path(base, "gpulayer", "config.toml")
    return path if path.is_file() else None


def project_file(folder: Path) -> Path | None:
    """The nearest project file at or above the folder that nobody else can write."""
    for parent in (folder, *folder.parents):
        path = parent / PROJECT_FILE
        if path.is_file():
            if _is_trusted(path):
                return path
            log.warning("%s is not read: another user owns it or can write it", path)
    return None


def _is_trusted(path: Path) -> bool:
    """Whether file and folder are this user's or root's, and writable by no one else."""
    return all(
        status.st_uid in (os.geteuid(), 0) and not status.st_mode & 0o002
        for status in (path.stat(), path.parent.stat())
    )


def _from_file(path: Path) -> dict[str, Any]:
    content = {name: value for name, value in _content(path).items() if name not in TABLES}
    return _typed(content, str(path))


def _content(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadSetting(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise BadSetting(f"{path} cannot be read: {error.strerror}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in _READERS:
        variable = PREFIX + name.upper()
        if environ.get(variable):
            values[name] = _read(name, environ[variable], variable)
    return values


def _typed(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    for name in values:
        if name not in _READERS:
            raise BadSetting(f"{place}: unknown setting '{name}': {did_you_mean(name, _READERS)}", value=name)
    return {name: _read(name, value, f"{place}: {name}") for name, value in values.items()}


def _read(name: str, value: Any, place: str) -> Any:
    try:
        return _READERS[name](value)
    except (BadSetting, BadSize, ValueError) as error:
        raise BadSetting(f"{place}: {error}", value=name) from None


def _switch(value: object) -> bool:
    word = str(value).strip().lower()
    if word in {"on", "true", "yes", "1"}:
        return True
    if word in {"off", "false", "no", "0"}:
        return False
    raise ValueError(f"{shown(value)} is neither on nor off")


def _as_text(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _count(value: object) -> int:
    text = str(value).replace("_", "")
    if isinstance(value, bool) or not text.isascii() or not text.isdigit():
        raise ValueError(f"{shown(value)} is not a whole number")
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"{shown(value)} is too large: a count has {_MOST_DIGITS} digits at most")
    return int(text)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} is not text")
    return value


def _placement(value: object) -> str:
    if value not in PLACEMENTS:
        raise ValueError(f"{shown(value)} is none of {', '.join(PLACEMENTS)}")
    return str(value)


def _address(value: object) -> str:
    from gpulayer_broker.endpoint import Endpoint

    url = _text(value)
    Endpoint.parse(url)
    return url


def _reader_of(name: str, kind: str) -> Callable[[Any], Any]:
    if name == "redis_url":
        return _address
    if name == "placement":
        return _placement
    if name.endswith("_s"):
        return parse_duration
    if name.endswith("_bytes"):
        return parse_size
    return {"int": _count, "bool": _switch}.get(kind, _text)


_READERS = {each.name: _reader_of(each.name, str(each.type)) for each in fields(Settings)}
_LEAST: dict[str, float] = {
    "lease_s": 0.2,
    "heartbeat_s": 0.05,
    "probe_limit_s": 0.1,
    "probe_every_s": 0.1,
    "lost_workers": 1,
    "earmark_s": 0,
    "argument_inline_bytes": 1024,
    "log_tail_bytes": 4096,
    "queued_jobs": 1,
    "job_processes": 8,
    "result_keep_s": 1,
    "job_keep_s": 1,
}
