"""What the documentation says of speed is what was measured: its tables are those of the newest recorded figures."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from scripts import perf_tables
from scripts.perf_tables import PAGES, TABLES, Figures, filled, load, newest, stale


@pytest.fixture(scope="module")
def figures() -> Figures:
    return load(newest())


def burst_of(figures: Figures, system: str, road: str) -> dict[str, Any]:
    found: dict[str, Any] = figures["burst"]["results"]["systems"][system]["roads"][road]
    return found


def met(figures: Figures) -> dict[str, bool]:
    return {what: holds for what, _, _, holds in perf_tables._targets(figures)}


def test_the_tables_are_those_of_the_newest_run(figures: Figures) -> None:
    assert not stale(figures), "run scripts/make_perf_charts.py"


def test_every_table_stands_in_a_page() -> None:
    texts = "".join(page.read_text() for page in PAGES)

    assert [name for name in TABLES if f"<!-- {name}:begin -->" not in texts] == []


def test_writing_the_tables_twice_changes_nothing(figures: Figures) -> None:
    once = [filled(page.read_text(), figures) for page in PAGES]

    assert [filled(text, figures) for text in once] == once


def test_a_missed_target_is_told(figures: Figures) -> None:
    slow = copy.deepcopy(figures)
    burst_of(slow, "gpulayer", "warm map")["per_s"] = [9_000.0]

    assert "| one item of a warm `.map` | ≤ 0.1 ms | 0.111 ms | **no** |" in perf_tables.targets(slow)


def test_a_peer_is_compared_by_its_fastest_road(figures: Figures) -> None:
    fast = copy.deepcopy(figures)
    burst_of(fast, "gpulayer", "warm map")["per_s"] = [10_000.0]
    burst_of(fast, "dramatiq", "send")["per_s"] = [1_000.0]
    burst_of(fast, "dramatiq", "group")["per_s"] = [2_500.0]

    assert not met(fast)["warm `.map` to Dramatiq's fastest road"]


def test_a_run_that_measured_a_long_queue_is_held_to_its_targets(figures: Figures) -> None:
    slow = copy.deepcopy(figures)
    rows = slow["submit_queue"]["results"]["rows"]
    longest = max(rows, key=lambda row: row["queued"])
    longest |= {"claim_p99_ms": 21.0, "restart": {"claims_s": 12.0}}

    told = met(slow)
    assert told[f"a claim at {longest['queued']:,} queued, p99"] is False
    assert told[f"a killed server with {longest['queued']:,} queued serves again"] is True
    for name in ("claim_p99_ms", "restart"):
        del longest[name]
    assert not [what for what in met(slow) if "p99" in what or "serves again" in what]


def test_a_busy_machine_is_told(figures: Figures) -> None:
    busy, quiet = copy.deepcopy(figures), copy.deepcopy(figures)
    busy["burst"]["machine"]["load"], quiet["burst"]["machine"]["load"] = 5.0, 0.1

    assert "provisional" in perf_tables.machine(busy)
    assert "provisional" not in perf_tables.machine(quiet)
