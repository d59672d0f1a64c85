"""The tree of errors: codes are unique, exit codes are the contract's, and nothing is lost on the way by pickle."""

from __future__ import annotations

import inspect
import pickle
import re
import traceback

import pytest

from gpulayer_broker import errors
from gpulayer_broker.errors import (
    GpulayerError,
    JobFailed,
    RemoteError,
    UnknownName,
    WaitTimeout,
    did_you_mean,
)


def every_error() -> list[type[GpulayerError]]:
    return [
        found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, GpulayerError)
    ]


def made(kind: type[GpulayerError]) -> GpulayerError:
    if issubclass(kind, RemoteError):
        return kind("ValueError", "bad\nworse", "Traceback …", job_id="j_1")
    return kind("disk full: free some", job_id="j_1", value="/x")


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_is_called_by_the_name_that_gpulayer_has_it_by(kind: type[GpulayerError]) -> None:
    import gpulayer

    printed = traceback.format_exception_only(made(kind))

    assert printed[0].startswith(f"gpulayer.{kind.__name__}: ")
    assert kind.__name__ in gpulayer.__all__
    assert getattr(gpulayer, kind.__name__) is kind


def test_an_error_that_another_module_makes_keeps_that_module_s_name() -> None:
    class Own(GpulayerError):
        pass

    assert Own.__module__ == __name__


def test_every_code_is_its_own() -> None:
    codes = [kind.code for kind in every_error()]

    assert sorted(set(codes)) == sorted(codes)


def test_the_tree_in_the_docstring_names_every_error_and_no_other() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")

    assert sorted(["GpulayerError", *drawn]) == sorted(kind.__name__ for kind in every_error())


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_whole(kind: type[GpulayerError]) -> None:
    before = made(kind)

    after = pickle.loads(pickle.dumps(before))

    assert type(after) is kind
    assert (str(after), vars(after), after.exit_code) == (str(before), vars(before), before.exit_code)


@pytest.mark.parametrize(
    ("name", "exit_code"),
    [
        ("BadRequirement", 2),
        ("JobNotFound", 2),
        ("ServerTooOld", 78),
        ("QueueUnreachable", 69),
        ("QueueFull", 69),
        ("ServerOutOfMemory", 69),
        ("NotAllowed", 77),
        ("RemoteError", 1),
        ("JobCancelled", 130),
        ("JobTimedOut", 124),
        ("WorkerLost", 75),
    ],
)
def test_an_exit_code_is_the_documented_one(name: str, exit_code: int) -> None:
    kind: type[GpulayerError] = getattr(errors, name)

    assert kind.exit_code == exit_code


def test_a_message_of_several_lines_becomes_one() -> None:
    assert str(GpulayerError("no room\n  on the disk\n")) == "no room on the disk"


def test_a_failed_command_carries_its_own_exit_code() -> None:
    assert JobFailed("python ended with 7", exit_code=7).exit_code == 7
    assert JobFailed("python failed").exit_code == 1


def test_a_remote_error_shows_type_and_message_and_keeps_the_traceback() -> None:
    error = RemoteError("ValueError", "bad", "Traceback …")

    assert str(error) == "ValueError: bad"
    assert (error.type_name, error.message, error.traceback) == ("ValueError", "bad", "Traceback …")
    assert str(RemoteError("KeyboardInterrupt", "")) == "KeyboardInterrupt"


def test_a_wait_that_ends_first_is_a_timeout_error() -> None:
    with pytest.raises(TimeoutError, match="still running"):
        raise WaitTimeout("job j_1 is still running after 5 s")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    error = UnknownName.among("profile", "pytorch-cud", ["jax-cpu", "pytorch-cuda"])

    assert str(error) == "profile 'pytorch-cud' is not known: did you mean 'pytorch-cuda'?"
    assert error.value == "pytorch-cud"


def test_a_name_like_no_other_is_answered_with_all_of_them_in_their_order() -> None:
    assert did_you_mean("zzz", ["b", "a"]) == "known are b, a"
    assert did_you_mean("zzz", []) == "none is known"
    assert did_you_mean("zzz", map(str, range(100))).endswith("38, 39 and 60 more")


def test_a_document_of_an_error_holds_plain_values_only() -> None:
    error = GpulayerError("no", job_id="j_1", value=ValueError("x"))

    assert error.as_dict() == {"code": "error", "message": "no", "job_id": "j_1", "value": "x"}
    assert JobFailed("no", end_reason="oom").as_dict()["end_reason"] == "oom"
