"""What `.delay`, `.map` and `Client.submit` say of a job that nobody can run, as the command line does: once."""

from __future__ import annotations

import pytest

import gpulayer as gl
from gpulayer.advising import Adviser
from gpulayer.client import Client
from gpulayer.session import Session
from gpulayer.targets import Target, resolve_target
from gpulayer_broker.connection import Link
from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.requirements import build_requirements
from tests.queueing import Hand
from tests.sdk.benches import Bench
from tests.support import PATIENCE_S, wait_until

pytestmark = pytest.mark.usefixtures("remotely")
UNFIT = "gpulayer: warning: no known worker can ever run this (1 worker: 1 "


@gl.remote(cpus=512)
def large(n: int) -> int:
    return n


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_what_no_known_worker_can_ever_run_is_said_once(
    bench: Bench, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    large.delay(1)
    large.delay(2)
    large.map([1, 2])
    (line,) = [line for line in said(caplog) if "warning" in line]
    assert line.startswith(UNFIT)
    assert line.endswith("; the job waits until one comes that can")

    client.submit(["true"], cpus=512)
    large.options(cpus=513).map([1, 2])
    assert [line.startswith(UNFIT) for line in said(caplog) if "warning" in line] == [True] * 3


def test_nothing_is_said_of_what_a_worker_can_run(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    large.options(cpus=1, python=">=3.8").delay(1)

    assert not [line for line in said(caplog) if "warning" in line]


def test_of_what_every_worker_can_run_nobody_is_asked(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> None:
        raise AssertionError("the workers were asked for")

    monkeypatch.setattr(Adviser, "workers", asked)
    client.submit(["true"])


def test_what_is_strange_about_the_queue_is_said_once_however_many_clients_it_has(
    client: Client, trusting: Client, bench: Bench, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    for each in (client, client, trusting):
        each._session.queue  # noqa: B018 - opened, with what the server's check says
        each._session.warnings = [f"{namespace} is strange"]
        each.submit(["true"])

    assert said(caplog).count(f"gpulayer: {namespace} is strange") == 1


def test_advice_that_cannot_be_had_keeps_nothing_from_being_submitted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise QueueUnreachable("nobody answers")

    monkeypatch.setattr(Adviser, "workers", away)

    assert large.delay(1).state == "queued"


class Private(Target):
    """The private set-up, whose worker may just be starting, on a queue of ours."""

    is_private = True


def test_the_worker_of_the_private_set_up_is_waited_for_by_nobody(
    link: Link, root: str, namespace: str, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = resolve_target(redis=address)
    session = Session(Private(given.name, given.settings, given.url))
    adviser = Adviser(session)

    adviser.submitted(build_requirements(cpus=512))
    assert not [line for line in said(caplog) if "warning" in line]
    Bench(Hand(link, root), namespace)
    wait_until(lambda: any(UNFIT in line for line in said(caplog)), PATIENCE_S, "it is said later")
    session.close()


def test_an_explanation_shows_itself_in_words(bench: Bench) -> None:
    explanation = large.delay(1).explain()

    assert repr(explanation) == str(explanation)
    assert "alpha: needs 512 cpus, has 64" in repr(explanation)
