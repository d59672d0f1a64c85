"""Brings a job's outputs into a folder of this machine.

What it guarantees: the files arrive whole and verified, or none is put in place; a file of the same name is
replaced; and nothing is written outside the folder, whatever the job returned and whatever
links lie in the folder already.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from gpulayer.session import Session
from gpulayer_broker.errors import StoreError, UsageError
from gpulayer_broker.job import JobRecord


def fetch_outputs(session: Session, record: JobRecord, folder: Path) -> list[str]:
    """The paths that were fetched, below `folder`; none for a job that returned nothing."""
    if not record.final:
        raise UsageError(
            f"job {record.id} is {record.state}: it has outputs when it has ended", job_id=record.id
        )
    if not record.outputs:
        return []
    from gpulayer_broker.store.unpack import load_manifest, unpack

    store = session.store
    manifest = load_manifest(record.outputs, store)
    parent = _made(folder.absolute().parent)
    try:
        aside = Path(tempfile.mkdtemp(prefix=".gpulayer-", dir=parent))
    except OSError as error:
        raise UsageError(
            f"outputs cannot be put into {parent}: {error.strerror}", value=str(folder)
        ) from None
    try:
        settings = session.settings
        unpack(
            manifest,
            store,
            aside / "new",
            limit_bytes=settings.artifact_bytes,
            limit_files=settings.source_files,
        )
        _made(folder)
        _move_in(aside / "new", folder)
    except OSError as error:
        raise StoreError(f"outputs cannot be put into {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return [entry.path for entry in manifest.entries if entry.kind != "dir"]


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"folder {folder} cannot be made: {error.strerror}", value=str(folder)) from None
    return folder


def _move_in(source: Path, dest: Path) -> None:
    """Moves the entries of one folder into another: folders are merged, files and links replaced."""
    with os.scandir(source) as found:
        entries = list(found)
    for entry in entries:
        place = dest / entry.name
        if entry.is_dir(follow_symlinks=False):
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                place.unlink()
            place.mkdir(exist_ok=True)
            _move_in(Path(entry.path), place)
            continue
        if place.is_dir() and not place.is_symlink():
            raise StoreError(
                f"{place} is a folder here and a file of the job: move it away, or name another folder"
            )
        os.replace(entry.path, place)
