"""With GPULAYER_NO_SKIPS=1 a skip fails the run, unless its reason is one that this machine cannot mend."""

from __future__ import annotations

import os

import pytest

ALLOWED = ("needs a GPU", "needs macOS")

_refused: list[str] = []


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test skipped, as its author wrote it."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _note(report)


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = reason_of(report)
    if not reason.startswith(ALLOWED):
        _refused.append(f"{report.nodeid}: {reason}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("GPULAYER_NO_SKIPS") == "1" and _refused and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("GPULAYER_NO_SKIPS") == "1" and _refused:
        terminalreporter.section("skips that are not allowed here (GPULAYER_NO_SKIPS=1)")
        for line in _refused:
            terminalreporter.line(line)
