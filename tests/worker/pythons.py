"""Small Python environments for tests: one bare, one with an older numpy than this one's, each built once a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OLD_NUMPY = "2.1.3"


def bare(folder: Path) -> Path:
    """An environment without any distribution; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def with_old_numpy(folder: Path) -> Path:
    """An environment whose only distribution is an older numpy; its Python."""
    python = bare(folder)
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", f"numpy=={OLD_NUMPY}"]
    subprocess.run(command, check=True, timeout=100)
    return python


def site_packages(python: Path) -> Path:
    [folder] = (python.parent.parent / "lib").glob("python3.*/site-packages")
    return folder


def add_distribution(python: Path, name: str, version: str) -> None:
    """Installs metadata, as an installer leaves it, and no module."""
    folder = site_packages(python) / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
