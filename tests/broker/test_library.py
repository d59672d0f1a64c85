"""The library in the server: the newest release's serves all, nobody is left calling what is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version

import pytest

from gpulayer.session import Session
from gpulayer.targets import Target
from gpulayer_broker import functions, library
from gpulayer_broker.connection import Endpoint, Link
from gpulayer_broker.errors import ConfigError, NotAllowed
from gpulayer_broker.queue import Queue
from gpulayer_broker.replies import ReplyError
from gpulayer_broker.settings import Settings
from tests.servers import QueueServer

OLDER, NEWER = "0.0.1", "99.0"


@pytest.fixture
def server(queue_server: Callable[..., QueueServer]) -> QueueServer:
    return queue_server()


@pytest.fixture
def link(server: QueueServer) -> Iterator[Link]:
    with Link(server.endpoint) as link:
        yield link


def put(link: Link, release: str, *, without: str = "") -> None:
    """The library of another release, which lacks a function."""
    parts = {file: text for file, text in library.sources().items() if file != f"{without}.lua"}
    link.call("FUNCTION", "LOAD", "REPLACE", library.assemble(parts, release=release))


def releases(link: Link) -> set[str]:
    """What the functions that are there say of themselves."""
    found = set()
    for each in link.call("FUNCTION", "LIST", "LIBRARYNAME", library.NAME):
        for listed in each[each.index(b"functions") + 1]:
            found.add(listed[listed.index(b"description") + 1].decode())
    return found


def login(link: Link, *rules: str) -> Endpoint:
    """The address for a user who may use the queue but not administer the server."""
    link.call(
        "ACL",
        "SETUSER",
        "worker",
        "reset",
        "on",
        ">secret",
        "~gpulayer:*",
        "+@all",
        "-@admin",
        "-function",
        *rules,
    )
    return Endpoint.parse(f"unix://worker:secret@{link.endpoint.path}")


def test_the_release_of_the_functions_is_that_of_the_distribution() -> None:
    assert version("gpulayer") == library.RELEASE


def test_an_older_releases_functions_are_replaced_by_whoever_opens_the_queue(link: Link) -> None:
    put(link, OLDER, without="barrier")

    Queue(link).load()

    assert releases(link) == {library.RELEASE}
    assert Queue(link).run_once(functions.match("classes")).cursor == "0"


def test_functions_that_do_not_tell_their_release_are_replaced(link: Link) -> None:
    link.call("FUNCTION", "LOAD", library.code().replace(f"description = '{library.RELEASE}',", ""))

    Queue(link).load()

    assert releases(link) == {library.RELEASE}


@pytest.mark.parametrize("release", [library.RELEASE, NEWER])
def test_functions_of_the_same_or_a_newer_release_stay(link: Link, release: str) -> None:
    put(link, release, without="barrier")

    Queue(link).load()

    assert releases(link) == {release}
    assert b"barrier" not in repr(link.call("FUNCTION", "LIST")).encode()


def test_a_loader_who_was_second_is_content(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    Queue(link).load()
    monkeypatch.setattr(library, "_loaded_release", lambda link: None)

    Queue(link).load()

    assert releases(link) == {library.RELEASE}


def test_a_login_that_may_not_load_uses_what_is_there(link: Link) -> None:
    put(link, OLDER, without="barrier")
    with Link(login(link)) as theirs:
        queue = Queue(theirs)
        queue.load()

        assert queue.run(functions.match("classes")).cursor == "0"
    assert releases(link) == {OLDER}


def test_a_login_that_may_not_load_is_told_in_one_line_what_is_missing(link: Link) -> None:
    put(link, OLDER, without="match")
    with Link(login(link)) as theirs, pytest.raises(NotAllowed) as refused:
        Queue(theirs).run(functions.match("classes"))

    assert f"lacks functions of GPUlayer {library.RELEASE}, and this login may not load them" in str(
        refused.value
    )
    assert "secret" not in str(refused.value)


def test_a_client_on_an_older_server_that_it_may_not_load_ends_with_that_line(link: Link) -> None:
    put(link, OLDER, without="match")
    session = Session(Target("redis", Settings(), login(link, "+info").url))
    calls = []

    def pipelined(queue: Queue) -> None:
        calls.append(queue)
        (answer,) = queue.run_many([functions.match("classes")])
        if isinstance(answer, Exception):
            raise answer

    with pytest.raises(NotAllowed, match="may not load them"):
        session.attempt(pipelined)

    session.close()
    assert len(calls) == 1


def test_a_client_whose_function_stays_missing_does_not_try_for_ever(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(Target("redis", Settings(), link.endpoint.url))
    tries = []

    def missing(queue: Queue) -> None:
        tries.append(queue)
        queue.link.call("FCALL", "gpulayer1_of_the_future", 0)

    with pytest.raises(ReplyError, match="Function not found"):
        session.attempt(missing)

    session.close()
    assert len(tries) == 2


def test_a_newer_releases_functions_that_lack_one_are_left_and_said_so(link: Link) -> None:
    put(link, NEWER, without="match")

    with pytest.raises(ConfigError, match=f"functions of GPUlayer {NEWER}, which lack one"):
        Queue(link).run(functions.match("classes"))

    assert releases(link) == {NEWER}


def test_functions_that_were_lost_meanwhile_are_loaded_again(link: Link) -> None:
    queue = Queue(link)
    queue.load()
    link.call("FUNCTION", "FLUSH")

    assert queue.run(functions.match("classes")).cursor == "0"
    assert queue.run_once(functions.match("classes")).cursor == "0"
