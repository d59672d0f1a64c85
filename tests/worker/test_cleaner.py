"""What a job's end leaves to be done is done apart, in order, and all of it before the worker ends."""

from __future__ import annotations

from functools import partial

import pytest

from gpulayer_worker import cleaner as cleaner_module
from gpulayer_worker.cleaner import Cleaner
from tests.support import PATIENCE_S, wait_until


def test_what_is_left_is_done_in_order_before_it_stops() -> None:
    done: list[int] = []
    cleaner = Cleaner()
    cleaner.start()

    for number in range(100):
        cleaner.do(partial(done.append, number))
    cleaner.stop()

    assert done == list(range(100))


def test_it_goes_on_after_a_rest_and_after_a_fault(caplog: pytest.LogCaptureFixture) -> None:
    done: list[str] = []

    def fails() -> None:
        raise RuntimeError("of the test")

    cleaner = Cleaner()
    cleaner.start()
    for word in ("first", "second"):
        cleaner.do(fails)
        cleaner.do(partial(done.append, word))
        wait_until(partial(done.__contains__, word), PATIENCE_S, f"the {word} is done")
    cleaner.stop()

    assert caplog.text.count("of the test") >= 2


def test_who_stops_it_does_not_wait_for_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleaner_module, "REST_S", 100 * PATIENCE_S)
    done: list[str] = []
    cleaner = Cleaner()
    cleaner.start()
    cleaner.do(partial(done.append, "first"))
    wait_until(lambda: done, PATIENCE_S, "the first is done")
    cleaner.do(partial(done.append, "second"))

    cleaner.stop()

    assert done == ["first", "second"]
