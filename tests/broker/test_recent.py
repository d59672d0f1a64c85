"""What is remembered has a bound."""

from __future__ import annotations

from gpulayer_broker.recent import Recent


def test_only_so_many_are_kept_and_the_least_recently_used_goes_first() -> None:
    made: list[int] = []

    def make(number: int) -> str:
        made.append(number)
        return str(number)

    def made_of(number: int) -> str:
        return recent.get(number, lambda: make(number))

    recent: Recent[int, str] = Recent(3)
    assert [made_of(number) for number in (1, 2, 3, 1, 4, 1, 2)] == ["1", "2", "3", "1", "4", "1", "2"]
    assert made == [1, 2, 3, 4, 2]
    assert len(recent) == 3
