"""The folder that is brought along for a job's Python: cloudpickle, for where it is missing.

It goes to the very end of the path, so that what the job's Python has itself comes first; only a cloudpickle older than
the brought one is passed over.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

SHIM = Path(__file__).resolve().parent.parent / "runner" / "shim"


def fallback_folders(state: Path) -> tuple[str, ...]:
    """The folders to hand to fork servers; makes them below `state` when they are not there yet."""
    version = importlib.metadata.version("cloudpickle")
    folder = state / f"cloudpickle-{version}"
    if not (folder / "cloudpickle" / "__init__.py").exists():
        _copy_cloudpickle(folder)
    return (str(folder), str(SHIM))


def _copy_cloudpickle(folder: Path) -> None:
    """Copies the installed package; of two who do so at once, one wins and both are served."""
    spec = importlib.util.find_spec("cloudpickle")
    assert spec is not None
    assert spec.origin is not None
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".cloudpickle-"))
    try:
        shutil.copytree(
            Path(spec.origin).parent, draft / "cloudpickle", ignore=shutil.ignore_patterns("__pycache__")
        )
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        if not (folder / "cloudpickle" / "__init__.py").exists():
            raise
