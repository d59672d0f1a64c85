"""What a shell offers behind an option that takes one of some words, looked up when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def one_of(words: Callable[[], Iterable[str]]) -> Callable[[], list[str]]:
    """Offers the words; typer leaves those that begin as what was typed."""

    def complete() -> list[str]:
        return list(words())

    return complete


def accelerators() -> Iterable[str]:
    from gpulayer_broker.requirements import ACCELERATORS

    return ACCELERATORS


def profiles() -> Iterable[str]:
    from gpulayer_broker.profiles import all_profiles

    return all_profiles()


def priorities() -> Iterable[str]:
    from gpulayer_broker.job import PRIORITIES

    return PRIORITIES


def states() -> Iterable[str]:
    from gpulayer_broker.job import STATES

    return STATES


def isolations() -> Iterable[str]:
    from gpulayer.options import FRESH, WARM

    return (FRESH, WARM)


def policies() -> Iterable[str]:
    from gpulayer.options import POLICIES

    return POLICIES


def failures() -> Iterable[str]:
    from gpulayer_broker.failures import REASONS

    return REASONS
