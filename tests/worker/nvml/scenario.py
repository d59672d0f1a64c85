"""What the stand-in driver shows: a file that the library reads anew at each call, so a test changes it as it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gpulayer_broker.units import GIB, MIB

SOURCE = Path(__file__).with_name("stand_in.c")
LIBRARY = "libnvidia-ml.so.1"

NOT_SUPPORTED, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH = 3, 15, 16, 18


@dataclass(frozen=True)
class Slice:
    """A MIG slice of a card."""

    name: str
    uuid: str
    total_bytes: int = 5 * GIB
    used_bytes: int = 0


@dataclass(frozen=True)
class Gpu:
    """One card; `mig` is None where it cannot be cut, else its slices."""

    slot: int
    name: str = "Tesla T4"
    total_bytes: int = 15 * GIB
    reserved_bytes: int = 256 * MIB
    used_bytes: int = 0
    utilisation: int = 0
    mig: tuple[Slice, ...] | None = None

    @property
    def uuid(self) -> str:
        return f"GPU-{self.slot:08x}-5a1c-4e0e-9f00-000000000000"

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.slot + 4:02X}:00.0"

    def lines(self) -> list[str]:
        facts = (self.slot, self.name, self.uuid, self.bus_id, self.total_bytes, self.reserved_bytes)
        more = (self.used_bytes, self.utilisation, int(self.mig is not None))
        parts = (
            ("slice", self.slot, part.name, part.uuid, part.total_bytes, part.used_bytes)
            for part in self.mig or ()
        )
        return [_line("gpu", *facts, *more), *(_line(*part) for part in parts)]


@dataclass
class Driver:
    """The driver of a machine under test. Each change is seen by the next call of the library."""

    library: Path
    file: Path
    gpus: list[Gpu] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """For a process that is to find this driver."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_SCENARIO": str(self.file)}

    def show(self, *gpus: Gpu) -> Driver:
        """These cards and no others."""
        self.gpus = list(gpus)
        return self._write()

    def change(self, slot: int, **facts: object) -> Driver:
        """Other facts of one card."""
        self.gpus = [replace(g, **facts) if g.slot == slot else g for g in self.gpus]  # type: ignore[arg-type]
        return self._write()

    def remove(self, slot: int) -> Driver:
        return self.show(*(gpu for gpu in self.gpus if gpu.slot != slot))

    def process(self, slot: int, pid: int, size_bytes: int | None, kind: str = "c") -> Driver:
        """A process on a card; None is a size that the driver does not tell."""
        return self._add("process", slot, pid, "-" if size_bytes is None else size_bytes, kind)

    def fail(self, function: str, code: int) -> Driver:
        """The function fails; `function:slot` for one card."""
        return self._add("fail", function, code)

    def hang(self, function: str) -> Driver:
        return self._add("hang", function)

    def noise(self, function: str) -> Driver:
        """The function prints to the standard output of whoever calls it."""
        return self._add("noise", function)

    def xid(self, slot: int, code: int) -> Driver:
        return self._add("xid", 1 + sum(line.startswith("xid|") for line in self.lines), slot, code)

    def recover(self, *kinds: str) -> Driver:
        """Nothing of these kinds of line is true any more; without kinds, nothing at all."""
        self.lines = [line for line in self.lines if kinds and not line.startswith(kinds)]
        return self._write()

    def _add(self, *facts: object) -> Driver:
        self.lines.append(_line(*facts))
        return self._write()

    def _write(self) -> Driver:
        lines = ["driver|550.54.15", *(line for gpu in self.gpus for line in gpu.lines()), *self.lines]
        draft = self.file.with_suffix(".new")
        draft.write_text("".join(line + "\n" for line in lines))
        os.replace(draft, self.file)
        return self


def build_library(folder: Path, without: str = "") -> Path:
    """Compiles the stand-in, `without` one function as an older driver lacks it; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs cc: apt-get install gcc")
    library = folder / LIBRARY
    command = [compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", str(library), str(SOURCE)]
    if without:
        names = folder / "names"
        names.write_text(f"{{ local: {without}; }};\n")
        command.append(f"-Wl,--version-script={names}")
    subprocess.run(command, check=True)
    return library


def _line(*facts: object) -> str:
    return "|".join(map(str, facts))
