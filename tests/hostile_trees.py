"""Manifests that nobody's bundle makes: each would put a file outside its folder, or make what is no file.

`trees` gives them by what is wrong, all naming one blob, which is in the store; the file that each is after is called
`escaped`, so that a test can look for it anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

CONTENT = b"out of the box"
SHA = sha256(CONTENT).hexdigest()
MANY = 1_000_000


def entry(path: str, kind: str = "file", **changes: Any) -> dict[str, Any]:
    plain: Mapping[str, Mapping[str, Any]] = {
        "file": {"size": len(CONTENT), "sha256": SHA, "mode": 0o644, "target": ""},
        "dir": {"size": 0, "sha256": "", "mode": 0o755, "target": ""},
        "link": {"size": 0, "sha256": "", "mode": 0o777, "target": "b"},
    }
    return {"path": path, "kind": kind, **plain.get(kind, plain["file"]), **changes}


def encoded(entries: list[dict[str, Any]]) -> bytes:
    record = {"version": 1, "total_bytes": sum(each["size"] for each in entries), "entries": entries}
    return orjson.dumps(record, option=orjson.OPT_SORT_KEYS)


def trees(outside: Path) -> dict[str, list[dict[str, Any]]]:
    """What is wrong → the entries, which reach for a file in the folder `outside`."""
    return {
        "an absolute path": [entry(f"{outside}/escaped")],
        "a path that climbs": [entry("../escaped")],
        "a path that goes down and climbs": [entry("a/../../escaped")],
        "a link to an absolute path, and a file through it": [
            entry("a", "link", target=str(outside)),
            entry("a/escaped"),
        ],
        "a link that climbs, and a file through it": [
            entry("a", "link", target=".."),
            entry("a/escaped"),
        ],
        "a link in a folder that climbs twice": [entry("a/l", "link", target="../../escaped")],
        "links that climb together": [entry("a", "link", target="b/.."), entry("b", "link", target=".")],
        "a folder below a link": [entry("a", "link", target="."), entry("a/b", "dir")],
        "a device": [entry("escaped", "chr")],
        "a pipe": [entry("escaped", "fifo")],
        "a file that runs as its owner": [entry("escaped", mode=0o4755)],
        "a NUL in a path": [entry("escaped\0.txt")],
        "a separator of elsewhere": [entry("..\\escaped")],
        "one name twice": [entry("escaped"), entry("escaped")],
        "a file that is a folder too": [entry("escaped"), entry("escaped/a")],
        "a size that says less": [entry("escaped", size=3)],
        "a size that says more": [entry("escaped", size=3_000)],
        "a size that no disk has": [entry("escaped", size=1 << 50)],
        "a blob that is a path": [entry("escaped", sha256="../../../../etc/passwd")],
        "a blob that is not there": [entry("escaped", sha256="ab" * 32)],
        "more entries than a tree may have": [entry(f"{n:06}escaped", "dir") for n in range(100_001)],
    }


def million() -> bytes:
    """A list of so many folders, small for what it says."""
    each = orjson.dumps(entry("@", "dir"), option=orjson.OPT_SORT_KEYS).decode()
    entries = ",".join(each.replace("@", f"{n:06}") for n in range(MANY))
    return f'{{"entries":[{entries}],"total_bytes":0,"version":1}}'.encode()


def escaped(*folders: Path) -> list[Path]:
    """The files that got where nothing may get."""
    return [path for folder in folders for path in folder.rglob("*escaped*")]
