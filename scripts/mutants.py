"""Proves that the tests notice: each mutant breaks one line of the product, and its named tests must then fail.

A mutant is a file of tests/mutants/: `breaks` (what it spoils), `covers` (rules and functions), `file`, `line` (which
must be there exactly once), `becomes`, and `tests`. Each is applied to a copy of the tree, never to the tree. Before
that the same tests must pass on an unchanged copy, unless `--tests-passed` says that they just did. The run fails when
a mutant survives, when its line is no longer there, when its library does not load, or when a rule or a function of the
queue has no mutant.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDER = REPOSITORY / "tests" / "mutants"
FUNCTIONS = REPOSITORY / "broker" / "gpulayer_broker" / "lua"
RULES = tuple(f"rule {number}" for number in range(1, 11))
NEEDED = ("broker", "worker", "gpulayer", "tests", "scripts")
MARKS = ("<!-- mutants -->", "<!-- /mutants -->")
LIMIT_S = 180
# What a mutant keeps from happening at all is not waited for as long as a slow machine may need.
BROKEN_PATIENCE_S = 20
PYTEST = ("-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", f"--timeout={LIMIT_S - 30}")
_LOADS = "import sys; from scripts.mutants import load; load(sys.argv[1])"


@dataclass(frozen=True)
class Mutant:
    """One broken line."""

    name: str
    breaks: str
    covers: str
    file: str
    line: str
    becomes: str
    tests: str

    @property
    def names(self) -> set[str]:
        """The rules, functions and parts that it covers."""
        return {name.strip() for name in self.covers.split(",")}

    def apply(self, tree: Path) -> None:
        """Breaks the line in a copy; ValueError where it is not there exactly once."""
        path = tree / self.file
        lines = path.read_text().splitlines()
        lines[self.place(tree)] = self.becomes
        path.write_text("\n".join(lines) + "\n")

    def place(self, tree: Path) -> int:
        """The number of the line."""
        lines = (tree / self.file).read_text().splitlines()
        at = [n for n, line in enumerate(lines) if line.strip() == self.line.strip()]
        if len(at) != 1:
            raise ValueError(f"{self.file} holds the line {len(at)} times: {self.line.strip()}")
        return at[0]


@dataclass(frozen=True)
class Verdict:
    """How a mutant fared: `killed` by its tests, or why not."""

    mutant: Mutant
    killed: bool
    note: str
    seconds: float


def mutants() -> list[Mutant]:
    return [_read(path) for path in sorted(FOLDER.glob("*.toml"))]


def uncovered(chosen: list[Mutant]) -> list[str]:
    """Rules, and functions of the queue, that no mutant breaks."""
    covered = {name for mutant in chosen for name in mutant.names}
    texts = [path.read_text() for path in sorted(FUNCTIONS.glob("*.lua"))]
    functions = [name for text in texts for name in re.findall(r"^register\('(\w+)'", text, re.MULTILINE)]
    return [name for name in (*RULES, *functions) if name not in covered]


def _read(path: Path) -> Mutant:
    fields = tomllib.loads(path.read_text())
    try:
        return Mutant(path.stem, **fields)
    except TypeError as error:
        raise SystemExit(f"{path}: {error}") from None


@contextmanager
def copied_tree() -> Iterator[Path]:
    """The needed folders, in a short place: sockets lie in temporary folders, but paths stay readable."""
    folder = Path(tempfile.mkdtemp(prefix="gpl-mutant-", dir="/tmp"))
    try:
        for name in NEEDED:
            if (REPOSITORY / name).is_dir():
                shutil.copytree(REPOSITORY / name, folder / name)
        shutil.copy(REPOSITORY / "pyproject.toml", folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(tree: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python command that sees the copy and nothing of the tree."""
    paths = os.pathsep.join(str(tree / part) for part in ("", "broker", "worker"))
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "GPULAYER_NO_SHRINK": "1"}
    env |= environment
    return subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def tested(tree: Path, tests: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(tree, "-m", "pytest", *PYTEST, *shlex.split(tests), **environment)


def load(folder: str) -> None:
    """The library of the copy loads into a server: a mutant that is no Lua proves nothing."""
    from gpulayer_broker import library
    from gpulayer_broker.connection import Link
    from tests.servers import QueueServer

    assert str(library.__file__).startswith(folder), library.__file__
    server = QueueServer().start()
    try:
        with Link(server.endpoint) as link:
            library.load(link)
    finally:
        server.remove()


def judge(mutant: Mutant) -> Verdict:
    start = time.monotonic()

    def verdict(killed: bool, note: str) -> Verdict:
        return Verdict(mutant, killed, note, time.monotonic() - start)

    with copied_tree() as tree:
        try:
            mutant.apply(tree)
        except (ValueError, OSError) as error:
            return verdict(False, f"does not apply: {error}")
        if mutant.file.endswith(".lua"):
            loaded = run(tree, "-c", _LOADS, str(tree))
            if loaded.returncode:
                return verdict(False, f"does not load: {_last_line(loaded.stderr)}")
        try:
            outcome = tested(tree, mutant.tests, GPULAYER_TEST_PATIENCE_S=str(BROKEN_PATIENCE_S))
        except subprocess.TimeoutExpired:
            return verdict(False, f"no verdict within {LIMIT_S} s")
    if outcome.returncode == 1:
        return verdict(True, _failed(outcome.stdout))
    return verdict(False, f"pytest ended with {outcome.returncode}: {_last_line(outcome.stdout)}")


def _failed(output: str) -> str:
    """The test that noticed."""
    found = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return found[0].split(" ")[1].split("::")[-1] if found else _last_line(output)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def control(chosen: list[Mutant], jobs: int) -> str:
    """Why the tests say nothing: one of them fails without any mutant. Empty where all pass."""
    with copied_tree() as tree, ThreadPoolExecutor(jobs) as pool:
        every = sorted({m.tests for m in chosen})
        for tests, outcome in zip(every, pool.map(lambda tests: tested(tree, tests), every), strict=True):
            if outcome.returncode:
                return f"{tests} fails without a mutant: {_failed(outcome.stdout)}"
    return ""


def table(chosen: list[Mutant]) -> str:
    rows = [f"| {m.name} | {m.covers} | {m.breaks} | `{m.tests}` |" for m in chosen]
    return "\n".join(
        ["| mutant | rule, function | what it breaks | tests that notice |", "|---|---|---|---|", *rows]
    )


def write_table(path: Path, chosen: list[Mutant]) -> None:
    """Between its marks in a page that exists, or as a page of its own."""
    before, after = "", ""
    if path.exists():
        before, mark, rest = path.read_text().partition(MARKS[0])
        if not mark or MARKS[1] not in rest:
            raise SystemExit(f"{path} has no {MARKS[0]} … {MARKS[1]}: add both where the table belongs")
        after = rest.partition(MARKS[1])[2]
    path.write_text(f"{before}{MARKS[0]}\n{table(chosen)}\n{MARKS[1]}{after or chr(10)}")


def run_all(chosen: list[Mutant], jobs: int, trusted: bool, say: Callable[[str], None]) -> int:
    say(f"{len(chosen)} mutants" + ("" if trusted else "; first their tests without any"))
    if not trusted and (why := control(chosen, jobs)):
        say(why)
        return 1
    survivors = 0
    with ThreadPoolExecutor(jobs) as pool:
        for v in pool.map(judge, chosen):
            survivors += not v.killed
            say(f"{'killed  ' if v.killed else 'SURVIVED'} {v.seconds:5.1f} s  {v.mutant.name:42} {v.note}")
    say(f"{len(chosen) - survivors} killed, {survivors} survived")
    return 1 if survivors else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Breaks one line at a time and expects the tests to notice.")
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="only this mutant; may be repeated")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="write the table into this page and run nothing"
    )
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (default 2)")
    parser.add_argument(
        "--tests-passed",
        action="store_true",
        help="the tests have just passed here: they are not run unbroken",
    )
    given = parser.parse_args()
    every = mutants()
    if not given.only and (names := uncovered(every)):
        parser.error(f"no mutant breaks {', '.join(names)}")
    if unknown := set(given.only or ()) - {m.name for m in every}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [m for m in every if not given.only or m.name in given.only]
    if given.list:
        print(table(chosen))
        return 0
    if given.table:
        write_table(given.table, chosen)
        return 0
    return run_all(chosen, given.jobs, given.tests_passed, lambda text: print(text, flush=True))


if __name__ == "__main__":
    sys.exit(main())
