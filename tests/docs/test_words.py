"""What the documentation says is there: its links, files, commands; and what is there is in the documentation."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import gpulayer_broker
from gpulayer.cli.app import app
from gpulayer_broker import errors, keys, library, settings
from scripts import make_reference as reference
from tests.docs.pages import ROOT, anchors, blocks, links, pages

ALL_PAGES = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
CODE_FOLDERS = ("broker", "worker", "gpulayer")
# Folders of people's machines, where a text of everybody's has no business.
OF_A_MACHINE = re.compile(r"(?<![\w.~<])/(?:work|root|home/\w+|Users/\w+|mnt|workspace)/")
VARIABLE = re.compile(r"\bGPULAYER_[A-Z]+(?:_[A-Z]+)*\b")


def everything() -> str:
    return "\n".join(page.read_text() for page in pages())


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return reference.commands(group)


def all_errors() -> list[type[errors.GpulayerError]]:
    """Every class of the package that has a code of its own."""
    for module in pkgutil.iter_modules(gpulayer_broker.__path__, "gpulayer_broker."):
        importlib.import_module(module.name)
    found, left = [], [errors.GpulayerError]
    while left:
        each = left.pop()
        left += [child for child in each.__subclasses__() if child.__module__.startswith("gpulayer")]
        if "code" in vars(each):
            found.append(each)
    return found


@ALL_PAGES
def test_no_example_s_file_hides_a_module_of_python(page: Path) -> None:
    """Who saves it under that name could import nothing that needs the module, beside it."""
    scripts = {Path(block.title).stem for block in blocks(page) if block.title.endswith(".py")}
    assert scripts & sys.stdlib_module_names == set()


@ALL_PAGES
def test_an_example_at_the_prompt_holds_no_text_of_its_page(page: Path) -> None:
    assert [
        str(block) for block in blocks(page) if block.body.startswith(">>>") and "\n\n" in block.body
    ] == []


@ALL_PAGES
def test_every_link_leads_to_a_file(page: Path) -> None:
    missing = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


@ALL_PAGES
def test_every_file_that_is_named_is_there(page: Path) -> None:
    named = set(re.findall(r"`((?:tests|scripts|benchmarks|docs|examples)/[\w/]+\.\w+)`", page.read_text()))
    assert not [name for name in named if not (ROOT / name).exists()]


@ALL_PAGES
def test_no_page_names_a_folder_of_one_machine(page: Path) -> None:
    assert not OF_A_MACHINE.findall(page.read_text())


def test_every_make_target_that_is_named_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", everything(), re.M))
    assert not [a or b for a, b in named if not re.search(rf"^{a or b}:", makefile, re.M)]


def test_every_command_and_flag_is_in_the_documentation() -> None:
    text = everything()
    flags = {
        flag
        for command in commands().values()
        for p in command.params
        for flag in p.opts
        if flag.startswith("-")
    }
    assert not [name for name in commands() if f"gpulayer {name}" not in text]
    assert not [flag for flag in flags if not re.search(rf"`{re.escape(flag)}[` ]", text)]


def test_every_flag_of_the_worker_is_in_the_documentation() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "gpulayer_worker", "--help"], check=True, capture_output=True, text=True
    ).stdout
    flags = set(re.findall(r"(--[a-z-]+)", told.partition("options:")[2])) - {"--help"}
    page = (ROOT / "docs" / "reference" / "cli.md").read_text().partition("## python -m gpulayer_worker")[2]
    assert len(flags) > 3
    assert not [flag for flag in flags if not re.search(rf"`{flag}[` ]", page)]


def test_every_command_that_is_shown_is_there() -> None:
    shown = set(re.findall(r"(?:^|[`$(| ])gpulayer ([a-z]+)\b(?! is\b)", "\n".join(_code_of_pages())))
    assert not shown - {name.split()[0] for name in commands()} - _not_yet()


def _code_of_pages() -> list[str]:
    return [
        code
        for page in pages()
        for code in re.findall(r"`(gpulayer [a-z][^`]*)`|^(gpulayer [a-z].*)$", page.read_text(), re.M)
        for code in code
    ]


def _not_yet() -> set[str]:
    """Commands that the status page names as not there."""
    text = (ROOT / "docs" / "project" / "status.md").read_text().partition("## What is not there")[2]
    first = text.partition("`gpulayer ")[2].partition(";")[0]
    return set(re.findall(r"[a-z]+", first)) | {"mcp"}


def test_what_is_said_to_be_missing_is_missing() -> None:
    assert not _not_yet() & set(commands())


def test_every_setting_is_in_the_documentation() -> None:
    text = everything()
    names = [settings.PREFIX + name.upper() for name in settings.Settings.__dataclass_fields__]
    assert not [name for name in names if f"`{name}`" not in text]


def test_every_variable_that_the_code_reads_or_sets_is_in_the_documentation() -> None:
    files = [path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    used = {name for path in files for name in VARIABLE.findall(path.read_text())}
    text = everything()
    assert not [name for name in used if name not in text]


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.code)
def test_every_error_has_a_line_with_its_code_class_and_exit(error: type[errors.GpulayerError]) -> None:
    page = (ROOT / "docs" / "errors" / "index.md").read_text()
    line = re.search(rf"^\| `{error.code}` \| `{error.__name__}` \|.*$", page, re.M)
    assert line
    section = page[: line.start()].rpartition("\n## ")[2]
    assert (
        f"(exit {error.exit_code})" in section or f"| {error.exit_code} |" in line[0] or error.exit_code == 1
    )


@pytest.mark.parametrize("error", all_errors(), ids=lambda error: error.code)
def test_every_error_names_the_test_that_provokes_it(error: type[errors.GpulayerError]) -> None:
    page = (ROOT / "docs" / "errors" / "index.md").read_text()
    named = re.search(rf"^\| `{error.code}` \|.*\| `([\w/]+\.py)::(test_\w+)` \|$", page, re.M)
    assert named
    assert f"def {named[2]}(" in (ROOT / "tests" / named[1]).read_text()


def test_every_key_and_function_of_the_queue_is_on_its_page() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    functions = {name.removesuffix(".lua") for name in library.sources() if not name.startswith("h_")}
    assert not [kind.pattern for kind in keys.TABLE if f"`{kind.pattern}`" not in text]
    assert not [name for name in functions if f"| `{name}` |" not in text]


def test_the_written_pages_are_what_the_code_says() -> None:
    assert not reference.stale(), "run: python scripts/make_reference.py"


def test_every_mutant_is_in_the_table_and_no_other() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text().partition("## Mutants")[2]
    named = set(re.findall(r"^\| ([a-z0-9-]+) \|", text, re.M)) - {"mutant", "---"}
    there = {path.stem for path in (ROOT / "tests" / "mutants").glob("*.toml")}
    assert named == there, "run: python scripts/mutants.py --table docs/reliability.md"


def test_the_changelog_has_the_version() -> None:
    import gpulayer

    assert gpulayer.__version__ in (ROOT / "CHANGELOG.md").read_text()
