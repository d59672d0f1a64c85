"""Where detection reads: this machine's files and tools, or a recording of another machine's under a folder.

A recording holds files by their absolute paths (`sys/class/kfd/…`), the output of each command in a file named after
the command below `commands/`, and `platform.json` with `system` and `arch`. Whatever is missing is not there.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

COMMAND_LIMIT_S = 8.0
KIB = 1024


class Machine:
    """Files and tools of the machine; nothing here raises for what is not there."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """What a file holds, without the NUL bytes and spaces at its ends."""
        try:
            data = self._path(path).read_bytes()
        except OSError:
            return None
        return data.decode("utf-8", "replace").strip("\0 \t\r\n")

    def number(self, path: str) -> int | None:
        """The whole number that a file holds."""
        text = self.text(path)
        try:
            return int(text, 0) if text else None
        except ValueError:
            return None

    def names(self, path: str) -> list[str]:
        """What a folder holds; numbers in the order of numbers."""
        try:
            found = os.listdir(self._path(path))
        except OSError:
            return []
        return sorted(found, key=lambda name: (int(name) if name.isdigit() else -1, name))

    def output(self, *command: str) -> str | None:
        """What a tool prints; None if it is missing, fails or takes too long."""
        if self.root is not None:
            return self.text("/commands/" + " ".join(command))
        try:
            answer = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_LIMIT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.decode("utf-8", "replace")

    def document(self, *command: str) -> Any:
        """The JSON that a tool prints; None where it prints none."""
        text = self.output(*command)
        try:
            return json.loads(text) if text else None
        except ValueError:
            return None

    @property
    def system(self) -> str:
        return self._platform("system", platform.system())

    @property
    def arch(self) -> str:
        return self._platform("arch", platform.machine())

    def memory_bytes(self) -> int:
        """The machine's memory, or the container's where that is less."""
        if self.root is None:
            from gpulayer_broker.local_facts import memory_bytes

            return memory_bytes()
        if self.system == "Darwin":
            return int(self.output("sysctl", "-n", "hw.memsize") or 0)
        return self._meminfo("MemTotal")

    def available_bytes(self) -> int:
        """Memory that could be had now without swapping."""
        if self.root is None:
            import psutil

            return int(psutil.virtual_memory().available)
        return self.memory_bytes() if self.system == "Darwin" else self._meminfo("MemAvailable")

    def _meminfo(self, name: str) -> int:
        for line in (self.text("/proc/meminfo") or "").splitlines():
            key, _, value = line.partition(":")
            if key == name:
                return int(value.split()[0]) * KIB
        return 0

    def _platform(self, name: str, own: str) -> str:
        if self.root is None:
            return own
        return str(json.loads(self.text("/platform.json") or "{}").get(name, own))

    def _path(self, path: str) -> Path:
        return Path(path) if self.root is None else self.root / path.lstrip("/")
