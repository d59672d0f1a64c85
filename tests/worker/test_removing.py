"""Trees that a job leaves are removed whatever they look like, and nothing beside them is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpulayer_worker.cache import trim_cache
from gpulayer_worker.removing import remove_tree

DEPTH = 1500


def make_deep(folder: Path) -> None:
    """A chain of folders, with a file in each, deeper than recursion and longer than a path may be."""
    program = f"import os\nfor _ in range({DEPTH}):\n    os.mkdir('deep'); os.chdir('deep'); open('file', 'w').close()"
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)


def test_a_tree_deeper_than_recursion_is_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    make_deep(tree)

    assert remove_tree(tree)
    assert os.listdir(tmp_path) == []


def test_folders_that_cannot_be_read_or_written_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "one" / "two").mkdir(parents=True)
    (tree / "one" / "two" / "file").touch()
    os.chmod(tree / "one" / "two", 0o000)
    os.chmod(tree / "one", 0o000)
    os.chmod(tree, 0o000)

    assert remove_tree(tree)


def test_what_a_link_names_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").touch()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "link").symlink_to(victim)
    as_a_whole = tmp_path / "as_a_whole"
    as_a_whole.symlink_to(victim)

    assert remove_tree(tree)
    assert remove_tree(as_a_whole)
    assert os.listdir(victim) == ["precious"]


def test_names_that_the_removal_uses_itself_do_no_harm(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for number in range(5):
        (tree / f".removed-{number}" / ".removed-0" / ".removed-1").mkdir(parents=True)
        (tree / f".removed-{number}" / "file").touch()

    assert remove_tree(tree)


def test_names_that_are_no_text_are_removed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in (b"\xff\xfe", b"a\nb", b"-rf", b"x" * 255):
        os.mkdir(os.path.join(os.fsencode(tree), name))

    assert remove_tree(tree)


def test_what_is_not_there_is_removed(tmp_path: Path) -> None:
    assert remove_tree(tmp_path / "nothing")


def test_a_deep_folder_in_the_cache_hides_nothing_beside_it(tmp_path: Path) -> None:
    make_deep(tmp_path)
    (tmp_path / "model").write_bytes(bytes(100_000))
    os.utime(tmp_path / "model", (0, 0))

    assert trim_cache(tmp_path, 0, in_use_s=3600.0) >= 100_000
    assert not (tmp_path / "model").exists()
    assert remove_tree(tmp_path / "deep")
