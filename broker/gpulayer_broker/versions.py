"""Version ranges by PEP 440, judged as the people who install nightly builds expect.

A range is a set of PEP 440 specifiers (`>=2.4,<3`, `==2.4.*`, `~=2.4`); the empty text is any version.
Judging follows PEP 440 with these words added:

- pre-releases, development and nightly builds count: 2.3.0.dev20240101 satisfies `>=0`;
- for a lower bound that names a final release (`>=2.15`, and the one inside `~=2.15`) they count as the
  release that they lead to: 2.15.0a0+gitabc satisfies `>=2.15`, because a nightly build has what 2.15 has.
  A bound that names a pre-release itself (`>=2.15rc1`) is compared exactly, and so are all other operators:
  no pre-release of 2.15 satisfies `==2.15`, `>2.15` or `<2.15`, all of them satisfy `==2.15.*`;
- the installed version's local part (`+cu121`) is ignored unless the specifier names one (`==2.4.0+cu121`);
- a version that is not PEP 440 satisfies only the empty range: it never stops a worker from being judged.

`packaging` is imported when the first range that is not empty needs judging, never before.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from gpulayer_broker.errors import BadRequirement
from gpulayer_broker.names import framework_name

if TYPE_CHECKING:
    from packaging.specifiers import Specifier
    from packaging.version import Version

_FRAMEWORK = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(.*)")
_LONGEST_RANGE = 256
# Lower bounds first, as people write them.
_OPERATORS = (">=", ">", "~=", "==", "===", "!=", "<=", "<")


@lru_cache(maxsize=4096)
def canonical_range(text: str) -> str:
    """The one spelling of a range: specifiers sorted, each once, without spaces or trailing zeros."""
    specifiers = {_canonical_specifier(one) for one in _specifiers(text)}
    return ",".join(operator + version for operator, version in sorted(specifiers, key=_in_order))


def _in_order(specifier: tuple[str, str]) -> tuple[int, str]:
    operator, version = specifier
    return _OPERATORS.index(operator), version


def _canonical_specifier(specifier: Specifier) -> tuple[str, str]:
    from packaging.utils import canonicalize_version
    from packaging.version import Version

    operator, text = specifier.operator, specifier.version
    if operator == "===":
        return operator, text.lower()
    if text.endswith(".*"):
        return operator, f"{Version(text[:-2])}.*"
    # `~=2.4.0` and `~=2.4` differ, so there the zeros carry meaning.
    return operator, canonicalize_version(Version(text), strip_trailing_zero=operator != "~=")


@lru_cache(maxsize=4096)
def _specifiers(text: str) -> tuple[Specifier, ...]:
    """The range's specifiers, all of whose versions have been read; BadRequirement if one cannot be."""
    if not text.strip():
        return ()
    from packaging.specifiers import SpecifierSet

    try:
        if len(text) > _LONGEST_RANGE:
            raise ValueError("too long")
        specifiers = tuple(SpecifierSet(text))
        for specifier in specifiers:
            _canonical_specifier(specifier)
    except ValueError:
        raise BadRequirement(_bad_range(text), value=text) from None
    return specifiers


def _bad_range(text: str) -> str:
    shown = text.strip() if len(text) <= 60 else f"{text[:57]}…"
    if re.fullmatch(r"\d+(\.\d+)*", shown):
        return f"'{shown}' is not a version range: write '=={shown}', '>={shown}' or '=={shown}.*'"
    if re.match(r"=\s*\d", shown):
        return f"'{shown}' is not a version range: write '={shown}'"
    return f"'{shown}' is not a version range: write one by PEP 440, such as '>=2.4,<3'"


def parse_framework(text: str) -> tuple[str, str]:
    """The canonical name and range of `onnxruntime>=1.18`, or of a bare `numpy`."""
    match = _FRAMEWORK.fullmatch(text.strip())
    if match is None:
        raise BadRequirement(
            f"'{text}' is not a framework: write a name and a range, such as 'torch>=2.4'", value=text
        )
    if (extra := match[2][:1]) in ("[", "@", ";"):
        what = {"[": "extras", "@": "addresses", ";": "markers"}[extra]
        raise BadRequirement(f"{what} are not judged: write a name and a range alone", value=text)
    return canonical_framework(match[1], match[2])


def canonical_framework(name: str, text: str) -> tuple[str, str]:
    """The framework's canonical name and range; the error's value holds both."""
    match = _FRAMEWORK.fullmatch(name.strip())
    if match is None or match[2]:
        raise BadRequirement(
            f"'{name}' is not a framework's name: write it as its distribution or module is called",
            value=name,
        )
    try:
        return framework_name(name), canonical_range(text)
    except BadRequirement as error:
        raise BadRequirement(str(error), value=f"{name.strip()} {text}") from None


@lru_cache(maxsize=16384)
def satisfies(installed: str, wanted: str) -> bool:
    """Whether the installed version lies in the range; see the top of this file for how it is judged."""
    specifiers = _specifiers(wanted)
    if not specifiers:
        return True
    version = _version(installed)
    return version is not None and all(_satisfies_one(version, specifier) for specifier in specifiers)


def _version(installed: str) -> Version | None:
    from packaging.version import Version

    try:
        # A Python built from its repository calls itself `3.15.0a1+`.
        return Version(installed.strip().rstrip("+"))
    except ValueError:
        return None


def _satisfies_one(version: Version, specifier: Specifier) -> bool:
    from packaging.version import Version

    judged = version if "+" in specifier.version else Version(version.public)
    if specifier.contains(judged, prereleases=True):
        return True
    if not judged.is_prerelease or specifier.operator not in (">=", "~="):
        return False
    bound = Version(specifier.version)
    return not bound.is_prerelease and specifier.contains(Version(judged.base_version), prereleases=True)
