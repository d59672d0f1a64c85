"""The Lua library: put together from `lua/*.lua` and loaded into the server where it is missing.

Its name and every function's carry the protocol's version, so that two releases can share one server. Loading
never replaces a library that is there; only who has a server to himself may `renew` it, so that the functions of
an older release, which the server's data keep, do not outlive an update.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from gpulayer_broker.connection import Link

PROTOCOL = 1
NAME = f"gpulayer{PROTOCOL}"

_PROLOGUE = """#!lua name={name}
local H = {{}}
local function register(name, flags, operation)
  local function callback(keys, arguments)
    H.depth = 0
    return operation(keys, arguments)
  end
  redis.register_function{{function_name = '{name}_' .. name, callback = callback, flags = flags}}
end
"""


def sources() -> dict[str, str]:
    """File name → text, helpers (`h_…`) before operations."""
    folder = files("gpulayer_broker") / "lua"
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".lua"))
    names.sort(key=lambda name: not name.startswith("h_"))
    return {name: (folder / name).read_text() for name in names}


def assemble(parts: dict[str, str], name: str = NAME) -> str:
    """One library; each file is a block of its own, so that its locals stay its own."""
    blocks = [f"do -- {file}\n{text}end\n" for file, text in parts.items()]
    return _PROLOGUE.format(name=name) + "".join(blocks)


@cache
def code() -> str:
    return assemble(sources())


def function(name: str) -> bytes:
    """The name under which the server knows a function of this protocol."""
    return f"{NAME}_{name}".encode()


def is_loaded(link: Link) -> bool:
    return bool(link.call("FUNCTION", "LIST", "LIBRARYNAME", NAME))


def load(link: Link) -> None:
    """Loads the library where it is missing; another loader who was first is as good."""
    if is_loaded(link):
        return
    try:
        link.call("FUNCTION", "LOAD", code())
    except Exception as error:
        if "already exists" not in str(error):
            raise


def renew(link: Link) -> None:
    """Replaces the library, if another release's is there, by this one's: for a server that nobody else uses."""
    if _loaded_code(link) != code().encode():
        link.call("FUNCTION", "LOAD", "REPLACE", code())


def _loaded_code(link: Link) -> bytes:
    for library in link.call("FUNCTION", "LIST", "LIBRARYNAME", NAME, "WITHCODE"):
        facts = dict(zip(library[::2], library[1::2], strict=True))
        return bytes(facts[b"library_code"])
    return b""
