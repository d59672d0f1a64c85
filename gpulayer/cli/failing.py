"""How the command line tells what went wrong: in one line, with its exit code, and as a document.

A wrong command line is answered with the nearest option or command there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import typer

from gpulayer.cli.output import plain, shortened
from gpulayer.cli.streams import fault_of
from gpulayer_broker.errors import GpulayerError, did_you_mean

# typer brings its own copy of click's classes or uses click's, as its version has it.
_CLICK_EXCEPTION = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


@dataclass(frozen=True)
class Failure:
    """What is told of an error; the help of a group of commands is told as it is written."""

    line: str
    exit_code: int
    document: dict[str, Any]
    is_help: bool = False


def failure_of(error: Exception) -> Failure:
    """What is told of whatever a command raised."""
    if isinstance(error, GpulayerError):
        return Failure(shortened(plain(str(error))), error.exit_code, error.as_dict())
    if is_usage_error(error):
        line, is_help = usage_line(error), type(error).__name__ == "NoArgsIsHelpError"
        return Failure(line, 2, {"code": "usage", "message": line}, is_help)
    if isinstance(error, OSError) and (fault := fault_of(error)):
        return Failure(fault, 1, {"code": "output", "message": fault})
    line = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return Failure(f"{line} (GPULAYER_DEBUG=1 shows where)", 1, {"code": "error", "message": line})


def is_usage_error(error: Exception) -> bool:
    """Whether the parser of the command line raised it."""
    return isinstance(error, (_CLICK_EXCEPTION, typer.Abort))


def usage_line(error: Any) -> str:
    """The one line about it; the whole help for a group of commands of which none was named."""
    if isinstance(error, typer.Abort):
        return "aborted"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "gpulayer"
    option = getattr(error, "option_name", None)
    if type(error).__name__ == "NoSuchOption" and option and context is not None:
        return f"unknown option '{option}': {did_you_mean(option, _options(context))}"
    if type(error).__name__ == "NoArgsIsHelpError":
        return str(error.format_message()).rstrip()
    text = " ".join(str(error.format_message()).split()).rstrip(".")
    return f"{text[:1].lower()}{text[1:]} ({command} --help)"


def _options(context: Any) -> list[str]:
    return [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]


def exit_code_of(returned: object) -> int:
    """What a command returned, as an exit code; nothing means success."""
    return returned if isinstance(returned, int) and not isinstance(returned, bool) else 0
