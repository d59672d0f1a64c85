"""Ctrl-C while a worker loads: exit code 130, and nothing is said."""

from __future__ import annotations

import json
import subprocess
import sys

# Python asks its hooks before it imports anything: at one such moment the process is sent what Ctrl-C sends.
AT_AN_IMPORT = """
import json, os, runpy, sys
moment, seen = int(sys.argv.pop(1)), []
def hook(event, arguments):
    if event == "import" and (seen or arguments[0] == "gpulayer_worker.command"):
        seen.append(arguments[0])
        if len(seen) == moment:
            os.kill(os.getpid(), 2)
sys.addaudithook(hook)
try:
    runpy.run_module("gpulayer_worker", run_name="__main__", alter_sys=True)
finally:
    if not moment:
        json.dump(seen, sys.stdout)
"""
MOMENTS = 12


def run(moment: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", AT_AN_IMPORT, str(moment), "--redis", "unix:///nobody/there"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_ctrl_c_while_a_worker_loads_ends_it_without_a_word() -> None:
    whole = run(0)
    assert whole.returncode == 69, whole.stderr
    imports: list[str] = json.loads(whole.stdout)

    for moment in range(1, len(imports), max(1, len(imports) // MOMENTS)):
        ended = run(moment)
        assert (ended.returncode, ended.stderr) == (130, ""), f"at the import of {imports[moment - 1]}"
