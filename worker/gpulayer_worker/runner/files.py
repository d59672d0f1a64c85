"""The files of functions that travelled by value, back in their tracebacks.

A pickle of code may hold a stand-in for its file's name, so that equal code has equal bytes; the name itself is among
the function's globals. The line's text is shown only where the file here has the function in that place.
"""

from __future__ import annotations

import linecache
import traceback
from types import CodeType, TracebackType
from typing import Any

STAND_IN = "<dynamic-code>"


def name_files(
    told: traceback.TracebackException, error: BaseException, frames: TracebackType | None
) -> None:
    """Gives each frame of the error, its causes and its parts the name of the file that its code is from."""
    left: list[tuple[Any, BaseException | None, TracebackType | None]] = [(told, error, frames)]
    while left:
        each, of, tb = left.pop()
        if each is None or of is None:
            continue
        for at, (frame, line) in enumerate(traceback.walk_tb(tb)):
            if at < len(each.stack) and each.stack[at].filename == STAND_IN:
                each.stack[at] = _named(each.stack[at], frame.f_code, frame.f_globals.get("__file__"), line)
        for other in ("__cause__", "__context__"):
            behind = getattr(of, other)
            left.append((getattr(each, other), behind, behind and behind.__traceback__))
        for at, part in enumerate(getattr(each, "exceptions", None) or ()):
            inner = getattr(of, "exceptions", ())[at]
            left.append((part, inner, inner.__traceback__))


def _named(
    summary: traceback.FrameSummary, code: CodeType, file: object, line: int
) -> traceback.FrameSummary:
    if not isinstance(file, str):
        return summary
    text = None if _begins(code, linecache.getline(file, code.co_firstlineno)) else ""
    return traceback.FrameSummary(file, line, summary.name, line=text)


def _begins(code: CodeType, text: str) -> bool:
    """Whether the function could begin with this line."""
    return code.co_name in text or text.lstrip().startswith("@") or ("<" in code.co_name and bool(text))
