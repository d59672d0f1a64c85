"""How the command line tells a wrong command line: in one line, with the nearest option or command there is."""

from __future__ import annotations

from typing import Any

import typer

from gpulayer_broker.errors import did_you_mean

# typer brings its own copy of click's classes or uses click's, as its version has it.
_CLICK_EXCEPTION = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def is_usage_error(error: Exception) -> bool:
    """Whether the parser of the command line raised it."""
    return isinstance(error, (_CLICK_EXCEPTION, typer.Abort))


def usage_line(error: Any) -> str:
    """The one line about it; the whole help for a group of commands of which none was named."""
    if isinstance(error, typer.Abort):
        return "gpulayer: aborted"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "gpulayer"
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option and context is not None:
        return f"gpulayer: unknown option '{option}': {did_you_mean(option, _options(context))}"
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message()).rstrip()
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    return f"gpulayer: {text[:1].lower()}{text[1:]} ({command} --help)"


def _options(context: Any) -> list[str]:
    return [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]


def exit_code_of(returned: object) -> int:
    """What a command returned, as an exit code; nothing means success."""
    return returned if isinstance(returned, int) and not isinstance(returned, bool) else 0
