"""`gl.remote` on a method: it is that of its instance, which travels along by value."""

from __future__ import annotations

import threading

import pytest

import gpulayer as gl
from gpulayer.client import Client
from gpulayer_broker import spec as specs
from tests.support import PATIENCE_S

pytestmark = pytest.mark.usefixtures("remotely")


class Model:
    """Something with a state and methods."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    @gl.remote(retries=1)
    def score(self, n: int, *, plus: int = 0) -> int:
        return self.factor * n + plus

    @gl.remote
    def grown(self) -> int:
        self.factor += 1
        return self.factor

    @staticmethod
    @gl.remote
    def doubled(n: int) -> int:
        return 2 * n


@gl.remote
def scored_by(model: Model, n: int) -> int:
    return model.score(n)


def test_a_remote_method_runs_here_when_it_is_called() -> None:
    assert Model(3).score(4, plus=1) == 13
    assert Model.score(Model(3), 4) == 12
    assert Model.doubled(4) == 8


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("worker")
def test_a_method_s_job_has_its_instance() -> None:
    model = Model(3)

    assert model.score.delay(4, plus=1).result(PATIENCE_S) == 13
    assert Model.score.delay(model, 4).result(PATIENCE_S) == 12
    assert model.score.map(range(3)).results() == [0, 3, 6]
    assert model.score.options(isolation="warm").map(range(3)).results() == [0, 3, 6]
    assert Model.doubled.delay(4).result(PATIENCE_S) == 8
    assert scored_by.delay(model, 5).result(PATIENCE_S) == 15
    assert model.score.delay(1).then(model.score).result(PATIENCE_S) == 9


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("worker")
def test_what_a_job_changes_of_the_instance_is_changed_there_alone() -> None:
    model = Model(3)

    assert [model.grown.delay().result(PATIENCE_S) for _ in range(2)] == [4, 4]
    assert model.factor == 3


def test_a_method_keeps_its_options_and_its_instance_when_they_change() -> None:
    method = Model(3).score.options(name="other")

    assert method(4) == 12
    assert method._plan.retries == 1
    assert method.delay(4).record.name == "other"


def test_a_map_sends_the_instance_once() -> None:
    model = Model(3)
    model.weights = "w" * 50_000  # type: ignore[attr-defined]
    first, second = model.score.map([1, 2]).jobs
    calls = [specs.decode(job.record.spec).call for job in (first, second)]

    assert all(call and call.arguments.size < 1000 for call in calls)
    assert len({call.function.sha256 for call in calls if call}) == 1


def test_what_of_an_instance_cannot_travel_is_named() -> None:
    model = Model(3)
    model.lock = threading.Lock()  # type: ignore[attr-defined]

    with pytest.raises(
        gl.NotPicklable, match=r"function 'Model\.score', its self\.lock \(lock\) cannot travel"
    ):
        model.score.delay(1)


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_gl_remote_above_another_decorator_of_methods_is_refused_in_one_line(kind: type) -> None:
    with pytest.raises(TypeError, match=f"@{kind.__name__} goes above @gl.remote"):
        gl.remote(kind(len))


def test_a_client_submits_a_remote_method_with_its_own_options(client: Client) -> None:
    job = client.submit(Model(3).score, args=(4,), name="mine")

    assert job.record.name == "mine"
    assert specs.message_options(job.record.spec)["max_retries"] == 1
