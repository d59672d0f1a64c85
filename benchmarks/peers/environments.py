"""An environment for each peer, with pinned versions, below the user's cache folder; made once, then found again.

`<system>.txt` beside this file holds the pins. An environment is named by their hash, so that changed pins make a new
one; two benchmarks at once make one, and one whose making was cut short is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def cache() -> Path:
    """Where the environments are."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gpulayer-bench"


def pins(name: str) -> list[str]:
    """The pinned distributions of an environment."""
    return (HERE / f"{name}.txt").read_text().split()


def version_of(name: str) -> str:
    """The pinned version of the system itself."""
    return next(pin.partition("==")[2] for pin in pins(name) if pin.startswith(f"{name}=="))


def environment(name: str) -> Path:
    """The folder of the programs of this environment, which is made where it is missing."""
    digest = hashlib.sha256("\n".join([sys.version, *pins(name)]).encode()).hexdigest()[:12]
    folder = cache() / f"{name}-{digest}"
    cache().mkdir(parents=True, exist_ok=True)
    with open(cache() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _make(name, folder)
    return folder / "bin"


def _make(name: str, folder: Path) -> None:
    print(f"making an environment for {name}: {folder}", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [
        str(folder / "bin" / "pip"),
        "install",
        "--quiet",
        "--quiet",
        "--disable-pip-version-check",
        "-r",
    ]
    subprocess.run([*install, str(HERE / f"{name}.txt")], check=True, stdin=subprocess.DEVNULL)
    (folder / "complete").touch()
