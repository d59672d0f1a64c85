"""Files that go along with a job and files that come back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpulayer.client import Client
from gpulayer.shipping import files_named, parsed_inputs
from gpulayer_broker import spec as specs
from gpulayer_broker.errors import BadSource, SourceTooLarge, StoreError, UsageError
from gpulayer_broker.store.bundle import make_bundle
from gpulayer_broker.store.unpack import load_manifest
from tests import hostile_trees
from tests.sdk.benches import Bench


def paths(client: Client, digest: str) -> list[str]:
    return [entry.path for entry in load_manifest(digest, client._session.store).entries]


def test_a_source_folder_and_inputs_travel_with_the_job(client: Client, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text("print(1)")
    (tmp_path / "data.csv").write_text("1,2")
    job = client.submit(
        ["python", "train.py"],
        source=tmp_path / "src",
        inputs={"in/data.csv": tmp_path / "data.csv"},
        outputs=["*.pt"],
    )

    spec = specs.decode(job.record.spec)
    assert paths(client, spec.source) == ["train.py"]
    assert paths(client, spec.inputs) == ["in/data.csv"]
    assert spec.outputs == ("*.pt",)
    assert spec.needs_preparation


def test_a_source_that_is_missing_or_too_large_is_refused(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadSource, match="nothing-here"):
        client.submit(["true"], source=tmp_path / "nothing-here")
    (tmp_path / "big").write_bytes(b"x" * 2000)
    settings = client._session.settings.changed(source_bytes=1000)
    monkeypatch.setattr(client._session, "settings", settings)
    with pytest.raises(SourceTooLarge, match="big"):
        client.submit(["true"], source=tmp_path)


@pytest.mark.parametrize("pattern", ["/etc/*", "../*", " ", "a\0b"])
def test_an_output_pattern_that_leaves_the_folder_is_refused(client: Client, pattern: str) -> None:
    with pytest.raises(UsageError, match="output"):
        client.submit(["true"], outputs=[pattern])


def test_arguments_that_are_files_here_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("train.py", "sub/data.csv"):
        (tmp_path / name).write_text("x")
    argv = ["python", "train.py", "sub/data.csv", "sub", "--lr=1", "/etc/passwd", "../x", "x" * 5000, ""]

    assert files_named(argv, tmp_path) == {
        "train.py": tmp_path / "train.py",
        "sub/data.csv": tmp_path / "sub/data.csv",
    }


@pytest.mark.parametrize(
    "files",
    [{"source": "a\0b"}, {"inputs": {"data.csv": "a\0b"}}, {"inputs": {"a\0b": __file__}}],
    ids=["source", "input", "place"],
)
def test_a_path_with_a_nul_byte_is_refused_in_one_line(client: Client, files: dict[str, Any]) -> None:
    with pytest.raises(BadSource, match=r"path 'a\\x00b' holds a NUL byte, which no path can"):
        client.submit(["true"], **files)


def test_a_path_that_has_no_bytes_is_refused_in_one_line(client: Client) -> None:
    with pytest.raises(BadSource, match=r"path '\\ud800' holds half a character"):
        client.submit(["true"], source="\ud800")


def test_inputs_without_places_are_refused_in_one_line(client: Client) -> None:
    with pytest.raises(
        UsageError, match="inputs: write a mapping of paths in the job's folder to files here"
    ):
        client.submit(["true"], inputs=["data.csv"])  # type: ignore[call-overload]


def test_one_pattern_of_outputs_need_not_be_a_list(client: Client) -> None:
    job = client.submit(["true"], outputs="*.pt")

    assert specs.decode(job.record.spec).outputs == ("*.pt",)


def test_inputs_are_written_as_source_and_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("x")

    assert parsed_inputs(["a.csv"]) == {"a.csv": Path("a.csv")}
    assert parsed_inputs(["a.csv:in/b.csv"]) == {"in/b.csv": Path("a.csv")}
    for text, problem in [
        ("no.csv", "does not exist"),
        ("a.csv:/etc/x", "relative"),
        ("a.csv:../x", "relative"),
        ("a.csv:", "SRC:DEST"),
    ]:
        with pytest.raises(UsageError, match=problem):
            parsed_inputs([text])
    with pytest.raises(UsageError, match="taken"):
        parsed_inputs(["a.csv", "a.csv"])


def returned(client: Client, bench: Bench, folder: Path) -> str:
    """A finished job that returned the files of a folder."""
    job = client.submit(["true"])
    bundle = make_bundle(folder, client._session.store)
    bench.end(job.id, fields={"outputs": bundle.digest})
    return job.id


def test_outputs_come_into_a_folder_of_the_job_s_name(
    client: Client, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    (made / "outputs").mkdir(parents=True)
    (made / "outputs" / "model.pt").write_bytes(b"weights")
    (made / "run.sh").write_text("#!/bin/sh\n")
    (made / "run.sh").chmod(0o755)
    job_id = returned(client, bench, made)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    folder = client.outputs(job_id)
    assert folder == Path("gpulayer_runs", job_id)
    assert (folder / "outputs" / "model.pt").read_bytes() == b"weights"
    assert os.access(folder / "run.sh", os.X_OK)
    assert [path.name for path in Path("gpulayer_runs").iterdir()] == [job_id]


def test_outputs_replace_files_and_leave_others(client: Client, bench: Bench, tmp_path: Path) -> None:
    made, here = tmp_path / "made", tmp_path / "here"
    (made / "sub").mkdir(parents=True)
    (made / "sub" / "a").write_text("new")
    (here / "sub").mkdir(parents=True)
    (here / "sub" / "a").write_text("old")
    (here / "sub" / "b").write_text("mine")

    client.outputs(returned(client, bench, made), here)
    assert (here / "sub" / "a").read_text() == "new"
    assert (here / "sub" / "b").read_text() == "mine"


def test_outputs_are_not_written_through_a_link_that_lies_there(
    client: Client, bench: Bench, tmp_path: Path
) -> None:
    made, here, outside = tmp_path / "made", tmp_path / "here", tmp_path / "outside"
    for folder in (made / "sub", here, outside):
        folder.mkdir(parents=True)
    (made / "sub" / "a").write_text("new")
    (here / "sub").symlink_to(outside)

    client.outputs(returned(client, bench, made), here)
    assert list(outside.iterdir()) == []
    assert (here / "sub" / "a").read_text() == "new"


def test_a_folder_in_the_place_of_a_file_is_left_and_told(
    client: Client, bench: Bench, tmp_path: Path
) -> None:
    made, here = tmp_path / "made", tmp_path / "here"
    made.mkdir()
    (made / "a").write_text("new")
    (here / "a").mkdir(parents=True)

    with pytest.raises(StoreError, match="is a folder here"):
        client.outputs(returned(client, bench, made), here)


def test_a_job_that_returned_nothing_makes_no_folder(client: Client, bench: Bench, tmp_path: Path) -> None:
    job = client.submit(["true"])
    with pytest.raises(UsageError, match="when it has ended"):
        job.outputs(tmp_path / "here")
    bench.end(job.id)

    job.outputs(tmp_path / "here")
    assert not (tmp_path / "here").exists()


def test_outputs_that_a_hostile_worker_describes_are_refused_in_one_line(
    client: Client, bench: Bench, tmp_path: Path
) -> None:
    outside, here = tmp_path / "outside", tmp_path / "here"
    outside.mkdir()
    client._session.store.put_bytes(hostile_trees.CONTENT)
    for name, entries in hostile_trees.trees(outside).items():
        digest = client._session.store.put_bytes(hostile_trees.encoded(entries))
        job = client.submit(["true"])
        bench.end(job.id, fields={"outputs": digest})

        with pytest.raises(StoreError) as refused:
            client.outputs(job.id, here)

        assert "\n" not in str(refused.value), name
        assert len(str(refused.value)) < 300, name
    assert hostile_trees.escaped(tmp_path) == []
