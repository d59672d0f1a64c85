"""Ignore rules: git's own meaning for `.gitignore`, built-in excludes, and `.gpulayerignore` over both."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpulayer_broker.errors import BadSource
from gpulayer_broker.store.files import FOLDER_FLAGS, opened
from gpulayer_broker.store.ignore import BUILT_IN, built_in_rules
from gpulayer_broker.store.walk import walk


def make_tree(folder: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8", errors="surrogateescape")


def shipped(folder: Path) -> set[str]:
    with opened(folder, FOLDER_FLAGS) as fd:
        return {found.path for found in walk(fd, built_in_rules()) if found.kind == "file"}


def shipped_of(folder: Path, files: dict[str, str]) -> set[str]:
    """What of these files travels, the ignore files aside."""
    make_tree(folder, files)
    return {path for path in shipped(folder) if not path.endswith("ignore")}


@pytest.mark.parametrize("name", [name.replace("*", "module") for name in BUILT_IN])
def test_what_nobody_means_to_ship_stays_at_home(tmp_path: Path, name: str) -> None:
    assert shipped_of(tmp_path, {f"{name}/inner": "", f"sub/{name}": "", "train.py": ""}) == {"train.py"}


@pytest.mark.parametrize("name", [".env", ".github/workflow", "build/x", "env.py", "nodes/x"])
def test_what_may_be_needed_travels(tmp_path: Path, name: str) -> None:
    assert shipped_of(tmp_path, {name: ""}) == {name}


def test_a_nested_gitignore_wins_over_the_one_above(tmp_path: Path) -> None:
    files = {
        ".gitignore": "*.log\n",
        "a.log": "",
        "sub/.gitignore": "!*.log\n/only",
        "sub/b.log": "",
        "only": "",
    }

    assert shipped_of(tmp_path, files | {"sub/only": ""}) == {"sub/b.log", "only"}


def test_nothing_comes_back_from_below_a_folder_that_gitignore_excludes(tmp_path: Path) -> None:
    files = {".gitignore": "data/\n!data/keep\n", "data/keep": "", "data/.gitignore": "!keep"}

    assert shipped_of(tmp_path, files) == set()


def test_gpulayerignore_excludes_what_git_keeps(tmp_path: Path) -> None:
    assert shipped_of(tmp_path, {".gpulayerignore": "notes/\n", "notes/a": "", "b": ""}) == {"b"}


@pytest.mark.parametrize(
    ("git", "own", "path"),
    [
        ("*.bin", "!model.bin", "model.bin"),
        ("data/", "!data/", "data/a.csv"),
        ("data/", "!data/a.csv", "data/a.csv"),
        ("data", "!/data/sub/a.csv", "data/sub/a.csv"),
        ("", "!venv/bin/tool", "venv/bin/tool"),
        ("", "!node_modules", "node_modules/x"),
    ],
)
def test_gpulayerignore_brings_back_what_else_is_excluded(
    tmp_path: Path, git: str, own: str, path: str
) -> None:
    assert shipped_of(tmp_path, {".gitignore": git, ".gpulayerignore": own, path: ""}) == {path}


def test_only_what_is_named_comes_back_from_an_excluded_folder(tmp_path: Path) -> None:
    files = {".gitignore": "data/", ".gpulayerignore": "!data/a.csv", "data/a.csv": "", "data/b.csv": ""}

    assert shipped_of(tmp_path, files | {"data/sub/c.csv": ""}) == {"data/a.csv"}


def test_a_gitignore_within_an_excluded_folder_brings_nothing_back(tmp_path: Path) -> None:
    files = {".gitignore": "d/", ".gpulayerignore": "!d/a", "d/a": "", "d/b": "", "d/.gitignore": "!b"}

    assert shipped_of(tmp_path, files) == {"d/a"}


def test_an_allow_list_of_kinds_reaches_into_folders(tmp_path: Path) -> None:
    files = {".gitignore": "*\n!*/\n!*.py\n", "a/b/c.py": "", "a/b/c.txt": "", "d.txt": ""}

    assert shipped_of(tmp_path, files) == {"a/b/c.py"}


def test_a_line_that_git_cannot_read_is_passed_over(tmp_path: Path) -> None:
    assert shipped_of(tmp_path, {".gitignore": "!\n*.log\n", "a.log": "", "b": ""}) == {"b"}


def test_a_bad_line_of_gpulayerignore_is_named(tmp_path: Path) -> None:
    make_tree(tmp_path, {"sub/.gpulayerignore": "*.log\n!\n"})

    with pytest.raises(BadSource, match=r"sub/\.gpulayerignore, line 2: '!' is not a pattern"):
        shipped(tmp_path)


def test_names_of_any_bytes_and_windows_line_ends_are_matched(tmp_path: Path) -> None:
    make_tree(tmp_path, {".gitignore": "\ufeff*.log\r\nb\udcffd\r\n", "a.log": ""})
    (tmp_path / os.fsdecode(b"b\xffd")).write_text("")

    assert shipped(tmp_path) == {".gitignore"}


def test_an_ignore_file_that_is_a_link_or_a_folder_is_no_ignore_file(tmp_path: Path) -> None:
    make_tree(tmp_path, {"rules": "*.log", "a.log": ""})
    (tmp_path / ".gitignore").symlink_to("rules")
    (tmp_path / ".gpulayerignore").mkdir()

    assert shipped(tmp_path) == {"rules", "a.log"}


FILES = ["a", "b.py", "d/a", "d/b.py", "d/e/a", "d/e/c.txt", "e/d/a", "e/b.py"]
segments = st.sampled_from(["a", "b.py", "d", "e", "*", "**", "*.py", "?", "[ab]", "c.*"])
pattern_lines = st.builds(
    lambda negated, rooted, names, ended: negated + rooted + "/".join(names) + ended,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "", "/"]),
    st.lists(segments, min_size=1, max_size=3),
    st.sampled_from(["", "", "/"]),
)
ignore_texts = st.lists(pattern_lines, max_size=4).map("\n".join)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is the reference and is not installed")
@settings(max_examples=100, deadline=None)
@given(ignore_texts, ignore_texts)
@example("*\n!*/\n!*.py", "")
@example("d/**\n!d/a", "")
@example("d/*\n!d/e", "c.txt")
@example("", "e/**/")
def test_gitignore_means_what_it_means_to_git(top: str, nested: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tree(folder, dict.fromkeys(FILES, "") | {".gitignore": top, "d/.gitignore": nested})
        environment = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}
        subprocess.run(["git", "init", "-q"], cwd=folder, env=environment, check=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--others", "--exclude-standard"],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )

        assert shipped(folder) == set(filter(None, listed.stdout.split("\0")))
