"""What was validated on which hardware is told in one file, and each claim names its evidence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpulayer.support import KINDS, WORDS, Support, load_support, support_table, validation
from gpulayer_broker.requirements import GPU_KINDS

REPOSITORY = Path(__file__).resolve().parents[2]
CLAIMS = [entry for entry in load_support() if entry.word in ("hardware-validated", "simulated")]
PATHS = sorted(
    {
        path
        for entry in load_support()
        for path in re.findall(r"\b(?:tests|benchmarks|docs|examples)/[^\s,;]+", entry.evidence)
    }
)


def test_every_accelerator_has_a_word_for_each_kind_of_job() -> None:
    assert {(entry.accelerator, entry.kind) for entry in load_support()} == {
        (accelerator, kind) for accelerator in ("cpu", *GPU_KINDS) for kind in KINDS
    }


def test_every_word_is_one_of_four() -> None:
    assert {entry.word for entry in load_support()} <= set(WORDS)


@pytest.mark.parametrize("entry", CLAIMS, ids=lambda entry: f"{entry.accelerator}-{entry.kind}")
def test_a_claimed_run_names_its_machine_its_day_and_evidence_in_this_repository(entry: Support) -> None:
    assert entry.machine
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry.date)
    assert any(path in entry.evidence for path in PATHS)


@pytest.mark.parametrize("path", PATHS)
def test_evidence_is_there(path: str) -> None:
    assert (REPOSITORY / path).exists()


def test_an_accelerator_that_nobody_wrote_down_was_never_run() -> None:
    assert validation("tpu") == {"independent": "not-run", "distributed": "not-run"}


def test_the_table_for_documents_has_a_row_for_each_entry() -> None:
    rows = support_table().splitlines()

    assert len(rows) == 2 + len(load_support())
    assert "| mps | distributed | unsupported |" in support_table()
