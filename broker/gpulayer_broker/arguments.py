"""One argument of a request, from what a user wrote to its canonical form.

The same readers serve the SDK, the command line, HTTP and Dramatiq actors. An error names the argument as
its user wrote it: `gpus=-1` in Python and HTTP, `--gpus -1` on the command line. How arguments bear on each
other is decided in `requirements.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpulayer_broker.errors import BadRequirement, BadSize, did_you_mean
from gpulayer_broker.units import MIB, mib_up, parse_size
from gpulayer_broker.versions import canonical_framework, canonical_range, parse_framework

Pairs = Mapping[str, str | None] | Iterable[str]

_MOST = 1_000_000
NAME_CHARS = 200
_FLAGS = {"frameworks": "framework", "labels": "label", "features": "feature"}
_LABEL_KEY = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,62})")
# What Dramatiq accepts as a queue's name.
_QUEUE = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Wording:
    """How the user spelled arguments, so that an error repeats it."""

    flags: bool

    def error(self, argument: str, value: object, problem: str) -> BadRequirement:
        """The error about one argument, which it names as the user wrote it."""
        return BadRequirement(f"{self._spelled(argument, value)}: {problem}", value=value)

    def _spelled(self, argument: str, value: object) -> str:
        if not self.flags:
            return f"{argument}={value!r}"
        return f"--{_FLAGS.get(argument, argument).replace('_', '-')} {value}"


def count(words: Wording, argument: str, value: object, *, least: int) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise words.error(argument, value, f"{argument} must be a whole number")
    if value < least:
        raise words.error(argument, value, f"{argument} must be {least} or more")
    if value > _MOST:
        raise words.error(argument, value, f"{argument} must be {_MOST} or less")
    return value


def size(words: Wording, argument: str, value: str | int | None) -> int:
    """The bytes of a size, 0 where none is given."""
    if value is None:
        return 0
    try:
        return parse_size(value)
    except BadSize as error:
        raise words.error(argument, value, str(error)) from None


def stepped(size_bytes: int) -> int:
    """The size rounded up to one of 32 steps a doubling, so that nearly equal requests share a queue."""
    mib = mib_up(size_bytes)
    step_mib = max(64, (1 << max(0, mib.bit_length() - 1)) // 32)
    return -(-mib // step_mib) * step_mib * MIB


def gpu_models(words: Wording, value: str | Iterable[str] | None) -> tuple[str, ...]:
    """The models' names, sorted, each once; a text may hold several between commas."""
    if value is None:
        return ()
    texts = ([value] if isinstance(value, str) else list(value)) if isinstance(value, Iterable) else []
    split = (part for text in texts for part in str(text).split(","))
    models = {name.casefold(): name for part in split if (name := " ".join(part.split()))}
    if not models:
        raise words.error("gpu_model", value, "names no model: write one or several, such as 'A100,H100'")
    return tuple(models[key] for key in sorted(models))


def frameworks(words: Wording, given: Pairs | None) -> dict[str, str]:
    """The range of each framework by its canonical name; the same framework twice means both ranges."""
    found: dict[str, str] = {}
    try:
        for name, text in _framework_pairs(given):
            found[name] = canonical_range(",".join(filter(None, (found.get(name), text))))
    except BadRequirement as error:
        raise words.error("frameworks", error.value, str(error)) from None
    except (TypeError, AttributeError):
        problem = "write a mapping of names to ranges, or texts such as 'torch>=2.4'"
        raise words.error("frameworks", given, problem) from None
    return found


def _framework_pairs(given: Pairs | None) -> Iterable[tuple[str, str]]:
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return (canonical_framework(name, text or "") for name, text in given.items())
    return (parse_framework(text) for text in ([given] if isinstance(given, str) else given))


def python_range(words: Wording, value: str | None) -> str:
    """The canonical range of a Python version."""
    try:
        return canonical_range(value or "")
    except BadRequirement as error:
        raise words.error("python", value, str(error)) from None


def labels(words: Wording, given: Pairs | None) -> tuple[tuple[str, str], ...]:
    """The labels, sorted by key."""
    found: dict[str, str] = {}
    for key, value, written in _label_pairs(words, given):
        if not _LABEL_KEY.fullmatch(key):
            raise words.error("labels", written, "a label is written key=value, the key a word")
        if value and not value.isprintable():
            raise words.error("labels", written, "a label's value is printable text")
        if found.setdefault(key, value) != value:
            raise words.error(
                "labels", written, f"{key} is also given as '{found[key]}': a label has one value"
            )
    return tuple(sorted(found.items()))


def _label_pairs(words: Wording, given: Pairs | None) -> Iterable[tuple[str, str, str]]:
    if isinstance(given, Mapping):
        for key, value in given.items():
            yield str(key), str("" if value is None else value), f"{key}={value}"
        return
    for text in [given] if isinstance(given, str) else given or ():
        key, equals, value = text.partition("=")
        if not equals:
            raise words.error("labels", text, "a label is written key=value")
        yield key.strip(), value.strip(), text


def one_of(words: Wording, argument: str, value: object, known: tuple[str, ...]) -> str:
    """One of the known words, in lower case."""
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in known:
        raise words.error(argument, value, f"not known: {did_you_mean(word, known)}")
    return word


def worker_name(words: Wording, value: object) -> str:
    """What people call a worker: it stands in tables and in names of files."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value.strip()) <= NAME_CHARS:
        raise words.error(
            "name", value, f"a worker's name is one printable line of {NAME_CHARS} characters at most"
        )
    return value


def queue_name(words: Wording, value: str) -> str:
    """A logical queue's name, as Dramatiq accepts it."""
    if not isinstance(value, str) or not _QUEUE.fullmatch(value):
        raise words.error(
            "queue", value, "a queue's name is letters, digits, '.', '_' and '-', a letter first"
        )
    return value
