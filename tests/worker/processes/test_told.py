"""A value that is told once reaches everybody who waits, whenever they begin to."""

from __future__ import annotations

import threading

import pytest

from gpulayer_worker.processes.told import Told
from tests.support import PATIENCE_S


def test_what_was_told_is_there_at_once() -> None:
    told: Told[int] = Told()
    told.tell(7)

    assert told.done()
    assert told.result(0) == 7


def test_all_who_wait_are_told() -> None:
    told: Told[int] = Told()
    heard: list[int] = []
    threads = [
        threading.Thread(target=lambda: heard.append(told.result(PATIENCE_S)), daemon=True) for _ in range(8)
    ]
    for thread in threads:
        thread.start()

    told.tell(7)

    for thread in threads:
        thread.join(PATIENCE_S)
    assert heard == [7] * 8


def test_who_waits_in_vain_is_told_so_and_may_wait_again() -> None:
    told: Told[int] = Told()
    with pytest.raises(TimeoutError):
        told.result(0.001)
    assert not told.done()

    threading.Timer(0.01, told.tell, (7,)).start()

    assert told.result(PATIENCE_S) == 7
    assert told.result(PATIENCE_S) == 7


def test_a_failure_is_raised_for_whoever_asks() -> None:
    told: Told[int] = Told()
    told.fail(RuntimeError("lost"))

    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost"):
            told.result(PATIENCE_S)


def test_the_first_word_counts() -> None:
    told: Told[int] = Told()
    told.tell(1)
    told.tell(2)
    told.fail(RuntimeError("late"))

    assert told.result() == 1


def test_who_waits_a_while_hears_whether_it_was_told() -> None:
    told: Told[int] = Told()
    assert not told.waits(0.001)

    threading.Timer(0.01, told.tell, (7,)).start()

    assert told.waits(PATIENCE_S)
    assert told.waits(0)


def test_a_failure_is_told_too() -> None:
    told: Told[int] = Told()
    told.fail(RuntimeError("lost"))

    assert told.waits(0)
