"""The command line: `gpulayer …`, one file a command group.

What it guarantees: words go to stderr, results to stdout; an error is one line, `gpulayer: …`, with an exit code of its
kind and no traceback (GPULAYER_DEBUG=1 shows it), and with --json a document `{"error": {"code": …}}` too; Ctrl-C ends
any command cleanly. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from gpulayer import ctrl_c

if TYPE_CHECKING:
    from gpulayer.cli.failing import Failure


def main() -> None:
    """The console script."""
    try:
        from gpulayer.cli.streams import mend_streams

        mend_streams()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = ctrl_c.INTERRUPTED
    ctrl_c.leave_at_once(code)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; its exit code."""
    from gpulayer.cli.app import app
    from gpulayer.cli.failing import Failure, exit_code_of, failure_of
    from gpulayer.cli.output import begin
    from gpulayer.cli.streams import as_utf8

    begin()
    ctrl_c.raise_it()
    words = [as_utf8(text) for text in arguments]
    if None in words:
        odd = arguments[words.index(None)]
        line = f"argument {odd!r:.200} is not UTF-8: rename the file, or put the bytes into one"
        return _tell(Failure(line, 2, {"code": "usage", "message": line}), arguments)
    try:
        code = exit_code_of(app(words, prog_name="gpulayer", standalone_mode=False))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return ctrl_c.INTERRUPTED
    except Exception as error:
        if os.environ.get("GPULAYER_DEBUG"):
            raise
        return _tell(failure_of(error), arguments)


def _tell(failure: Failure, arguments: Sequence[str]) -> int:
    """Says it, and puts it into a document where the command was to print one and has not; the exit code."""
    from gpulayer.cli.output import print_error, say

    for line in failure.line.splitlines() if failure.is_help else (f"gpulayer: {failure.line}",):
        say(line)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if "--json" in own:
        with suppress(OSError):
            print_error(failure.document)
    return failure.exit_code
