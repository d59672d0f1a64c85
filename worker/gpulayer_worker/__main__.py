"""`python -m gpulayer_worker`: one worker in the foreground, as the supervisor and the command line start it.

Ctrl-C before it listens to that itself, while it loads too, ends it without a word.
"""

import sys

try:
    from gpulayer_worker.command import main

    code = main()
except KeyboardInterrupt:
    code = 130
sys.exit(code)
