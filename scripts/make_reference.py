"""Writes what the documentation can read off the code: the reference pages, and tables in README.md, CONTRIBUTING.md,
the architecture overview and the status page.

    python scripts/make_reference.py            writes them
    python scripts/make_reference.py --check    says which are not what the code says, and ends with 1

A table between `<!-- name:begin -->` and `<!-- name:end -->` is replaced, the text around it is its author's.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"
NOTE = "<!-- Written by scripts/make_reference.py: change the code, then run it. -->\n"

SETTINGS = {
    "redis_url": "address of the queue; unset means the private set-up",
    "namespace": "which of a server's queues; names of letters, digits, `.`, `_`, `-`",
    "private": "whether a private set-up may be started (`on`, `off`)",
    "lease_s": "how long a claim lasts without a heartbeat",
    "heartbeat_s": "how often a worker renews; at most half a lease",
    "lease_grace_s": "how much longer than the lease another worker waits before it starts the job",
    "term_grace_s": "from TERM to KILL when a job is ended",
    "idle_stop_s": "when the private set-up stops, with no client and no open job",
    "probe_limit_s": "how long a look at the machine's devices may take",
    "probe_every_s": "how often a worker looks at its devices",
    "lost_workers": "the loss that ends a job as `worker_lost`",
    "earmark_s": "how long a job that lacks room on every worker it fits waits until one is kept for it, `0` for ever",
    "placement": "which of the workers that fit is woken first: `spread` the least busy, `pack` the busiest",
    "argument_inline_bytes": "pickled arguments up to this travel in the record, larger ones in the store",
    "argument_blob_bytes": "the most that a call's pickled arguments, or its function, may have",
    "result_bytes": "the most that a function may return, pickled",
    "source_bytes": "the most that a shipped folder may have",
    "source_files": "the most files in a shipped folder, and in outputs that are fetched",
    "artifact_bytes": "the most that a job may return as outputs",
    "queue_blob_bytes": "the most that one job's files may have when they travel through the queue's server",
    "log_tail_bytes": "the live log that the queue keeps of one rank",
    "log_bytes": "the most that is kept of one rank's whole log",
    "queued_jobs": "how many jobs may wait in a namespace",
    "cache_bytes": "how large a worker's cache grows before what was not used for longest is removed",
    "job_processes": "how many processes and threads one job may have, where the system has control groups",
    "result_keep_s": "how long results are kept",
    "job_keep_s": "how long records of finished jobs are kept",
    "outputs_keep_s": "how long the private store keeps what nobody has used",
}
OTHER_VARIABLES = {
    "GPULAYER_STATE_DIR": "folder of the private set-up's data, absolute",
    "GPULAYER_TARGET": "as `--target`",
    "GPULAYER_DEBUG": "`1` shows tracebacks of the command line, and whole ones of the SDK's own errors",
    "GPULAYER_URL": "reserved for a server's address, which this release cannot use: it says so",
}
JOB_VARIABLES = {
    "GPULAYER_JOB_ID": "the job",
    "GPULAYER_ATTEMPT": "which try at it, from 1",
    "GPULAYER_NAME": "its name",
    "GPULAYER_ACCELERATOR": "what was granted: `cpu`, `cuda`, `rocm` or `mps`",
    "GPULAYER_GPUS": "how many devices were granted",
    "GPULAYER_INDEX": "which of an array's jobs it is: the number of `--array`, or the line's",
    "GPULAYER_LINE": "the line of `--each-line`",
    "GPULAYER_OUTPUTS": "the folder whose files are returned",
    "GPULAYER_SCRATCH": "a folder of the attempt, removed with it",
    "GPULAYER_CACHE": "a folder that this worker's jobs share and that stays",
    "GPULAYER_OWNER": "who submitted the job; what it submits itself is theirs too (private set-up)",
    "GPULAYER_REDIS_URL": "the queue, for what the job submits itself (private set-up only)",
    "GPULAYER_NAMESPACE": "which of its queues (private set-up only)",
    "GPULAYER_STORE": "the store, for what the job submits itself (private set-up only)",
    "GPULAYER_RESUME": "empty: checkpoints are not handed out yet",
    "GPULAYER_RANK": "`0` in this release",
    "GPULAYER_WORLD_SIZE": "`1` in this release",
    "GPULAYER_NODES": "`1` in this release",
    "GPULAYER_NODE_RANK": "`0` in this release",
    "GPULAYER_PROGRESS_FD": "where `gl.progress` writes",
    "GPULAYER_PROCESS": "marks the job's processes, so that none is left behind",
}


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# The command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    import typer.main

    from gpulayer.cli.app import app

    group: Any = typer.main.get_command(app)
    parts = [
        NOTE,
        "# Command line\n",
        "Results go to stdout, words to stderr. A table is drawn for a terminal; in a pipe it is one line a row\n"
        "with tabs between. An error is one line and an [exit code of its kind](../errors/index.md). `submit` ends\n"
        "with the job's own exit code. Every command has `--help`.\n",
    ]
    parts += [_command(name, command) for name, command in commands(group).items()]
    parts.append(worker_section())
    return "\n".join(parts)


def commands(group: Any) -> dict[str, Any]:
    """Every command by all its words: `submit`, `resources detect`."""
    found: dict[str, Any] = {}
    for name, each in group.commands.items():
        below = commands(each) if hasattr(each, "commands") else None
        found |= {name: each} if below is None else {f"{name} {word}": c for word, c in below.items()}
    return found


def worker_section() -> str:
    """The worker's own program, as its `--help` tells it."""
    command = [sys.executable, "-m", "gpulayer_worker", "--help"]
    # So wide that every option has one line.
    environment = {**os.environ, "COLUMNS": "1000"}
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    options = re.findall(r"^ +(--[\w-]+(?: \S+)?)(?: {2,}|\n +)(\S.*)$", told, re.M)
    return (
        "## python -m gpulayer_worker\n\nA worker in the foreground, for a queue at an address. The first SIGTERM or\n"
        "Ctrl-C lets it finish what runs and take nothing new; the second hands back what runs, and stops.\n\n"
        + table(("option", "meaning"), ((f"`{flag}`", meaning) for flag, meaning in options))
    )


