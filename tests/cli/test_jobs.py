"""The commands that look at jobs, wait for them and end them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpulayer.cli.terminal import SafeBytes
from gpulayer_broker import functions as fn
from gpulayer_broker.connection import Link
from tests.cli.conftest import Cli
from tests.queueing import Hand, signature
from tests.rules.costs import commands_during, fill
from tests.sdk.benches import Bench
from tests.support import in_background


def submitted(cli: Cli, *options: str) -> str:
    return cli("submit", "-d", "--no-ship", *options, "--", "work", "hard").out.strip()


def test_jobs_are_plain_lines_in_a_pipe(cli: Cli, bench: Bench) -> None:
    done, waiting = submitted(cli, "--name", "one"), submitted(cli, "--name", "two")
    bench.end(done, "failed", reason="user_error", fields={"error": '{"exit_code": 3}'})

    rows = [line.split("\t") for line in cli("jobs").out.splitlines()]
    assert [row[:4] for row in rows] == [
        [waiting, "queued (next)", "two", "-"],
        [done, "failed (user_error)", "one", "alpha"],
    ]
    assert [row["id"] for row in json.loads(cli("jobs", "--json", "--state", "failed").out)] == [done]
    assert len(cli("jobs", "-n", "1").out.splitlines()) == 1


def test_show_prints_worker_attempt_wait_and_run_time(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    usage = json.dumps({"wall_s": 1.5, "cpu_s": 1.2, "max_rss_bytes": 1 << 20})
    notes = json.dumps(["new.txt was not returned: --output new.txt"])
    bench.end(job_id, fields={"usage": usage, "notes": notes})

    facts = {line[:12].strip(): line[12:] for line in cli("show", job_id).out.splitlines()}
    assert facts["job"] == job_id
    assert facts["state"] == "succeeded"
    assert facts["worker"] == "alpha"
    assert facts["attempt"] == "1"
    assert facts["queue wait"].endswith(" s")
    assert facts["run time"].endswith(" s")
    assert facts["command"] == "work hard"
    assert facts["usage"] == "wall 1.50 s, cpu 1.20 s, memory 1.0 MB"
    assert facts["note"] == "new.txt was not returned: --output new.txt"


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ({"peak_memory_bytes": 3 << 30, "mean_utilisation": 87.5}, "3.0 GB at most, 87.5 % busy"),
        ({"mean_utilisation": 0.0}, "0 % busy"),
        ({}, "not told by its driver"),
    ],
)
def test_show_prints_what_was_used_of_each_gpu(
    cli: Cli, bench: Bench, device: dict[str, float], text: str
) -> None:
    job_id = submitted(cli)
    devices = [{"uuid": "GPU-5a1c", **device}]
    usage = {"wall_s": 2, "max_rss_bytes": 1 << 20, "peak_memory_bytes": 1 << 30, "devices": devices}
    bench.end(job_id, fields={"usage": json.dumps(usage)})

    shown = cli("show", job_id).out.splitlines()
    assert "usage       wall 2.00 s, memory 1.0 GB" in shown
    assert f"gpu         GPU-5a1c: {text}" in shown


def test_show_of_what_failed_tells_how_to_read_its_last_words(cli: Cli, bench: Bench) -> None:
    failed, never = submitted(cli), submitted(cli)
    bench.end(failed, "failed", reason="user_error", fields={"error": '{"exit_code": 3}'})
    cli("cancel", never)

    assert f"log         gpulayer logs --tail 20 {failed}" in cli("show", failed).out.splitlines()
    assert "gpulayer logs" not in cli("show", never).out


def killed(bench: Bench, job_id: str, tail: str) -> None:
    error = {"type": "Signalled", "message": "the command ended by signal 9", "signal": 9, "tail": tail}
    bench.end(job_id, "failed", reason="signal", fields={"error": json.dumps(error)})


def test_show_has_the_last_lines_of_what_was_killed(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    killed(bench, job_id, "loading\npart 17 \x1b[2J\x1b]0;title\x07")

    shown = cli("show", job_id).out.splitlines()
    hint = shown.index(f"log         gpulayer logs --tail 20 {job_id}")
    assert shown[hint + 1 : hint + 3] == [f"{'':12}loading", f"{'':12}part 17"]
    assert json.loads(cli("show", job_id, "--json").out)["error"]["tail"].startswith("loading\npart 17")


def test_who_waits_is_told_why_it_failed_and_what_was_said_last(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    killed(bench, job_id, "loading\npart 17")

    result = cli("wait", job_id)
    assert result.out == f"{job_id}\tfailed\n"
    assert (
        f"gpulayer: job {job_id} failed: the command ended by signal 9\n    loading\n    part 17\n"
        in result.err
    )
    document = json.loads(cli("wait", job_id, "--json").out)
    assert document["error"]["tail"] == "loading\npart 17"


def test_of_many_that_failed_the_first_are_told_at_length(cli: Cli, bench: Bench) -> None:
    jobs = [submitted(cli) for _ in range(12)]
    for job_id in jobs:
        killed(bench, job_id, "loading")

    told = cli("wait", *jobs).err.splitlines()
    assert [line for line in told if line.startswith("gpulayer: job")] == [
        f"gpulayer: job {job_id} failed: the command ended by signal 9" for job_id in jobs[:10]
    ]
    assert told.count("    loading") == 3


def test_show_as_json_carries_the_end_reason_and_the_error(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    bench.end(job_id, "failed", reason="oom", fields={"error": '{"message": "out of memory", "signal": 9}'})

    document = json.loads(cli("show", job_id, "--json").out)
    assert document["end_reason"] == "oom"
    assert document["exit_code"] == 137
    assert document["error"]["message"] == "out of memory"


def test_what_a_function_raised_is_shown_with_its_type(cli: Cli, bench: Bench, here: Path) -> None:
    (here / "raises_job.py").write_text("def job(): ...")
    job_id = cli("run", "raises_job:job", "--detach").out.strip()
    bench.fail(job_id, KeyError("lr"))

    assert "error       KeyError: 'lr'" in cli("show", job_id).out


def test_show_never_prints_what_would_move_the_cursor(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    error = json.dumps({"message": "evil \x1b]0;title\x07\x1b[2J"})
    bench.end(job_id, "failed", reason="user_error", fields={"error": error})

    assert "\x1b" not in cli("show", job_id).out


@pytest.mark.parametrize(
    ("verdict", "reason", "error", "code"),
    [
        ("succeeded", "", {}, 0),
        ("failed", "user_error", {"exit_code": 3}, 3),
        ("failed", "signal", {"signal": 9}, 137),
        ("failed", "worker_lost", {}, 75),
        ("timed_out", "timeout", {}, 124),
        ("cancelled", "cancelled", {}, 130),
    ],
)
def test_wait_ends_with_the_job_s_own_code(
    cli: Cli, bench: Bench, verdict: str, reason: str, error: dict[str, int], code: int
) -> None:
    job_id = submitted(cli)
    fields = {"error": json.dumps(error)}
    with in_background(lambda: bench.end(job_id, verdict, reason=reason, fields=fields)):
        outcome = cli("wait", job_id)

    assert outcome.code == code
    assert outcome.out == f"{job_id}\t{verdict}\n"


def test_waiting_for_several_is_1_if_any_failed(cli: Cli, bench: Bench) -> None:
    good, bad = submitted(cli), submitted(cli)
    bench.end(good)
    bench.end(bad, "failed", reason="user_error", fields={"error": '{"exit_code": 3}'})

    assert cli("wait", good, bad).code == 1
    assert [row["exit_code"] for row in json.loads(cli("wait", good, bad, "--json").out)] == [0, 3]


def test_a_wait_that_is_too_short_ends_with_124(cli: Cli, bench: Bench) -> None:
    outcome = cli("wait", submitted(cli), "--timeout", "100ms")

    assert outcome.code == 124
    assert "has not ended within 0.1 s; it goes on" in outcome.err


def test_cancel_says_what_came_of_it(cli: Cli, bench: Bench) -> None:
    waiting, running, done = submitted(cli), submitted(cli), submitted(cli)
    cancelled = cli("cancel", waiting)
    bench.take(running)
    bench.end(done)

    assert f"job {waiting}: cancelled" in cancelled.err
    assert f"job {running}: its end is asked for" in cli("cancel", running).err
    assert f"job {done}: it has ended already (succeeded)" in cli("cancel", done).err


def test_logs_keep_the_streams_apart(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    grant = bench.take(job_id)
    bench.hand.run(fn.log(job_id, grant.token, 0, "out", 0, b"one\n"))
    bench.hand.run(fn.log(job_id, grant.token, 0, "err", 4, b"two\n"))

    outcome = cli("logs", job_id)
    assert (outcome.out, outcome.err) == ("one\n", "two\n")
    bench.end(job_id)
    assert cli("logs", "-f", job_id).out == "one\n"


def test_logs_shows_as_many_last_lines_as_asked_for(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    grant = bench.take(job_id)
    bench.hand.run(fn.log(job_id, grant.token, 0, "out", 0, b"one\ntwo\n"))
    bench.hand.run(fn.log(job_id, grant.token, 0, "err", 8, b"three\n"))
    bench.end(job_id)

    outcome = cli("logs", "--tail", "2", job_id)
    assert (outcome.out, outcome.err) == ("two\n", "three\n")
    assert json.loads(cli("logs", "-n", "1", "--json", job_id).out) == {"stream": "err", "text": "three"}
    assert cli("logs", "-f", "-n", "0", job_id).out == ""


def test_logs_since_a_span_or_a_moment(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)
    grant = bench.take(job_id)
    bench.hand.run(fn.log(job_id, grant.token, 0, "out", 0, b"one\n"))

    assert cli("logs", "--since", "10m", job_id).out == "one\n"
    assert cli("logs", "--since", "2001-01-31T08:00", "-n", "1", job_id).out == "one\n"
    assert cli("logs", "--since", "2199-01-31T08:00Z", job_id).out == ""
    refused = cli("logs", "--since", "yesterday", job_id)
    assert refused.code == 2
    assert "--since yesterday: write a span such as 10m" in refused.err


def test_logs_of_a_rank_that_a_job_has_not_are_told(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli)

    assert "has no rank 3: it has 1, counted from 0" in cli("logs", "--rank", "3", job_id).err


def test_explain_gives_each_worker_s_answer_and_the_summary(cli: Cli, bench: Bench) -> None:
    job_id = submitted(cli, "--framework", "jax>=0.4")

    outcome = cli("explain", job_id)
    worker, fits, reasons, provides = outcome.out.strip().split("\t")
    assert (worker, fits, reasons) == ("alpha", "never", "framework 'jax' not installed")
    assert "numpy 2.4.6" in provides
    assert "no known worker can ever run this" in outcome.err
    assert json.loads(cli("explain", job_id, "--json").out)["fits"] == "never"


def test_workers_and_status_say_what_is_there(cli: Cli, bench: Bench) -> None:
    bench.take(submitted(cli))

    row = cli("workers").out.strip().split("\t")
    assert row[:3] == ["alpha", "online", "63/64"]
    assert json.loads(cli("workers", "--json").out)[0]["frameworks"] == {"numpy": "2.4.6"}
    status = json.loads(cli("status", "--json").out)
    assert status["workers"] == {"alpha": "online"}
    assert status["jobs"] == {"queued": 0, "scheduled": 0, "running": 1}
    assert "1 running" in cli("status").out


def test_profiles_are_listed(cli: Cli) -> None:
    assert "pytorch-cuda\tcuda\ttorch, torch.cuda" in cli("profiles").out


def test_help_and_version_need_no_queue(cli: Cli) -> None:
    helped = cli("--help")
    assert helped.code == 0
    for command in ("submit", "jobs", "show", "logs", "wait", "cancel", "explain", "status", "down"):
        assert f"  {command} " in helped.out
        assert "Example: gpulayer" in cli(command, "--help").out
    assert cli("--version").out.startswith("gpulayer 0.")


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([b"plain\r 10%\r\n\t\x08"], b"plain\r 10%\r\n\t\x08"),
        ([b"\x1b[31mred\x1b[0m\x1b[K"], b"\x1b[31mred\x1b[0m\x1b[K"),
        ([b"\x1b]0;title\x07x"], b"x"),
        ([b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\"], b"link"),
        ([b"\x1b[2J\x1b[5;5H\x1b[6nx"], b"x"),
        ([b"a\x1b", b"[31", b"mred"], b"a\x1b[31mred"),
        ([b"a\x1b]0;ti", b"tle\x07b"], b"ab"),
        ([b"\x00\x07\x1bcx\x7f"], b"x"),
        (["é\N{SNOWMAN}".encode()], "é\N{SNOWMAN}".encode()),
        (["\x9b6n\x9d0;title\x9cx".encode()], b"6n0;titlex"),
        ([b"a\xc2", b"\x9b2Jb", b"\xc2", b"\xa3\xc2\xa3"], "a2Jb££".encode()),
        ([b"\xff\xfe\x80"], b"\xff\xfe\x80"),
    ],
)
def test_a_terminal_gets_only_what_is_safe(pieces: list[bytes], shown: bytes) -> None:
    safe = SafeBytes()

    assert b"".join(map(safe.feed, pieces)) == shown


@pytest.mark.parametrize(
    "command", [["jobs", "--limit", "20"], ["jobs", "--limit", "20", "--json"], ["status"]]
)
def test_what_is_listed_costs_no_more_however_many_jobs_there_are(
    cli: Cli, address: str, link: Link, root: str, command: list[str]
) -> None:
    """Of a long queue the 5,000 oldest jobs are looked at, for the positions of those that are shown."""
    hand, sig = Hand(link, root), signature()
    hand.introduce(sig, {})
    hand.run(fn.drain(hand.machine("first", {sig: ()}).id, "offline"))

    def listed() -> None:
        assert cli(*command).code == 0

    fill(hand, sig, queued=5100, finished=60)
    few = commands_during(link, listed)
    fill(hand, sig, queued=4000, finished=1000)

    assert commands_during(link, listed) == few
