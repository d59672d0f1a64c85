"""When a job begins, is tried again, and forgets its result: `eta`, `retry_on`, `result_ttl`."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

import gpulayer as gl
from gpulayer_broker import spec as specs
from gpulayer_broker.errors import BadRequirement, BlobMissing
from gpulayer_broker.failures import is_one_of
from tests.sdk.benches import Bench, good
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("remotely")


class Flaky(OSError):
    """An error of this module's own."""


@gl.remote
def double(n: int) -> int:
    return 2 * n


# eta ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [lambda t: t, lambda t: t.isoformat(), lambda t: t.timestamp()])
def test_a_job_waits_for_its_moment(bench: Bench, form) -> None:  # type: ignore[no-untyped-def]
    hour = datetime.now(UTC) + timedelta(hours=1)
    job = double.options(eta=form(hour)).delay(1)

    due_ms = bench.hand.link.call("ZSCORE", bench.hand.key("delayed"), job.id)
    assert job.record.phase == "delayed"
    assert abs(float(due_ms) - hour.timestamp() * 1000) < 60_000


def test_the_moment_is_looked_at_when_the_job_is_submitted(bench: Bench) -> None:
    soon = double.options(eta=time.time() + 0.2)
    wait_until(lambda: soon.delay(1).record.phase == "ready", PATIENCE_S, "the moment is over")


def test_a_moment_without_a_zone_is_this_machines(bench: Bench) -> None:
    local = (datetime.now() + timedelta(hours=1)).isoformat()
    job = double.options(eta=local).delay(1)

    due_ms = float(bench.hand.link.call("ZSCORE", bench.hand.key("delayed"), job.id))
    assert 3500_000 < due_ms - time.time() * 1000 < 3700_000


# result_ttl -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["fresh", "warm"])
def test_a_result_leaves_when_its_own_time_is_over_and_the_record_stays(bench: Bench, isolation: str) -> None:
    some = double.options(isolation=isolation)
    short, usual = some.options(result_ttl="1ms").map([1]), some.map([1])
    for result in (short, usual):
        (job,) = result.jobs
        if isolation == "warm":
            bench.serve_array(job.id, lambda n: good(2 * n))
        else:
            bench.give(job.id, 2)
        assert job.wait(PATIENCE_S) == "succeeded"

    def has_faded() -> bool:
        bench.hand.tick()
        return not bench.queue.pages(short.jobs[0].id) and bench.queue.result(short.jobs[0].id)[1] is None

    wait_until(has_faded, PATIENCE_S, "the result has left")
    with gl.Client() as later:
        with pytest.raises(BlobMissing, match="no longer kept"):
            later.map_result(short.jobs[0].id).results()
        assert later.get(short.jobs[0].id).state == "succeeded"
        assert later.map_result(usual.jobs[0].id).results() == [2]


# retry_on -------------------------------------------------------------------------------------------------------------


def test_what_another_try_may_mend_travels_with_the_job(bench: Bench) -> None:
    job = double.options(retries=2, retry_on=[Flaky, "requests.Timeout", 75, "oom"]).delay(1)

    spec = specs.decode(job.record.spec)
    assert spec.retry_on == ("tests.sdk.test_when.Flaky", "requests.Timeout", "75", "oom")
    assert specs.decode(double.delay(1).record.spec).retry_on == ()


@pytest.mark.parametrize(
    ("names", "reason", "code", "kinds", "expected"),
    [
        ((), "user_error", None, (), True),
        (("ValueError",), "user_error", None, ("builtins.ValueError",), True),
        (("ValueError",), "user_error", None, ("app.MyValueError",), False),
        (("OSError",), "user_error", None, ("app.Flaky", "builtins.OSError"), True),
        (("app.Flaky",), "user_error", None, ("other.Flaky", "builtins.OSError"), False),
        (("job.Flaky",), "user_error", None, ("job.<locals>.Flaky",), True),
        (("75",), "user_error", 75, (), True),
        (("75",), "user_error", 1, (), False),
        (("oom", "signal"), "signal", None, (), True),
        (("oom",), "timeout", None, (), False),
    ],
)
def test_a_failure_is_known_by_its_reason_its_code_or_its_classes(
    names: tuple[str, ...], reason: str, code: int | None, kinds: tuple[str, ...], expected: bool
) -> None:
    assert is_one_of(names, reason, code, kinds) is expected


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"retry_on": ValueError}, "how often"),
        ({"retries": 1, "retry_on": "a b"}, "retry_on='a b': name an exception"),
        ({"retries": 1, "retry_on": 0}, "retry_on=0"),
        ({"retries": 1, "retry_on": 256}, "retry_on=256"),
        ({"retries": 1, "retry_on": int}, "name an exception"),
        ({"eta": "tomorrow"}, "eta='tomorrow': write a moment"),
        ({"eta": True}, "eta=True"),
        ({"eta": 1e15}, "seconds since 1970"),
        ({"eta": "2027-01-31", "delay": "1m"}, "give one of them"),
        ({"result_ttl": 0}, "needs some time"),
        ({"result_ttl": "long"}, "not a duration"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(options: dict[str, object], text: str) -> None:
    with pytest.raises(BadRequirement, match=text):
        gl.remote(**options)  # type: ignore[call-overload]
