"""Errors of redis-py and of the server as this project's own, one line each, by what the reader can do.

What passes is NoAnswer; NotAllowed and ServerOutOfMemory are the operator's; the rest is a ReplyError.
"""

from __future__ import annotations

from redis import exceptions as known

from gpulayer_broker.endpoint import Endpoint
from gpulayer_broker.errors import GpulayerError, NotAllowed, ServerOutOfMemory
from gpulayer_broker.replies import NoAnswer, ReplyError

PASSING = {
    "LOADING": "is loading its data",
    "BUSY": "is busy in a script",
    "READONLY": "is a read-only replica",
    "MASTERDOWN": "has lost its primary",
    "CLUSTERDOWN": "is a cluster that is down",
    "TRYAGAIN": "is moving its slots",
    "MISCONF": "cannot write to its disk (free space, see its log)",
    "NOREPLICAS": "has too few replicas in reach",
    "UNBLOCKED": "changed its role",
}
REFUSED = {
    "NOAUTH": "asks for a password",
    "WRONGPASS": "refused user or password",
    "NOPERM": "does not allow this",
}


def error_of_reply(error: known.RedisError, endpoint: Endpoint, *, sent: bool = False) -> GpulayerError:
    """What redis-py raised or returned, as this project's error; `sent`: the command may have run."""
    code, text = _code(error), str(error)
    if code in REFUSED:
        return NotAllowed(f"queue at {endpoint} {REFUSED[code]}: {text}")
    if code in PASSING:
        return NoAnswer(f"queue at {endpoint} {PASSING[code]}: {text}", sent=False, word=code)
    if code == "OOM":
        return ServerOutOfMemory(
            f"queue at {endpoint} is out of memory: raise its maxmemory or purge finished jobs"
        )
    if isinstance(error, known.ResponseError):
        return ReplyError(text, word=code)
    return NoAnswer(_no_answer(endpoint, text, sent), sent=sent)


def _code(error: known.RedisError) -> str:
    """The reply's first word; redis-py cuts it from the text of the errors that it knows."""
    classes = (
        (known.BusyLoadingError, "LOADING"),
        (known.AuthenticationError, "NOAUTH" if "required" in str(error) else "WRONGPASS"),
        (known.NoPermissionError, "NOPERM"),
        (known.OutOfMemoryError, "OOM"),
        (known.ReadOnlyError, "READONLY"),
        (known.MasterDownError, "MASTERDOWN"),
        (known.ClusterDownError, "CLUSTERDOWN"),
        (known.TryAgainError, "TRYAGAIN"),
        (known.NoScriptError, "NOSCRIPT"),
        (known.MovedError, "MOVED"),
    )
    for kind, code in classes:
        if isinstance(error, kind):
            return code
    # Of the codes with several meanings redis-py 8 keeps the code apart, older ones drop it.
    return getattr(error, "status_code", None) or _first_word(str(error))


def _first_word(text: str) -> str:
    word = text.partition(" ")[0]
    return word if word.isupper() else "ERR"


def _no_answer(endpoint: Endpoint, text: str, lost: bool) -> str:
    if lost:
        return f"queue at {endpoint}: the connection was lost before the answer came ({text})"
    return (
        f"no queue answers at {endpoint} ({text}): start a Redis or Valkey server there, give another "
        "address (--redis, GPULAYER_REDIS_URL), or give none to use the private queue of this user"
    )
