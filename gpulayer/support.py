"""What was validated on which hardware, from `support.toml`: one word for each accelerator and kind of job."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

WORDS = ("hardware-validated", "not-run", "simulated", "unsupported")
KINDS = ("independent", "distributed")


@dataclass(frozen=True)
class Support:
    """One entry; machine, date and evidence are empty where nothing was run."""

    accelerator: str
    kind: str
    word: str
    machine: str = ""
    date: str = ""
    evidence: str = ""


@cache
def load_support() -> tuple[Support, ...]:
    """All entries, in the file's order."""
    table = tomllib.loads((files("gpulayer") / "support.toml").read_text(encoding="utf-8"))
    return tuple(
        Support(accelerator, kind, **table[accelerator][kind]) for accelerator in table for kind in KINDS
    )


def validation(accelerator: str) -> dict[str, str]:
    """The word for each kind of job; an accelerator that is not in the table was never run."""
    words = {entry.kind: entry.word for entry in load_support() if entry.accelerator == accelerator}
    return {kind: words.get(kind, "not-run") for kind in KINDS}


def support_table() -> str:
    """The entries as a table for documents."""
    rows = ["| accelerator | kind | status | where | evidence |", "|---|---|---|---|---|"]
    for entry in load_support():
        where = ", ".join(part for part in (entry.machine, entry.date) if part) or "-"
        rows.append(
            f"| {entry.accelerator} | {entry.kind} | {entry.word} | {where} | {entry.evidence or '-'} |"
        )
    return "\n".join(rows)
