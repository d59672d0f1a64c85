"""The Lua library: put together from `lua/*.lua`, loaded into the server where it is missing or older.

Its name and every function's carry the protocol's version, so that two protocols can share one server. Within one
protocol the newest release's functions serve all: each function is described by its release, whoever opens a queue
replaces those of an older one and leaves those of a newer. A login that may not load uses what is there, and is told
in one line when that lacks a function. Only who has a server to himself may `renew` the library, so that the functions
which the server's data keep are exactly those of the release that is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from gpulayer_broker.connection import Link
from gpulayer_broker.errors import ConfigError, GpulayerError, NotAllowed
from gpulayer_broker.replies import ReplyError

PROTOCOL = 1
NAME = f"gpulayer{PROTOCOL}"
RELEASE = "0.4.0.dev0"

_PROLOGUE = """#!lua name={name}
local H = {{}}
local function register(name, flags, operation)
  local function callback(keys, arguments)
    H.depth, H.moved, H.told = 0, 0, false
    local done, answer = pcall(operation, keys, arguments)
    if done then return answer end
    return H.broken(name, keys[1], answer)
  end
  redis.register_function{{
    function_name = '{name}_' .. name, callback = callback, flags = flags, description = '{release}',
  }}
end
"""


def sources() -> dict[str, str]:
    """File name → text, helpers (`h_…`) before operations."""
    folder = files("gpulayer_broker") / "lua"
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".lua"))
    names.sort(key=lambda name: not name.startswith("h_"))
    return {name: (folder / name).read_text() for name in names}


def assemble(parts: dict[str, str], name: str = NAME, release: str = RELEASE) -> str:
    """One library; each file is a block of its own, so that its locals stay its own."""
    blocks = [f"do -- {file}\n{text}end\n" for file, text in parts.items()]
    return _PROLOGUE.format(name=name, release=release) + "".join(blocks)


@cache
def code() -> str:
    return assemble(sources())


def function(name: str) -> bytes:
    """The name under which the server knows a function of this protocol."""
    return f"{NAME}_{name}".encode()


def is_missing(error: object) -> bool:
    """Whether a call was refused because the server does not have its function; nothing of it was run."""
    return isinstance(error, ReplyError) and "function not found" in str(error).lower()


def load(link: Link) -> None:
    """This release's functions are there, or a newer one's.

    A login that may not even ask what is there is believed to find what it needs: `reload` says so where it does not.
    """
    try:
        there = _loaded_release(link)
        if there is None:
            _load_new(link)
        elif _is_older(there):
            link.call("FUNCTION", "LOAD", "REPLACE", code())
    except NotAllowed:
        return


def reload(link: Link) -> None:
    """For a function that was missing. NotAllowed or ConfigError, in one line, where loading does not bring it."""
    try:
        there = _loaded_release(link)
        if there is not None and _is_newer(there):
            raise ConfigError(
                f"the queue at {link.endpoint} has the functions of GPUlayer {there}, which lack one that "
                f"GPUlayer {RELEASE} needs: update GPUlayer here"
            )
        link.call("FUNCTION", "LOAD", "REPLACE", code())
    except NotAllowed:
        raise NotAllowed(
            f"the queue at {link.endpoint} lacks functions of GPUlayer {RELEASE}, and this login may not load them: "
            f"use GPUlayer {RELEASE} once with one that may (FUNCTION LOAD), such as gpulayer workers --redis URL"
        ) from None


def renew(link: Link) -> None:
    """Replaces the library, if another release's is there, by this one's: for a server that nobody else uses."""
    if _loaded_code(link) != code().encode():
        link.call("FUNCTION", "LOAD", "REPLACE", code())


def _load_new(link: Link) -> None:
    """Another loader who was first is as good."""
    try:
        link.call("FUNCTION", "LOAD", code())
    except GpulayerError as error:
        if "already exists" not in str(error):
            raise


def _loaded_release(link: Link) -> str | None:
    """The release whose functions are there, "" where they do not tell; None where there are none."""
    for library in link.call("FUNCTION", "LIST", "LIBRARYNAME", NAME):
        listed = _fields(library)[b"functions"]
        return bytes(_fields(listed[0])[b"description"] or b"").decode(errors="replace") if listed else ""
    return None


def _loaded_code(link: Link) -> bytes:
    for library in link.call("FUNCTION", "LIST", "LIBRARYNAME", NAME, "WITHCODE"):
        return bytes(_fields(library)[b"library_code"])
    return b""


def _fields(flat: Sequence[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _is_older(release: str) -> bool:
    return release != RELEASE and not _is_newer(release)


def _is_newer(release: str) -> bool:
    """Whether a release came after this one; one that cannot be read is not."""
    if release == RELEASE:
        return False
    from packaging.version import InvalidVersion, Version

    try:
        return Version(release) > Version(RELEASE)
    except InvalidVersion:
        return False
