"""What a pipe gets from `gpulayer submit`: all that the job wrote to its stdout, and nothing else."""

from __future__ import annotations

import hashlib
import sys

import pytest

from tests.cli.conftest import Cli

# Far more than the live tail holds, and faster than it is shipped.
FLOOD = "import sys; sys.stdout.write(''.join('%07d\\n' % number for number in range(1_500_000)))"


@pytest.mark.usefixtures("worker")
def test_a_pipe_gets_every_byte_of_a_job_that_writes_faster_than_it_can_be_followed(cli: Cli) -> None:
    outcome = cli("submit", "--no-ship", "--", sys.executable, "-c", FLOOD)

    assert outcome.code == 0, outcome.err
    assert len(outcome.out) == 8 * 1_500_000
    wanted = "".join(f"{number:07d}\n" for number in range(1_500_000))
    assert hashlib.sha256(outcome.out.encode()).digest() == hashlib.sha256(wanted.encode()).digest()
