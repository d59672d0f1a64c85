"""Small Python environments for tests, beside the one that the tests run in.

A bare one is made in an instant, where a test wants it. Those with packages are made once for a machine, by the first
test that needs one, in a cache folder by their contents; the pins are the repository's. One that nobody has used for a
month is removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OLD_NUMPY = "2.1.3"
CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
FRAMEWORKS = ("numpy", "torch", "jax", "onnxruntime", "onnx")
KEPT_S = 30 * 86400
INSTALL_LIMIT_S = 1500


def bare(folder: Path) -> Path:
    """An environment without any distribution; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def with_old_numpy() -> Path:
    """An environment whose only distribution is an older numpy; its Python."""
    return _cached("old-numpy", f"numpy=={OLD_NUMPY}")


def with_frameworks() -> Path:
    """An environment with numpy, PyTorch, JAX and ONNX Runtime, each a build for the CPU; its Python."""
    return _cached("frameworks", *FRAMEWORKS)


def site_packages(python: Path) -> Path:
    [folder] = (python.parent.parent / "lib").glob("python3.*/site-packages")
    return folder


def add_distribution(python: Path, name: str, version: str) -> None:
    """Installs metadata, as an installer leaves it, and no module."""
    folder = site_packages(python) / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _cached(name: str, *wanted: str) -> Path:
    """The environment with what is wanted; made where it is not there whole."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpulayer-tests"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{name}-{_digest(wanted)}"
    with _locked(root / f"{folder.name}.lock"):
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _install(bare(folder), wanted)
        (folder / "whole").touch()
    _remove_unused(root)
    return folder / "bin" / "python"


def _digest(wanted: tuple[str, ...]) -> str:
    """Changes with what is wanted, its pins and the Python; not with the place of the clone, nor with other pins."""
    pins = [line for line in CONSTRAINTS.read_text().split() if line.partition("==")[0] in wanted]
    return hashlib.sha256(repr((sys.version, sys.base_prefix, wanted, pins)).encode()).hexdigest()[:12]


def _install(python: Path, wanted: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-input"]
    command += ["--disable-pip-version-check", "--no-compile", "--only-binary=:all:", *wanted]
    if not any("==" in each for each in wanted):
        command += ["-c", str(CONSTRAINTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One at a time, of all processes of this machine."""
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_unused(root: Path) -> None:
    for stamp in root.glob("*/whole"):
        if time.time() - stamp.stat().st_mtime > KEPT_S:
            shutil.rmtree(stamp.parent, ignore_errors=True)
