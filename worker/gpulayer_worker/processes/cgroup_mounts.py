"""Where this process' control groups are mounted, read from /proc: one folder for each hierarchy that it is in."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc/self")


@dataclass(frozen=True)
class Mounts:
    """This process' own groups: of version 1 by controller, and of version 2."""

    v1: dict[str, Path] = field(default_factory=dict)
    unified: Path | None = None


def read_mounts(proc: Path = PROC) -> Mounts:
    """What there is; nothing on systems without control groups."""
    try:
        mounted = [line.split(" ") for line in (proc / "mounts").read_text().splitlines()]
        own = [line.split(":", 2) for line in (proc / "cgroup").read_text().splitlines()]
    except OSError:
        return Mounts()
    paths = {name: path for _, names, path in own for name in names.split(",")}
    v1: dict[str, Path] = {}
    unified = None
    for _, place, kind, options, *_rest in (fields for fields in mounted if len(fields) >= 4):
        if kind == "cgroup2" and "" in paths:
            unified = _own_folder(place, paths[""])
        elif kind == "cgroup":
            for controller in set(options.split(",")) & set(paths):
                v1[controller] = _own_folder(place, paths[controller])
    return Mounts(v1, unified)


def _own_folder(place: str, path: str) -> Path:
    """In a container the path counts from the host's root, while the mount shows the container's part alone."""
    place = place.encode().decode("unicode_escape")
    folder = Path(place + path)
    return folder if os.path.isdir(folder) else Path(place)
