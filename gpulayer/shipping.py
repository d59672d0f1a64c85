"""The files that go along with a job: its source folder, its inputs, and what its command names.

Without a source, arguments that are existing files under the current folder are shipped, so that
`gpulayer submit -- python train.py data.csv` needs no flag.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from gpulayer.session import Session
from gpulayer_broker.errors import BadSource, UsageError
from gpulayer_broker.spec import Spec


def with_files(
    spec: Spec,
    session: Session,
    source: Path | None,
    inputs: Mapping[str, Path],
    outputs: Iterable[str] = (),
    *,
    named: Mapping[str, Path] | None = None,
) -> Spec:
    """The spec with its files stored: `source` a folder, or else the files that are `named` one by one."""
    from gpulayer_broker.store.bundle import make_bundle, ship_files

    for path in (*([source] if source is not None else ()), *inputs, *inputs.values()):
        _refuse_no_path(str(path))
    limits = {"limit_bytes": session.settings.source_bytes, "limit_files": session.settings.source_files}
    store = session.store
    source_digest = input_digest = ""
    if source is not None:
        source_digest = make_bundle(source, store, **limits).digest
    elif named:
        source_digest = ship_files(named, store, **limits).digest
    if inputs:
        input_digest = ship_files(inputs, store, **limits).digest
    patterns = tuple(map(checked_pattern, outputs))
    return replace(spec, source=source_digest, inputs=input_digest, outputs=patterns)


def _refuse_no_path(text: str) -> None:
    if "\0" in text:
        raise BadSource(f"path {text!r} holds a NUL byte, which no path can", value=text)
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        raise BadSource(f"path {text!r} holds half a character, which no path can", value=text) from None


def files_named(argv: Sequence[str], folder: Path) -> dict[str, Path]:
    """Arguments that are relative paths of files below the folder, by their path in the job's folder."""
    found: dict[str, Path] = {}
    for argument in argv:
        path = PurePosixPath(argument)
        if not argument or path.is_absolute() or ".." in path.parts or len(argument) > 4096:
            continue
        try:
            if (folder / path).is_file():
                found[str(path)] = folder / path
        except (OSError, ValueError):  # not a path at all, such as a long text
            continue
    return found


def parsed_inputs(texts: Iterable[str]) -> dict[str, Path]:
    """`SRC[:DEST]` as path in the job's folder → file or folder here; DEST is SRC's name if it is left out."""
    found: dict[str, Path] = {}
    for text in texts:
        source, colon, dest = text.rpartition(":")
        if not colon:
            source, dest = text, ""
        if not source or (colon and not dest):
            raise UsageError(f"--input {text}: write a path, or SRC:DEST", value=text)
        if not Path(source).exists():
            raise BadSource(f"--input {text}: {source} does not exist", value=text)
        place = _place(dest or Path(source).resolve().name, text)
        if place in found:
            raise UsageError(f"--input {text}: {place} is taken by another input", value=text)
        found[place] = Path(source)
    return found


def _place(dest: str, text: str) -> str:
    path = PurePosixPath(dest)
    if path.is_absolute() or ".." in path.parts:
        raise UsageError(
            f"--input {text}: {dest} is not below the job's folder: write a relative path", value=text
        )
    return str(path)


def checked_pattern(pattern: str) -> str:
    """An output pattern that stays below the job's folder."""
    path = PurePosixPath(pattern)
    if not pattern.strip() or "\0" in pattern or path.is_absolute() or ".." in path.parts:
        raise UsageError(
            f"output '{pattern}' is not a pattern of files below the job's folder", value=pattern
        )
    return pattern
