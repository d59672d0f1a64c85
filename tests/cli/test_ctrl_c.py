"""Ctrl-C at any moment of a command, from its first import on: exit code 130, and nothing is said."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Python asks its hooks before it imports anything: at one such moment the process is sent what Ctrl-C sends. Where it
# is to leave at once that happens in a callback, as Python's own importing has them: what is raised there is lost.
AT_AN_IMPORT = """
import json, os, sys, weakref
class Thing: pass
moment, seen = int(sys.argv.pop(1)), []
def interrupt(_):
    os.kill(os.getpid(), 2)
def hook(event, arguments):
    if event == "import" and "gpulayer.__main__" in sys.modules:
        parts = sys.modules.get("gpulayer.cli") and sys.modules["gpulayer.ctrl_c"]
        leaves = bool(parts) and parts._leaving != [None]
        seen.append([arguments[0], leaves])
        if len(seen) == moment:
            if not leaves:
                interrupt(None)
            thing = Thing()
            reference = weakref.ref(thing, interrupt)
            del thing
sys.addaudithook(hook)
try:
    from gpulayer.__main__ import main
    main()
finally:
    if not moment:
        json.dump(seen, sys.stderr)
"""
MOMENTS = 16


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.usefixtures("address")
def test_ctrl_c_at_any_import_of_a_command_ends_it_without_a_word() -> None:
    whole = run(AT_AN_IMPORT, "0", "jobs")
    assert whole.returncode == 0, whole.stderr
    moments: list[tuple[str, bool]] = json.loads(whole.stderr)
    assert sum(leaves for _, leaves in moments) > len(moments) / 3

    for moment in range(1, len(moments), max(1, len(moments) // MOMENTS)):
        ended = run(AT_AN_IMPORT, str(moment), "jobs")
        assert (ended.returncode, ended.stderr) == (130, ""), f"at the import of {moments[moment - 1]}"


def test_a_signal_that_a_shell_ignores_stays_ignored() -> None:
    ended = run("import signal; signal.signal(2, signal.SIG_IGN)\n" + AT_AN_IMPORT, "20", "--version")

    assert ended.returncode == 0
    assert ended.stdout.startswith("gpulayer ")
