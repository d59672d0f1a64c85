"""Whatever bytes stand in the queue, they move nothing on a terminal: what commands tell is plain text."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from gpulayer_broker.connection import Link
from gpulayer_broker.job import RECORD_FIELDS, STATES
from gpulayer_broker.keys import Keys
from tests.cli.conftest import Cli
from tests.support import PATIENCE_S

# A title for the window, a cursor that moves, the second half's control characters, text turned around, and no UTF-8.
HOSTILE = b"\x1b]0;owned\x07\x1b[2J\xc2\x9b5A\xe2\x80\xae\x9b\xff\r\nnext"
TEXT = HOSTILE.decode("utf-8", "replace")
# What is read from elsewhere (the whole log), or decides that nothing else is.
PLAIN_FIELDS = {"logs", "spec", "count"}
INFO = {
    "name": TEXT,
    "host": TEXT,
    "pid": 1,
    "labels": {TEXT: TEXT},
    "python": {"executable": TEXT, "version": TEXT},
    "frameworks": {TEXT: TEXT},
    "devices": [{"uuid": TEXT, "kind": TEXT, "name": TEXT, "usable": True, "foreign": TEXT}],
}
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def job(cli: Cli, address: str, link: Link, keys: Keys) -> Iterator[str]:
    """A job whose record somebody has filled, as its worker's and the lists of jobs."""
    job_id = cli("submit", "--detach", "--", "true").out.strip()
    key = keys.job(job_id)
    before = link.call("HGETALL", key)
    errors = json.dumps({"type": TEXT, "message": TEXT, "traceback": TEXT, "tail": TEXT}).encode()
    told = {"error": errors, "notes": json.dumps([TEXT]).encode(), "progress": json.dumps({TEXT: 1}).encode()}
    for field in set(RECORD_FIELDS) - PLAIN_FIELDS:
        link.call("HSET", key, field, told.get(field, HOSTILE))
    link.call("HSET", key, "worker", "w_1")
    link.call("ZADD", keys.named("workers"), 1e15, "w_1", 1e15, HOSTILE)
    link.call("HSET", keys.worker("w_1"), "info", json.dumps(INFO), "state", "online", "node", HOSTILE)
    link.call("HSET", keys.worker("w_1"), "class", HOSTILE, "slots", 2, "cpus", 2)
    for state in STATES:
        link.call("ZADD", keys.jobs(state), 1, HOSTILE)
    yield job_id
    for state in STATES:
        link.call("ZREM", keys.jobs(state), HOSTILE)
    link.call("DEL", key, keys.named("workers"), keys.worker("w_1"), keys.inbox("w_1"))
    link.call("HSET", key, *before)


def unsafe(text: str) -> set[str]:
    """The signs that a terminal would do something at."""
    return {sign for sign in text if not (sign.isprintable() or sign in "\n\t")}


COMMANDS = [
    ("jobs", ()),
    ("show", ("JOB",)),
    ("explain", ("JOB",)),
    ("wait", ("JOB", "--timeout", "0")),
    ("cancel", ("JOB",)),
    ("interrupt", ("JOB",)),
    ("retry", ("JOB",)),
    ("outputs", ("JOB",)),
    ("workers", ()),
    ("worker", ("status",)),
    ("worker", ("drain", TEXT.replace("\n", " "))),
    ("status", ()),
    ("gc", ()),
    ("submit", ("--explain", "--", "true")),
    ("show", (TEXT,)),
]


@pytest.mark.parametrize(
    "state", ["queued", "running", "failed", TEXT], ids=["queued", "running", "failed", "odd"]
)
@pytest.mark.parametrize(("command", "rest"), COMMANDS)
def test_no_command_hands_hostile_words_on_to_a_terminal(
    cli: Cli, job: str, link: Link, keys: Keys, command: str, rest: tuple[str, ...], state: str
) -> None:
    link.call("HSET", keys.job(job), "state", HOSTILE if state == TEXT else state)
    told = cli(command, *(job if word == "JOB" else word for word in rest))

    assert unsafe(told.out) == set()
    assert unsafe(told.err) == set()
    assert "GPULAYER_DEBUG" not in told.err


def test_a_document_on_a_terminal_names_what_is_no_sign_by_its_number(job: str, cli: Cli) -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-c", "from gpulayer.cli import main; main()", "show", job, "--json"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal)
    os.close(terminal)
    with open(master, "rb", buffering=0) as screen:
        shown = b"".join(_until_closed(screen.fileno())).decode().replace("\r\n", "\n")
    assert process.wait(PATIENCE_S) == 0

    assert unsafe(shown) == set()
    assert json.loads(shown) == json.loads(cli("show", job, "--json").out)
    assert "\\u009b" in shown


def _until_closed(descriptor: int) -> Iterator[bytes]:
    try:
        while data := os.read(descriptor, 65536):
            yield data
    except OSError:  # how Linux tells that nobody has the other end
        return
