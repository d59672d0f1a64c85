"""What of a folder stays at home: built-in excludes, `.gitignore` and `.gpulayerignore`, in that order.

`.gitignore` files mean what they mean to git, nested ones too: the last line that matches decides, a deeper
file wins over a shallower one, and nothing comes back from below an excluded folder. `.gpulayerignore` has
the same syntax, may lie in any folder, and wins over all the rest. Its `!data/sample.csv` brings one file
back although `data/` is excluded by whatever else: the excluded folder is then looked through for what such
lines name.

Only files of the shipped folder count: not the user's global ignore file, and not those of folders above.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

from gpulayer_broker.errors import BadSource

GIT_FILE, OWN_FILE = ".gitignore", ".gpulayerignore"
BUILT_IN = (
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "__pycache__",
    "*.pyc",
    "node_modules",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".tox",
    ".DS_Store",
    "gpulayer_runs",
    ".gpulayer",
)


@dataclass(frozen=True)
class _Patterns:
    """The lines of one ignore file, about paths below the folder `base` ('' or with a slash at its end)."""

    base: str
    patterns: tuple[GitIgnoreSpecPattern, ...]
    brought_back: tuple[str, ...] = ()

    def verdict(self, path: str, is_folder: bool) -> bool | None:
        """Whether the last matching line excludes the path; None if none matches."""
        below = path[len(self.base) :]
        for pattern in reversed(self.patterns):
            if _matches(pattern, below, is_folder):
                return pattern.include
        return None

    def reopens(self, folder: str) -> bool:
        below = f"{folder}/"[len(self.base) :]
        return any(path.startswith(below) for path in self.brought_back)


@dataclass(frozen=True)
class IgnoreRules:
    """The rules that hold in one folder; `below` adds those of a folder in it. Deeper files come first."""

    built_in: _Patterns
    git: tuple[_Patterns, ...] = ()
    own: tuple[_Patterns, ...] = ()
    reads_files: bool = True

    def below(self, folder: str, git_text: str | None, own_text: str | None) -> IgnoreRules:
        """The rules of `folder` ('' for the top), whose ignore files hold these texts."""
        base = f"{folder}/" if folder else ""
        rules = self
        if git_text is not None:
            rules = replace(rules, git=(_read(base, git_text, None), *rules.git))
        if own_text is not None:
            rules = replace(rules, own=(_read(base, own_text, base + OWN_FILE), *rules.own))
        return rules

    def excludes(self, path: str, *, is_folder: bool, within_excluded: bool = False) -> bool:
        """Whether `path` stays at home; `within_excluded` says that the folder it lies in does."""
        own = _first(patterns.verdict(path, is_folder) for patterns in self.own)
        if own is not None:
            return own
        if within_excluded or self.built_in.verdict(path, is_folder):
            return True
        return bool(_first(patterns.verdict(path, is_folder) for patterns in self.git))

    def reopens(self, folder: str) -> bool:
        """Whether a line of `.gpulayerignore` brings something back from below an excluded folder."""
        return any(patterns.reopens(folder) for patterns in self.own)


def built_in_rules(*, reads_files: bool = True) -> IgnoreRules:
    """The rules that hold everywhere.

    A walk adds those of the ignore files that it meets, if it is to read them.
    """
    return IgnoreRules(_Patterns("", tuple(_patterns(BUILT_IN, None))), reads_files=reads_files)


def _first(verdicts: Iterator[bool | None]) -> bool | None:
    return next((verdict for verdict in verdicts if verdict is not None), None)


def _read(base: str, text: str, strict_name: str | None) -> _Patterns:
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    brought_back = (line[1:].strip().lstrip("/") for line in lines if line.startswith("!"))
    return _Patterns(
        base, tuple(_patterns(lines, strict_name)), tuple(path for path in brought_back if "/" in path)
    )


def _patterns(lines: Iterable[str], strict_name: str | None) -> Iterator[GitIgnoreSpecPattern]:
    for number, line in enumerate(lines, start=1):
        try:
            spec = GitIgnoreSpec.from_lines([_folders_below(line)])
        except ValueError as error:
            # git passes over a line that it cannot read, so its files may hold such lines.
            if strict_name is not None:
                raise BadSource(f"{strict_name}, line {number}: {line!r} is not a pattern") from error
            continue
        yield from (pattern for pattern in spec.patterns if isinstance(pattern, GitIgnoreSpecPattern))


def _folders_below(line: str) -> str:
    """The line, with `a/**/` as `a/**/*/`: to git it names the folders below `a`, to pathspec `a` as well."""
    return f"{line[:-1]}/*/" if line.endswith("/**/") else line


def _matches(pattern: GitIgnoreSpecPattern, path: str, is_folder: bool) -> bool:
    """Whether the pattern names the path itself, not merely a folder above it.

    pathspec also counts what lies below a named folder, and marks the slash that it found. Walking from the
    top has decided about those folders already, and counting them twice would break `*`, `!*/`, `!*.py`.
    """
    if pattern.regex is None or pattern.include is None:
        return False
    marks = "ps_d" in pattern.regex.groupindex
    if any(not marks or match["ps_d"] is None for match in pattern.regex.finditer(path)):
        return True
    if not is_folder or not marks:
        return False
    return any(match.end("ps_d") == len(path) + 1 for match in pattern.regex.finditer(f"{path}/"))
