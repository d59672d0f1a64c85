"""What commands print: words to stderr, one JSON document or a table to stdout.

A table is drawn for a terminal; in a pipe it is one line a row, fields between tabs, no header.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from gpulayer.cli.streams import write_bytes

# The columns that give way where a terminal is narrow; what is in others can be read only whole.
PROSE = frozenset({"name", "reasons", "provides", "frameworks", "file"})

# So wide they stay at least; and what stands between two columns.
PROSE_CELLS = 8
BETWEEN = 3

# So many jobs are told of one by one.
MOST_LINES = 20

# What a line about an error may have.
MOST_SIGNS = 2000


# What may be no sign to be read, of which a JSON document holds only such ones as it need not escape.
_NO_SIGN = re.compile(r"[^\x20-\x7e]")

# Whether the command has printed a document: it is to print one.
_printed: set[str] = set()


def begin() -> None:
    """Another command line begins."""
    _printed.clear()


def say(line: str) -> None:
    """A line for the person at the terminal; where it cannot be shown, what the command is for goes on."""
    with suppress(OSError):
        print(plain(line), file=sys.stderr, flush=True)


def say_each(told: Sequence[tuple[str, str]]) -> None:
    """What came of each of several jobs, a line each; of many, how many there were of each kind."""
    if len(told) <= MOST_LINES:
        for name, text in told:
            say(f"{name}: {text}")
        return
    counts = Counter(text for _, text in told)
    say(f"{len(told)} jobs: {'; '.join(f'{text}: {count}' for text, count in counts.items())}")


def print_json(document: Any) -> None:
    """One document on stdout."""
    _printed.add("document")

    write_json(dumped(document, indent=True))


def print_error(error: dict[str, Any]) -> None:
    """The document of a command that failed; none where it has printed its own already."""
    if not _printed:
        print_json({"schema": 1, "error": error})


def print_json_line(document: Any) -> None:
    """One document on a line of stdout."""
    _printed.add("document")

    write_json(dumped(document))


def write_json(document: bytes) -> None:
    """A document as it is; on a terminal what is no sign to be read stands in it by its number."""
    if sys.stdout.isatty():
        document = _NO_SIGN.sub(_by_number, document.decode()).encode()
    write_bytes(document + b"\n")


def _by_number(found: re.Match[str]) -> str:
    if found[0] == "\n" or found[0].isprintable():
        return found[0]
    import json

    return json.dumps(found[0])[1:-1]


def dumped(document: Any, *, indent: bool = False) -> bytes:
    """The document as JSON has it, numbers of any length too; what JSON has not, as Python shows it."""
    import orjson

    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_INDENT_2 if indent else 0)
    try:
        return orjson.dumps(document, default=repr, option=options)
    except (TypeError, ValueError):
        return _dumped_slowly(document, indent)


def _dumped_slowly(document: Any, indent: bool) -> bytes:
    import json

    try:
        text = json.dumps(
            document, default=repr, ensure_ascii=False, allow_nan=False, indent=2 if indent else None
        )
        return text.encode()
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(document)).encode()


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The rows, drawn or plain."""
    if not sys.stdout.isatty():
        for row in rows:
            print("\t".join(plain(field) for field in row))
        return
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    fields = [[plain(field) for field in row] for row in rows]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    least = 0
    for number, column in enumerate(columns):
        whole = max(map(cell_len, [column, *(row[number] for row in fields)]))
        least += BETWEEN + (width := min(whole, PROSE_CELLS) if column in PROSE else whole)
        table.add_column(column, no_wrap=column not in PROSE, min_width=width)
    for row in fields:
        # As text, not markup: names are the users' own.
        table.add_row(*map(Text, row))
    # Where it does not fit the terminal breaks its lines: half an id is no id.
    Console(width=max(least, Console().width)).print(table)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """One fact a line, the label in twelve columns."""
    for label, text in facts:
        print(f"{label:<12}{plain(text)}".rstrip())


def shortened(line: str) -> str:
    """A line that holds a value of any length, with its beginning and its end, where the cure stands."""
    return line if len(line) <= MOST_SIGNS else f"{line[: MOST_SIGNS // 2]}…{line[-MOST_SIGNS // 2 :]}"


def plain(text: str) -> str:
    """The text without what would move the cursor or break a line."""
    return "".join(sign if sign.isprintable() else " " for sign in text)
