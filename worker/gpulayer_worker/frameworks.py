"""Which frameworks the Python that runs jobs has, and what they can do with the devices that are usable here.

That Python is asked in a child, by metadata: nothing is imported there, and none of it need have GPUlayer. The answer
is kept until one of its package folders changes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.errors import ConfigError
from gpulayer_broker.names import canonical_name

SCRIPT = Path(__file__).resolve().parent / "runner" / "inventory.py"
ASK_LIMIT_S = 30.0
# torch's version file: `cuda: Optional[str] = '12.4'`, in older releases `cuda = '10.2'`.
BACKEND = re.compile(r"^(cuda|hip)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
TORCH_BACKENDS = {"cuda": "torch.cuda", "hip": "torch.rocm"}
KIND_OF = {"torch.cuda": "cuda", "torch.rocm": "rocm", "torch.mps": "mps"}


@dataclass(frozen=True)
class Python:
    """One Python as it described itself."""

    executable: str
    version: str
    distributions: Mapping[str, str]
    torch_backends: frozenset[str]
    scripts: str
    path: tuple[str, ...]

    def frameworks(self, kinds: Collection[str]) -> tuple[tuple[str, str], ...]:
        """All distributions with their versions, and torch's backends for which a device of the kind is usable."""
        found = {canonical_name(name): version for name, version in self.distributions.items()}
        if "torch" in found:
            backends = self.torch_backends | ({"torch.mps"} if "mps" in kinds else frozenset())
            found |= {name: found["torch"] for name in backends if KIND_OF[name] in kinds}
        return tuple(sorted(found.items()))

    def launchers(self) -> tuple[str, ...]:
        """How ranks of a distributed job can be started here."""
        names = {canonical_name(name) for name in self.distributions}
        search = os.pathsep.join([self.scripts, os.environ.get("PATH", os.defpath)])
        offered = {
            "direct": True,
            "torchrun": "torch" in names,
            "jax": "jax" in names,
            "mpi": shutil.which("mpirun", path=search) is not None,
        }
        return tuple(sorted(name for name, here in offered.items() if here))


def ask(executable: str) -> Python:
    """The Python's own description; ConfigError if it cannot be asked."""
    try:
        answer = subprocess.run(
            [executable, "-I", str(SCRIPT)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_LIMIT_S,
            check=True,
        )
        record = json.loads(answer.stdout)
    except FileNotFoundError:
        raise ConfigError(f"--python {executable}: there is no such program", value=executable) from None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        text = f"--python {executable}: it does not answer as Python 3.8 or newer would: {error}"
        raise ConfigError(text, value=executable) from None
    return Python(
        executable=str(record["executable"]) or executable,
        version=str(record["version"]),
        distributions=record["distributions"],
        torch_backends=_torch_backends(str(record["torch"])),
        scripts=str(record["scripts"]),
        path=tuple(record["path"]),
    )


def _torch_backends(version_file: str) -> frozenset[str]:
    return frozenset(TORCH_BACKENDS[name] for name, _ in BACKEND.findall(version_file))


class Interpreter:
    """The Python of a worker's jobs; asked again when one of its package folders has changed."""

    def __init__(self, executable: str) -> None:
        self.executable = absolute(executable)
        self._answer: Python | None = None
        self._stamp: tuple[int, ...] = ()

    @property
    def known(self) -> Python:
        """The last answer, without asking."""
        return self._answer or self.python()

    def python(self) -> Python:
        """What it says now."""
        if self._answer is None or self._stamp != _stamp(self._answer):
            self._answer = ask(self.executable)
            self._stamp = _stamp(self._answer)
        return self._answer


def absolute(executable: str) -> str:
    """The program by its whole path, its links kept: a virtual environment is known by the link."""
    found = shutil.which(executable)
    return os.path.abspath(found) if found else executable


def _stamp(python: Python) -> tuple[int, ...]:
    return tuple(_changed_ns(path) for path in (*python.path, python.executable))


def _changed_ns(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
