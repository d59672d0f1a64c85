"""Builds the wheel and looks at it as a user would: installed into an environment of its own, from another folder.

Ends non-zero unless its packages import from there, with types, Lua functions and the runner inside; the command and a
whole job work; and nothing else of this repository became importable. Third-party packages are the pinned ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("gpulayer", "gpulayer_broker", "gpulayer_worker")
# Folders of this repository that must not be importable where GPUlayer is installed.
STRANGE = ("api", "worker", "broker", "dashboard", "trainer", "tests", "scripts", "benchmarks", "examples")
PYTHON_ONLY = {"py.typed", ".lua", ".py"}


class Wrong(Exception):
    """The wheel is not what it has to be."""


def expect(what: str, holds: bool) -> None:
    if not holds:
        raise Wrong(what)
    print(f"  ok: {what}", flush=True)


def run(*command: str, folder: Path, environment: dict[str, str] | None = None) -> str:
    """What a command prints; Wrong where it fails, with its words."""
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment or clean_environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode:
        raise Wrong(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stdout[-2000:]}")
    return ended.stdout


def clean_environment(folder: Path) -> dict[str, str]:
    """The caller's, without what would lead back to this repository or to a set-up that already runs."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("GPULAYER_") and k not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    runtime = folder / "run"
    runtime.mkdir(mode=0o700, exist_ok=True)
    return kept | {"GPULAYER_STATE_DIR": str(folder / "state"), "XDG_RUNTIME_DIR": str(runtime)}


def build(folder: Path) -> Path:
    """The wheel, outside of the repository."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
    run(*pip, "--wheel-dir", str(folder / "dist"), str(ROOT), folder=folder)
    wheels = list((folder / "dist").glob("*.whl"))
    expect("one wheel is built", len(wheels) == 1)
    return wheels[0]


def look_inside(wheel: Path) -> None:
    """Every file of the packages that users need is in it, and no other package."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    info = next(top for top in tops if top.endswith(".dist-info"))
    expect(f"it holds {', '.join(PACKAGES)} and nothing beside", tops == {*PACKAGES, info})
    missing = [name for name in expected_files() if name not in names]
    expect(
        f"every module, Lua file and py.typed is in it{'' if not missing else f', but not {missing[:5]}'}",
        not missing,
    )
    expect("its licence is in it", any(name.startswith(f"{info}/licenses/LICENSE") for name in names))


def expected_files() -> list[str]:
    found = []
    for parent in (ROOT, ROOT / "broker", ROOT / "worker"):
        for package in PACKAGES:
            files = (path for path in (parent / package).rglob("*") if path.is_file())
            found += [str(f.relative_to(parent)) for f in files if {f.name, f.suffix} & PYTHON_ONLY]
    return found


def install(wheel: Path, folder: Path) -> Path:
    """A fresh environment with the wheel and its pinned dependencies; its Python."""
    environment = folder / "venv"
    run(sys.executable, "-m", "venv", str(environment), folder=folder)
    python = environment / "bin" / "python"
    pip = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "-c", str(ROOT / "constraints.txt"), str(wheel), folder=folder)
    return python


def try_it(python: Path, folder: Path) -> None:
    """Imports, what is not importable, the command, and one job on a private queue."""
    for package in PACKAGES:
        where = run(str(python), "-c", f"import {package}; print({package}.__file__)", folder=folder).strip()
        expect(f"import {package}", Path(where).is_relative_to(folder / "venv"))
    probe = f"import importlib.util as u; print([n for n in {STRANGE} if u.find_spec(n)])"
    expect(
        "no other folder of the repository is importable",
        run(str(python), "-c", probe, folder=folder).strip() == "[]",
    )
    command = str(python.parent / "gpulayer")
    expect("gpulayer --help", "submit" in run(command, "--help", folder=folder))
    try:
        printed = run(command, "submit", "--", "python", "-c", "print('from a job')", folder=folder)
        expect("a job runs", "from a job" in printed and "succeeded" in printed)
    finally:
        run(command, "down", folder=folder)


def main() -> int:
    folder = Path(tempfile.mkdtemp(prefix="gpl-wheel-"))
    try:
        wheel = build(folder)
        look_inside(wheel)
        try_it(install(wheel, folder), folder)
    except Wrong as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("wheel: all as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
