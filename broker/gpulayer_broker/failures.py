"""Names of failures, for `retry_on`: what a user writes, and whether a failed attempt is one of these.

A name is an end reason (`oom`), the exit code of a command (`75`), or an exception's: alone (`ConnectionError`) or with
its module (`requests.exceptions.Timeout`). An exception also has the names of the classes that it derives from.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from gpulayer_broker.arguments import Wording
from gpulayer_broker.job import END_REASONS

# Reasons of an attempt's end that another attempt may mend; the others end the job itself.
REASONS = ("user_error", "signal", "oom", "disk", "timeout", "cannot_start", "result_error")
assert set(REASONS) <= END_REASONS.keys()

_EXCEPTION = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
MOST_CODE = 255


def failure_names(words: Wording, given: object) -> tuple[str, ...]:
    """The names in their canonical form; BadRequirement for what is no failure."""
    if given is None:
        return ()
    several = [given] if isinstance(given, (str, int, type)) or not isinstance(given, Iterable) else given
    return tuple(dict.fromkeys(_name(words, each) for each in several))


def _name(words: Wording, given: object) -> str:
    if isinstance(given, type) and issubclass(given, BaseException):
        return f"{given.__module__}.{given.__qualname__}".replace(".<locals>", "")
    text = str(given) if isinstance(given, (str, int)) and not isinstance(given, bool) else ""
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_CODE:
        return str(int(text))
    if not _EXCEPTION.fullmatch(text):
        raise words.error(
            "retry_on", given, f"name an exception, an exit code of a command, or one of {', '.join(REASONS)}"
        )
    return text


def is_one_of(names: Collection[str], reason: str, exit_code: int | None, kinds: Iterable[str]) -> bool:
    """Whether a failed attempt has one of the names; `kinds` are its exception's classes, with their modules."""
    if not names or reason in names or (exit_code is not None and str(exit_code) in names):
        return True
    plain = (kind.replace(".<locals>", "") for kind in kinds)
    return any(f".{kind}".endswith(f".{name}") for kind in plain for name in names)
