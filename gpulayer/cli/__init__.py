"""The command line: `gpulayer …`, one file a command group.

What it guarantees: words go to stderr, results to stdout; an error is one line, `gpulayer: …`, with an exit code of its
kind and no traceback (GPULAYER_DEBUG=1 shows it); Ctrl-C ends any command cleanly. Nothing heavy is imported before a
command needs it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main() -> None:
    """The console script."""
    try:
        from gpulayer.cli.streams import mend_streams

        mend_streams()
        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; its exit code."""
    from gpulayer.cli.app import app
    from gpulayer.cli.failing import exit_code_of, is_usage_error, usage_line
    from gpulayer.cli.output import plain, say, shortened
    from gpulayer.cli.streams import as_utf8, fault_of
    from gpulayer_broker.errors import GpulayerError

    debug = bool(os.environ.get("GPULAYER_DEBUG"))
    words = [as_utf8(text) for text in arguments]
    if None in words:
        odd = arguments[words.index(None)]
        say(f"gpulayer: argument {odd!r:.200} is not UTF-8: rename the file, or put the bytes into one")
        return 2
    try:
        code = exit_code_of(app(words, prog_name="gpulayer", standalone_mode=False))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except GpulayerError as error:
        if debug:
            raise
        say(f"gpulayer: {shortened(plain(str(error)))}")
        return error.exit_code
    except Exception as error:
        if debug:
            raise
        if is_usage_error(error):
            say(usage_line(error))
            return 2
        if isinstance(error, OSError) and (fault := fault_of(error)):
            say(f"gpulayer: {fault}")
            return 1
        say(
            f"gpulayer: {type(error).__name__}: {' '.join(str(error).split())} (GPULAYER_DEBUG=1 shows where)"
        )
        return 1
