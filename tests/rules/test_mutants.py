"""Each rule and each function of the queue has its mutant, and each mutant still finds the line that it breaks."""

from __future__ import annotations

import re

import pytest

from scripts.mutants import REPOSITORY, Mutant, mutants, uncovered

MUTANTS = mutants()


def test_each_rule_and_each_function_of_the_queue_has_a_mutant() -> None:
    assert uncovered(MUTANTS) == []


def test_a_function_without_a_mutant_is_named() -> None:
    assert "commit" in uncovered([mutant for mutant in MUTANTS if "commit" not in mutant.names])


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_a_mutants_line_is_there_once_and_its_tests_exist(mutant: Mutant) -> None:
    mutant.place(REPOSITORY)

    assert mutant.becomes.strip() != mutant.line.strip()
    for path in re.findall(r"tests/\S+", mutant.tests):
        assert (REPOSITORY / path).exists(), path
