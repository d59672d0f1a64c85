"""Uses of the public API: what is ignored must be that error to a type checker, and nothing else may be one.

mypy in strict mode reports an `ignore` that hides nothing, so this file passes only if both hold.
"""

from __future__ import annotations

from typing import assert_type

import gpulayer as gl


@gl.remote
def double(n: int) -> int:
    return 2 * n


@gl.remote(accelerator="cuda", gpus=2, gpu_memory="24GB", frameworks={"torch": ">=2.4"}, timeout="1h")
def train(rate: float, *, epochs: int = 1) -> str:
    return f"{rate} {epochs}"


def calls() -> None:
    assert_type(double(3), int)
    assert_type(double.delay(3), gl.Job[int])
    assert_type(double.delay(3).result(timeout=1), int)
    assert_type(train.delay(0.1, epochs=3).result(), str)
    assert_type(double.options(priority="high").delay(3), gl.Job[int])
    double("x")  # type: ignore[arg-type]
    double.delay("x")  # type: ignore[arg-type]
    double.delay()  # type: ignore[call-arg]
    train.delay(0.1, 3)  # type: ignore[call-arg]
    train.delay(0.1, epoch=3)  # type: ignore[call-arg]
    double.options(prioritie="high")  # type: ignore[call-arg]


def maps() -> None:
    results = double.map([1, 2, 3])
    assert_type(results, gl.MapResult[int])
    assert_type(results.results(), list[int])
    assert_type(double.map([1], return_exceptions=True).results(), list[int | Exception])
    for item in results.as_completed():
        assert_type(item, gl.Item[int])
        assert_type(item.result(), int)
        assert_type(item.job, gl.Job[int])
    warm = double.options(isolation="warm").map([1], progress=False)
    assert_type(warm, gl.MapResult[int])
    assert_type(list(warm), list[int])


@gl.remote
def total(numbers: list[int], start: int = 0, *, factor: int = 1) -> float:
    return factor * sum(numbers, start)


def pipelines() -> None:
    assert_type(double.delay(1).then(double), gl.Job[int])
    assert_type(double.delay(1).then(double).then(double).result(), int)
    assert_type(double.map([1, 2]).then(total, 3, factor=2), gl.Job[float])
    double.delay(1).then(train, epochs="x")  # type: ignore[arg-type]
    double.delay(1).then(double, 4)  # type: ignore[call-arg]
    train.delay(0.1).then(double)  # type: ignore[arg-type]
    double.delay(1).then(total)  # type: ignore[arg-type]


def ids_and_retries() -> None:
    assert_type(double.map([1]).ids, list[str])
    double.options(retries=2, retry_on=[ConnectionError, "oom", 75], eta="2027-01-31", result_ttl="1h")
    double.options(retry_on=3.5)  # type: ignore[arg-type]


class Model:
    @gl.remote(retries=1)
    def score(self, x: float) -> str:
        return f"{x}"


def methods(model: Model) -> None:
    assert_type(model.score(0.5), str)
    assert_type(model.score.delay(0.5).result(), str)
    assert_type(model.score.map([0.5]).results(), list[str])
    assert_type(model.score.options(retries=2).delay(x=0.5), gl.Job[str])
    assert_type(Model.score.delay(model, 0.5), gl.Job[str])
    model.score.delay("x")  # type: ignore[arg-type]
    model.score.delay()  # type: ignore[call-arg]


async def awaits() -> None:
    assert_type(await double.delay(3), int)
    assert_type(await double.map([3]), list[int])


def clients() -> None:
    with gl.Client() as client:
        assert_type(client.submit(["python", "train.py"], source="."), gl.Job[None])
        assert_type(client.submit(len, args=("abc",)), gl.Job[int])
        client.submit(["true"], gpus="two")  # type: ignore[call-overload]
    gl.Client(42)  # type: ignore[arg-type]


@gl.remote(gpus="two")  # type: ignore[call-overload, untyped-decorator]
def wrong() -> None: ...
