"""A job whose folder was described by somebody hostile: it fails in one line, and nothing is written outside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import hostile_trees
from tests.workers import Desk, Hire


@pytest.mark.parametrize("field", ["source", "inputs"])
def test_a_hostile_tree_fails_its_job_in_one_line_and_the_worker_goes_on(
    desk: Desk, hire: Hire, field: str, tmp_path: Path, isolated_environment: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    worker = hire()
    desk.store.put_bytes(hostile_trees.CONTENT)
    manifests = {
        name: hostile_trees.encoded(entries) for name, entries in hostile_trees.trees(outside).items()
    }
    manifests["a million entries"] = hostile_trees.million()
    jobs = {
        name: desk.submit(desk.command_spec("true", **{field: desk.store.put_bytes(data)}))
        for name, data in manifests.items()
    }

    for name, job in jobs.items():
        record = desk.final(job)
        assert (record.state, record.end_reason) == ("failed", "cannot_start"), name
        told = desk.error(job)["message"]
        assert "\n" not in told, name
        assert 10 < len(told) < 300, name
    assert hostile_trees.escaped(tmp_path, isolated_environment) == []
    assert desk.final(desk.command("true")).state == "succeeded"
    assert worker.alive
