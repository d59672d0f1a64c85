"""Logs through a real worker: whole, in order, ended before the job is, and never at the heartbeat's cost."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from gpulayer.logs import Piece, lines
from tests.support import PATIENCE_S, wait_until
from tests.worker.conftest import Hire
from tests.workers import Desk, WorkerProcess

TAIL_BYTES = 1 << 20
FLOOD_BYTES = 100_000_000


def offsets_meet(desk: Desk, job: str) -> bool:
    """Whether each entry of the live tail begins where the one before ended."""
    return all(top - len(data) == before for (before, _), (top, data) in pairwise(tail_entries(desk, job)))


def tail_entries(desk: Desk, job: str) -> list[tuple[int, bytes]]:
    """What the live tail holds: each piece with the offset behind it."""
    return [(top, fields[b"d"]) for top, fields in desk.log_entries(job) if b"d" in fields]


def test_the_live_tail_and_the_whole_log_are_equal_byte_for_byte(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("for i in $(seq 200); do echo out $i; echo err $i >&2; done")
    desk.final(job)
    whole = desk.whole_log(job)
    assert desk.tail(job) == whole
    assert offsets_meet(desk, job)
    assert desk.stream(job, "out") == b"".join(b"out %d\n" % i for i in range(1, 201))
    assert desk.stream(job, "err") == b"".join(b"err %d\n" % i for i in range(1, 201))


def test_many_short_jobs_lose_none_of_their_last_words(desk: Desk, worker: WorkerProcess) -> None:
    jobs = [desk.shell(f"echo last words of {n}") for n in range(100)]
    for n, job in enumerate(jobs):
        attempt = desk.final(job).attempt  # on a busy machine one may have been handed back
        assert desk.tail(job, attempt) == desk.whole_log(job) == b"last words of %d\n" % n


def test_the_end_of_the_log_is_there_before_the_final_state_is_seen(
    desk: Desk, worker: WorkerProcess
) -> None:
    jobs = [desk.shell("echo text") for _ in range(20)]
    for job in jobs:
        desk.final(job)
        last = desk.log_entries(job)[-1][1]
        assert last.get(b"end") == b"1"


def test_the_words_of_a_running_job_are_there_while_it_runs(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.shell("printf 'no newline yet'; sleep 300")
    wait_until(lambda: desk.tail(job) == b"no newline yet", PATIENCE_S, "the words are shipped")
    assert desk.record(job).state == "running"


def test_the_words_of_a_running_function_are_there_while_it_runs(desk: Desk, worker: WorkerProcess) -> None:
    def talk() -> None:
        import sys
        import time

        print("first words")
        sys.stderr.write("x" * (1 << 20))  # more than a pipe holds
        print("last words")
        time.sleep(300)  # it runs on until the test's worker ends it

    job = desk.function(talk)
    wait_until(lambda: b"last words\n" in desk.tail(job), PATIENCE_S, "the words are shipped")
    assert desk.record(job).state == "running"


def test_many_short_functions_lose_none_of_their_words(desk: Desk, worker: WorkerProcess) -> None:
    def talk(n: int) -> None:
        import sys

        print(f"out {n}")
        sys.stderr.write(f"err {n}\n")

    jobs = [desk.function(talk, n) for n in range(60)]
    for n, job in enumerate(jobs):
        attempt = desk.final(job).attempt
        assert desk.stream(job, "out") == b"out %d\n" % n
        assert desk.stream(job, "err") == b"err %d\n" % n
        assert desk.tail(job, attempt) == desk.whole_log(job)


def test_bytes_that_are_no_text_stay_as_they_are(desk: Desk, worker: WorkerProcess) -> None:
    raw = bytes(range(256)) * 4
    job = desk.python("import sys; sys.stdout.buffer.write(bytes(range(256)) * 4)")
    desk.final(job)
    assert desk.whole_log(job) == desk.tail(job) == raw


def test_redraws_line_ends_and_halves_of_characters_are_stored_as_written_and_read_as_lines(
    desk: Desk, worker: WorkerProcess, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    script = (
        "import pathlib, sys, time\n"
        "out = sys.stdout.buffer\n"
        "out.write(b' 10%\\r 20%\\r'); out.write(b'caf\\xc3'); out.flush()\n"
        f"while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)\n"
        "out.write(b'\\xa9\\r\\nsecond\\n\\x1b[2J\\0\\xfflast')\n"
    )
    raw = b" 10%\r 20%\rcaf\xc3\xa9\r\nsecond\n\x1b[2J\0\xfflast"
    job = desk.python(script)
    wait_until(lambda: desk.tail(job).endswith(b"caf\xc3"), PATIENCE_S, "half a character is shipped")
    gate.touch()
    desk.final(job)

    assert desk.tail(job) == desk.whole_log(job) == raw
    pieces = [Piece("out", data) for _, data in tail_entries(desk, job)]
    assert len(pieces) > 1
    assert list(lines(pieces)) == ["café", "second", "\x1b[2J\0\N{REPLACEMENT CHARACTER}last"]


def test_a_megabyte_without_a_newline_is_kept(desk: Desk, worker: WorkerProcess) -> None:
    job = desk.python("print('x' * 1_000_000, end='')")
    desk.final(job)
    assert desk.whole_log(job) == b"x" * 1_000_000


def test_a_flood_is_kept_whole_and_starves_neither_heartbeat_nor_memory(desk: Desk, hire: Hire) -> None:
    hire(lease_s=12, heartbeat_s=0.4)
    idle = desk.shell("sleep 300")
    desk.reaches(idle, "running")
    memory_before = used_memory(desk)
    job = desk.shell(f"yes 'a line of the flood' | head -c {FLOOD_BYTES}")
    silences, memory = [], memory_before
    while not desk.record(job).final:
        silences.append(silence_s(desk))
        memory = max(memory, used_memory(desk))
        wait_until(lambda: True, 1, "a moment")
    record = desk.record(job)
    assert (record.state, record.attempt) == ("succeeded", 1)
    whole = desk.whole_log(job)
    assert len(whole) == FLOOD_BYTES
    assert all(whole[top - len(data) : top] == data for top, data in tail_entries(desk, job))
    assert tail_entries(desk, job)[-1][0] == FLOOD_BYTES
    assert max(silences) < 10 * 0.4, "the worker beats as if nothing were"
    assert memory - memory_before < 16 * TAIL_BYTES
    assert len(desk.tail(job)) <= TAIL_BYTES + 65536
    assert desk.record(idle).state == "running"


def used_memory(desk: Desk) -> int:
    info = desk.link.call("INFO", "memory").decode()
    return int(next(line for line in info.splitlines() if line.startswith("used_memory:")).split(":")[1])


def silence_s(desk: Desk) -> float:
    """How long ago the queue heard of the worker."""
    _, seen_ms = desk.link.call("ZRANGE", f"{desk.queue.keys.root}workers", 0, 0, "WITHSCORES")
    seconds, micros = desk.link.call("TIME")
    return int(seconds) + int(micros) / 1e6 - float(seen_ms) / 1000
