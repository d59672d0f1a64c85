"""Whether a server may hold a queue: recent enough, never evicting, and what its operator should know.

Only INFO is asked, which managed services allow where CONFIG is forbidden; a login that may not even ask that
is warned that nothing could be checked.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gpulayer_broker.errors import NotAllowed, ServerTooOld, UnsafeEviction

if TYPE_CHECKING:
    from gpulayer_broker.connection import Link

OLDEST = {"redis": (7, 0), "valkey": (7, 2)}
NEEDED = "GPUlayer needs Redis 7.0 or Valkey 7.2, or newer"


def check_server(link: Link) -> list[str]:
    """Warnings, one line each; ServerTooOld or UnsafeEviction where a queue would not be safe."""
    try:
        facts = server_facts(link, "server", "memory", "persistence")
    except NotAllowed:
        return [
            f"the login at {link.endpoint} may not read INFO: version, eviction and persistence are unchecked"
        ]
    _check_version(facts, str(link.endpoint))
    _check_eviction(facts, str(link.endpoint))
    return _persistence_warnings(facts, str(link.endpoint))


def server_facts(link: Link, *sections: str) -> dict[str, str]:
    """The fields of INFO's sections."""
    lines = [line for section in sections for line in link.call("INFO", section).decode().splitlines()]
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _check_version(facts: dict[str, str], place: str) -> None:
    kind = "valkey" if "valkey_version" in facts else "redis"
    text = facts.get(f"{kind}_version", "")
    found = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
    if found < OLDEST[kind]:
        raise ServerTooOld(
            f"server at {place} is {kind.capitalize()} {text or 'of no known version'}: {NEEDED}"
        )


def _check_eviction(facts: dict[str, str], place: str) -> None:
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        raise UnsafeEviction(
            f"server at {place} would evict jobs (maxmemory-policy {policy}): "
            "CONFIG SET maxmemory-policy noeviction",
            value=policy,
        )


def _persistence_warnings(facts: dict[str, str], place: str) -> list[str]:
    warnings = []
    # One that reads its file has switched it off meanwhile.
    if facts.get("aof_enabled") == "0" and facts.get("loading") != "1":
        warnings.append(
            f"server at {place} has appendonly off: a crash of it loses jobs (CONFIG SET appendonly yes)"
        )
    if facts.get("aof_last_write_status", "ok") != "ok":
        warnings.append(f"server at {place} cannot write its append-only file: free disk space, see its log")
    return warnings