def _command(name: str, command: Any) -> str:
    arguments = " ".join(_usage(p) for p in command.params if p.param_type_name == "argument")
    head = f"## gpulayer {name}\n\n```text\ngpulayer {name} [OPTIONS] {arguments}".rstrip() + "\n```\n"
    text, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    shown = f"\n```bash\n{example.strip()}\n```\n" if example else ""
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    rows = [(_flags(p), p.help or "") for p in options]
    return f"{head}\n{text.strip()}\n{shown}\n{table(('option', 'meaning'), rows)}"


def _usage(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _flags(option: Any) -> str:
    value = "" if option.is_flag else f" {option.metavar}"
    return ", ".join(f"`{flag}{value}`" for flag in option.opts)


# The SDK -----------------------------------------------------------------------------------------------------------


def sdk_page() -> str:
    import gpulayer
    from gpulayer.options import RemoteOptions

    parts = [NOTE, "# Python SDK\n", "Everything is a name of `gpulayer`, imported when it is first used.\n"]
    objects = {name: getattr(gpulayer, name) for name in gpulayer.__all__}
    errors = {name: each for name, each in objects.items() if _is_error(each)}
    for name, each in objects.items():
        if name not in errors:
            parts.append(_object(name, each))
    parts.append("## Options of a job\n")
    parts.append(
        "For `gl.remote`, `.options` and `Client.submit` (which takes no `target`: its client has one).\n"
    )
    parts.append(
        table(
            ("option", "type"),
            ((f"`{k}`", f"`{_type(v)}`") for k, v in RemoteOptions.__annotations__.items()),
        )
    )
    parts.append("## Errors\n")
    parts.append("All of them, with causes and cures: [Errors](../errors/index.md).\n")
    parts.append(table(("error", "meaning"), ((f"`gl.{k}`", _first_line(v)) for k, v in errors.items())))
    return "\n".join(parts)


def _is_error(each: Any) -> bool:
    return inspect.isclass(each) and issubclass(each, BaseException)


def _type(hint: Any) -> str:
    return getattr(hint, "__forward_arg__", None) or str(hint)


def _first_line(each: Any) -> str:
    return (inspect.getdoc(each) or "").splitlines()[0]


def _object(name: str, each: Any) -> str:
    head = f"## gl.{name}\n\n"
    if not inspect.isclass(each):
        return head + _signature(name, each) + _doc(each)
    shown = _signature(name, each) if name in ("Client",) else ""
    parts = [head + shown + _doc(each)]
    for member, value in vars(each).items():
        if member.startswith("_") or not (callable(value) or isinstance(value, property)):
            continue
        if isinstance(value, property):
            parts.append(f"### {name}.{member}\n\n{_doc(value)}")
        else:
            parts.append(f"### {name}.{member}\n\n{_signature(member, value)}{_doc(value)}")
    return "\n".join(parts)


def _signature(name: str, each: Any) -> str:
    text = f"{name}{inspect.signature(each)}".replace("(self, ", "(").replace("(self)", "()")
    text = re.sub(r"'([^']*)'", r"\1", text) if "'" in text else text
    if len(text) > 100:
        inner = re.split(r", (?![^\[]*\])", text[len(name) + 1 : text.rindex(")")])
        text = f"{name}(\n" + "".join(f"    {part},\n" for part in inner) + text[text.rindex(")") :]
    return f"```python\n{text}\n```\n\n"


def _doc(each: Any) -> str:
    """The docstring; its doctest becomes a block."""
    text, _, example = (inspect.getdoc(each) or "").partition(">>> ")
    shown = f"\n```python\n>>> {example.rstrip()}\n```\n" if example else ""
    return f"{text.strip()}\n{shown}"


# Settings ------------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    from dataclasses import fields

    from gpulayer_broker.settings import Settings

    rows = [
        (f"`{f.name}`", f"`GPULAYER_{f.name.upper()}`", _default(f), _meaning(f.name))
        for f in fields(Settings)
    ]
    return "\n".join(
        [
            NOTE,
            "# Settings\n",
            "The nearest place wins: a flag (`--redis`), `GPULAYER_<NAME>`, `.gpulayer/config.toml` of the current\n"
            "folder or the nearest one above (if nobody else can write it), `~/.config/gpulayer/config.toml`, the\n"
            'default. A file\'s unknown key is an error. Durations are seconds or `"5m"`, sizes bytes or `"64MiB"`.\n',
            table(("setting", "variable", "default", "meaning"), rows),
            "`lease_s`, `job_keep_s`, `result_keep_s`, `log_tail_bytes`, `lost_workers`, `earmark_s`, `placement` and\n"
            "`queued_jobs` are kept by the queue, for all of a namespace: when leases are judged and records leave\n"
            "is the same whoever keeps its clock. The private set-up writes its own whenever its server starts; a\n"
            "worker that starts writes those of its own that differ from the defaults. Clients write none.\n",
            "A file may also hold [profiles](../guides/any-gpu-framework.md#profiles), as `[profiles.NAME]`.\n",
            "## Other variables\n",
            table(("variable", "meaning"), ((f"`{k}`", v) for k, v in OTHER_VARIABLES.items())),
            "## What a job finds in its environment\n",
            "A job sees these, defaults for `HOME`, caches and thread counts that `--env` may override, and of the\n"
            "worker's own environment only locale, time zone, temporary folder, proxies and certificates.\n",
            table(("variable", "meaning"), ((f"`{k}`", v) for k, v in JOB_VARIABLES.items())),
        ]
    )


def _meaning(name: str) -> str:
    if name not in SETTINGS:
        raise SystemExit(f"setting {name} is new: say what it means in SETTINGS of scripts/make_reference.py")
    return SETTINGS[name]


def _default(each: Any) -> str:
    from gpulayer_broker.units import format_duration

    value = each.default
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if each.name.endswith("_s"):
        return format_duration(value)
    if each.name.endswith("_bytes"):
        return _size(value)
    return f"{value:,}" if isinstance(value, int) else f"`{value}`"


def _size(size_bytes: int) -> str:
    """As a settings file would have it."""
    for unit in ("GiB", "MiB", "KiB"):
        size = 1024 ** (3 - ("GiB", "MiB", "KiB").index(unit))
        if size_bytes % size == 0:
            return f"{size_bytes // size} {unit}"
    return f"{size_bytes} B"


# The queue ---------------------------------------------------------------------------------------------------------


def keys_table() -> str:
    from gpulayer_broker.keys import TABLE

    return table(
        ("key", "type", "lifetime", "content"),
        ((f"`{k.pattern}`", k.type, k.lifetime, k.content) for k in TABLE),
    )


def functions_table() -> str:
    from gpulayer_broker.library import sources

    rows = []
    for name, text in sources().items():
        flags = re.search(r"register\('\w+', \{([^}]*)\}", text)
        if flags:
            rows.append((f"`{name.removesuffix('.lua')}`", _purpose(text), flags[1].replace("'", "") or "-"))
    return table(("function", "what it does", "flags"), rows)


def _purpose(text: str) -> str:
    """The header's first sentences: all before its next label."""
    lines: list[str] = []
    for line in text.splitlines():
        if not line.startswith("--") or re.match(r"-- (Guarantee|Keys|Returns):", line):
            break
        lines.append(line[2:].strip())
    return " ".join(lines).partition(": ")[2]


def transitions_table() -> str:
    from gpulayer_broker.job import TRANSITIONS

    rows = ((t.source or "-", t.event, t.target, f"`{t.function}`", t.who) for t in TRANSITIONS)
    return table(("from", "event", "to", "function", "by"), rows)


def end_reasons_table() -> str:
    from gpulayer_broker.job import END_REASONS

    return table(
        ("end reason", "meaning"),
        ((f"`{name}`" if name else "(none)", text) for name, text in END_REASONS.items()),
    )


def support_words() -> str:
    """One word for each accelerator and kind of job; where and how is on the status page."""
    from gpulayer.support import KINDS, load_support, validation

    accelerators = dict.fromkeys(entry.accelerator for entry in load_support())
    rows = ((f"`{each}`", *(validation(each)[kind] for kind in KINDS)) for each in accelerators)
    return table(("accelerator", *(f"{kind} jobs" for kind in KINDS)), rows)


def filled(text: str, tables: dict[str, str]) -> str:
    """The text with each table between its markers."""
    for name, content in tables.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin not in text or end not in text:
            raise SystemExit(f"no markers {begin.strip()} and {end}")
        before, after = text.partition(begin)[0], text.partition(end)[2]
        text = f"{before}{begin}\n{content}\n{end}{after}"
    return text


def pages() -> dict[Path, str]:
    """Every page that this writes, and its text."""
    from gpulayer.support import support_table

    contributing, states = ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture" / "overview.md"
    readme, status = ROOT / "README.md", ROOT / "docs" / "project" / "status.md"
    return {
        REFERENCE / "cli.md": cli_page(),
        REFERENCE / "sdk.md": sdk_page(),
        REFERENCE / "settings.md": settings_page(),
        contributing: filled(
            contributing.read_text(), {"keys": keys_table(), "functions": functions_table()}
        ),
        states: filled(states.read_text(), {"transitions": transitions_table(), "ends": end_reasons_table()}),
        readme: filled(readme.read_text(), {"support": support_words()}),
        status: filled(status.read_text(), {"support": support_table() + "\n"}),
    }


def stale() -> list[str]:
    """The pages that are not what the code says."""
    return [
        str(path.relative_to(ROOT))
        for path, text in pages().items()
        if not path.exists() or path.read_text() != text
    ]


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        found = stale()
        if found:
            print(
                f"not what the code says: {', '.join(found)}: run python scripts/make_reference.py",
                file=sys.stderr,
            )
        return bool(found)
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
