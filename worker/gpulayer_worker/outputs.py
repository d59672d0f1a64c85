"""What a job gives back: the files under its outputs folder, those its globs name, and a word on what was missed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gpulayer_broker.spec import Spec
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.store.outputs import collect, list_new_files
from gpulayer_broker.store.tree import Manifest
from gpulayer_worker.scratch import Scratch

NAMED_FILES = 5


@dataclass(frozen=True)
class Outputs:
    """The manifest's digest ('' for nothing), and lines for the user."""

    digest: str
    notes: tuple[str, ...]


def gather(
    spec: Spec, scratch: Scratch, source: Manifest | None, store: BlobStore, limit_bytes: int
) -> Outputs:
    """Stores what comes back; paths count from the job's folder."""
    has_outputs = _holds_something(scratch.outputs)
    patterns = (["outputs"] if has_outputs else []) + list(spec.outputs)
    notes: list[str] = []
    digest = ""
    returned: set[str] = set()
    if patterns:
        bundle = collect(Path(scratch.work), patterns, store, limit_bytes=limit_bytes)
        notes += bundle.skipped
        returned = {entry.path for entry in bundle.manifest.of_kind("file")}
        digest = bundle.digest if bundle.manifest.entries else ""
    if spec.kind == "command":
        notes += _missed(scratch, source, returned)
    return Outputs(digest, tuple(notes))


def _holds_something(folder: str) -> bool:
    try:
        return bool(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _missed(scratch: Scratch, source: Manifest | None, returned: set[str]) -> list[str]:
    """One line about new files that nothing named."""
    new = [
        path for path in list_new_files(Path(scratch.work), source or Manifest.of(())) if path not in returned
    ]
    if not new:
        return []
    shown = ", ".join(new[:NAMED_FILES]) + (
        f" and {len(new) - NAMED_FILES} more" if len(new) > NAMED_FILES else ""
    )
    return [
        f"new files were not returned: {shown}; write them to $GPULAYER_OUTPUTS, or name them with --output"
    ]
