"""Recordings of machines: one JSON file each, which says where it came from, written out below a folder for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def recording(name: str) -> dict[str, Any]:
    """What the file holds: source, platform, files by path, what commands print."""
    return dict(json.loads((FOLDER / f"{name}.json").read_text()))


def write_out(name: str, root: Path) -> Path:
    """The recorded machine as files below `root`, as detection reads them."""
    record = recording(name)
    files = {**record["files"], "/platform.json": json.dumps(record["platform"])}
    files |= {f"/commands/{command}": json.dumps(answer) for command, answer in record["commands"].items()}
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return root
