"""What any process can tell of its own machine and Python without asking a driver: the least that a worker has."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

from gpulayer_broker.capabilities import Capabilities


def usable_cpus() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory_bytes() -> int:
    """The machine's memory, or the container's where that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(limit).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def own_frameworks() -> tuple[tuple[str, str], ...]:
    """Every distribution of this Python with its version, read from metadata, nothing imported."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(name, distribution.version)
    return tuple(sorted(found.items()))


def own_capabilities(
    *,
    queues: tuple[str, ...],
    cpus: int | None = None,
    labels: tuple[tuple[str, str], ...] = (),
    python: str | None = None,
    frameworks: tuple[tuple[str, str], ...] | None = None,
) -> Capabilities:
    """This machine as a worker without devices; its jobs' Python is this process' own unless another is told."""
    import psutil

    return Capabilities(
        os=sys.platform,
        arch=platform.machine(),
        cpus=cpus or usable_cpus(),
        memory_bytes=memory_bytes(),
        disk_bytes=psutil.disk_usage(os.environ.get("TMPDIR", "/tmp")).total,
        python=python or platform.python_version(),
        frameworks=own_frameworks() if frameworks is None else frameworks,
        labels=labels,
        queues=queues,
    )
