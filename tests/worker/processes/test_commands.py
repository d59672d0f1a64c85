"""Commands: how they start, what they see, how their end is told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from gpulayer_worker.processes.fork_server import ForkServer
from tests.support import PATIENCE_S

from .bench import Bench, error


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_commands_exit_code_is_told(bench: Bench) -> None:
    ending = bench.shell("exit 3").wait(PATIENCE_S)

    assert ending.exit is not None
    assert (ending.exit.code, ending.exit.signal) == (3, None)


def test_a_commands_death_by_signal_is_told(bench: Bench) -> None:
    ending = bench.shell("kill -SEGV $$").wait(PATIENCE_S)

    assert ending.exit is not None
    assert (ending.exit.code, ending.exit.signal) == (None, signal.SIGSEGV)


def test_output_and_errors_go_to_the_given_descriptors(bench: Bench) -> None:
    handle = bench.shell("echo words; echo complaints >&2")

    handle.wait(PATIENCE_S)

    assert (bench.out(handle), bench.err(handle)) == ("words\n", "complaints\n")


def test_what_a_command_used_is_told(bench: Bench) -> None:
    code = "x = bytearray(60_000_000); sum(range(3_000_000))"
    ending = bench.command(sys.executable, "-c", code).wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.usage.user_s > 0
    assert ending.exit.usage.max_rss_bytes > 60_000_000


def test_an_unknown_command_ends_with_127_and_one_line(bench: Bench) -> None:
    handle = bench.command("no-such-program", "--now")
    ending = handle.wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.code == 127
    assert bench.err(handle) == "gpulayer: no-such-program: command not found\n"
    assert error(ending)["type"] == "CommandNotFound"


def test_a_file_without_execute_bit_ends_with_126_and_one_line(bench: Bench) -> None:
    (bench.folder / "plain").write_text("#!/bin/sh\n")
    handle = bench.command("./plain")
    ending = handle.wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.code == 126
    assert bench.err(handle) == "gpulayer: ./plain: cannot be executed: Permission denied\n"


def test_a_script_without_a_first_line_is_explained(bench: Bench) -> None:
    executable(bench.folder / "script", "echo hello\n")
    handle = bench.command("./script")
    ending = handle.wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.code == 126
    assert "needs a first line with #!" in bench.err(handle)


def test_a_missing_interpreter_is_told_apart_from_a_missing_script(bench: Bench) -> None:
    executable(bench.folder / "script", "#!/no/such/interpreter\n")
    handle = bench.command("./script")
    ending = handle.wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.code == 126
    assert "interpreter of its first line" in bench.err(handle)


def test_a_missing_folder_is_told(bench: Bench) -> None:
    handle = bench.command("true", cwd=bench.folder / "nowhere")
    ending = handle.wait(PATIENCE_S)

    assert ending.exit is not None
    assert ending.exit.code == 126
    assert "cannot enter the folder" in bench.err(handle)


def test_commands_are_looked_up_in_the_jobs_own_path(bench: Bench) -> None:
    tools = bench.folder / "tools"
    tools.mkdir()
    executable(tools / "only-here", "#!/bin/sh\necho found\n")

    handle = bench.command("only-here", env={"PATH": f"{tools}:/usr/bin:/bin"})
    handle.wait(PATIENCE_S)

    assert bench.out(handle) == "found\n"


def test_a_command_sees_the_given_environment_and_its_mark(bench: Bench) -> None:
    given = {"PATH": os.environ["PATH"], "GREETING": "grüß dich"}
    handle = bench.command("env", env=given)
    handle.wait(PATIENCE_S)

    seen = dict(line.split("=", 1) for line in bench.out(handle).splitlines())
    assert seen == given | {"GPULAYER_PROCESS": handle.id}


def test_a_commands_input_is_empty(bench: Bench) -> None:
    handle = bench.shell("cat; echo end")
    handle.wait(PATIENCE_S)

    assert bench.out(handle) == "end\n"


def test_a_command_holds_nothing_open_but_its_three_streams(bench: Bench) -> None:
    handle = bench.shell("ls /proc/$$/fd")
    handle.wait(PATIENCE_S)

    assert bench.out(handle).split() == ["0", "1", "2"]


def test_a_command_begins_with_default_signals_its_umask_and_no_terminal(bench: Bench) -> None:
    script = "grep -E 'SigBlk|SigIgn' /proc/self/status; umask; tty"
    handle = bench.shell(script, umask=0o027)
    handle.wait(PATIENCE_S)

    _, blocked, _, ignored, umask, *terminal = bench.out(handle).split()
    own_of_libc = (
        0b11 << 31
    )  # signals 32 and 33: no program can set them, and who started the tests may ignore them
    assert int(blocked, 16) & ~own_of_libc == 0
    assert int(ignored, 16) & ~own_of_libc == 0
    assert (umask, terminal) == ("0027", ["not", "a", "tty"])


def test_a_command_does_not_inherit_the_signals_that_its_worker_ignores(tmp_path: Path) -> None:
    """As those do that nohup starts, or a script in the background."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        server = ForkServer(sys.executable, {})
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
    try:
        bench = Bench(tmp_path, server)
        handle = bench.shell("grep SigIgn /proc/self/status")
        handle.wait(PATIENCE_S)
        assert int(bench.out(handle).split()[1], 16) & 0xFFFF == 0
    finally:
        server.close()


def test_a_command_leads_a_session_of_its_own(bench: Bench) -> None:
    handle = bench.command(sys.executable, "-c", "import os; print(os.getsid(0) == os.getpid())")
    handle.wait(PATIENCE_S)

    assert bench.out(handle) == "True\n"
