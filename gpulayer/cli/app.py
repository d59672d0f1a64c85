"""The application: every command by its name, and what an unknown name is answered with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from gpulayer.cli.cancel import cancel_jobs
from gpulayer.cli.explain import explain_job
from gpulayer.cli.gc import collect_garbage
from gpulayer.cli.interrupt import interrupt_jobs
from gpulayer.cli.jobs import fetch_job, list_jobs, show_job, wait_jobs
from gpulayer.cli.logs import show_logs
from gpulayer.cli.private import stop_private
from gpulayer.cli.profiles import list_profiles
from gpulayer.cli.quick import Command, Quick
from gpulayer.cli.resources import resources
from gpulayer.cli.retry import retry_jobs
from gpulayer.cli.run_function import run_function
from gpulayer.cli.status import show_status
from gpulayer.cli.submit import submit_command
from gpulayer.cli.worker import worker
from gpulayer.cli.worker_control import drain_worker, run_worker, start_worker, stop_worker
from gpulayer.cli.workers import list_workers
from gpulayer_broker.errors import UnknownName

# More letters than any first sentence has.
SENTENCE = 500


class Group(Quick, typer.core.TyperGroup):
    """Answers an unknown command with the nearest one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise UnknownName.among("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command with its whole first sentence, in as many lines as that takes."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, command.get_short_help_str(limit=SENTENCE))
            for name, command in commands
            if command is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    cls=Group,
    name="gpulayer",
    help="Send commands and Python functions to any machine that can run them.",
    epilog="Example: gpulayer submit --accelerator cuda --gpu-memory 24GB -- python train.py",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"gpulayer {version('gpulayer')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Send commands and Python functions to any machine that can run them."""


_COMMANDS: dict[str, Callable[..., int]] = {
    "run": run_function,
    "jobs": list_jobs,
    "show": show_job,
    "logs": show_logs,
    "wait": wait_jobs,
    "cancel": cancel_jobs,
    "interrupt": interrupt_jobs,
    "retry": retry_jobs,
    "outputs": fetch_job,
    "explain": explain_job,
    "gc": collect_garbage,
    "workers": list_workers,
    "status": show_status,
    "down": stop_private,
    "profiles": list_profiles,
}

app.command("submit", cls=Command, context_settings={"allow_interspersed_args": False})(submit_command)
for _name, _command in _COMMANDS.items():
    app.command(_name, cls=Command)(_command)
app.add_typer(resources, cls=Group)
worker.callback(invoke_without_command=True, no_args_is_help=False, help=run_worker.__doc__)(run_worker)
worker.command("start", cls=Command)(start_worker)
worker.command("stop", cls=Command)(stop_worker)
worker.command("drain", cls=Command)(drain_worker)
app.add_typer(worker, cls=Group)
