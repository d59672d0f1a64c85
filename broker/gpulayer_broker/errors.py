"""Every error that GPUlayer raises, as one tree, grouped by what the reader can do about it.

    GpulayerError
    ├── UsageError (exit 2)              fix the request; nothing was submitted
    │   ├── BadRequirement               an accelerator, amount, range, label … that cannot be meant
    │   ├── BadSize                      a size or a duration that cannot be read
    │   ├── BadSource                    the folder to ship is missing or unreadable
    │   ├── SourceTooLarge               the folder to ship exceeds a limit
    │   ├── NotPicklable                 the function or its arguments cannot travel
    │   ├── UnknownName                  no such profile, target, command …: did you mean …?
    │   ├── MustFit                      refused on request: no known worker can ever run it
    │   ├── TooManyRequirements          more distinct requirements than a namespace holds
    │   ├── IdempotencyConflict          the key was used for another request
    │   └── JobNotFound                  no such job, or no longer kept
    ├── ConfigError (exit 78)            mend the set-up, or ask whoever runs it
    │   ├── ServerTooOld                 the queue's server lacks what GPUlayer needs
    │   ├── UnsafeEviction               the server may throw jobs away
    │   ├── BadStateFolder               the state or runtime folder is not safe to use
    │   ├── BadSetting                   a setting is unknown or has no sense
    │   └── FormatTooNew                 a record was written by a newer GPUlayer
    ├── Unavailable (exit 69)            try again later
    │   ├── QueueUnreachable
    │   ├── QueueFull
    │   └── ServerOutOfMemory
    ├── NotAllowed (exit 77)             use a login that may
    ├── StoreError (exit 1)              send or fetch the data again
    │   ├── BlobMissing
    │   ├── BlobCorrupt
    │   └── HostileTree                  refused: the tree reaches outside itself
    ├── JobError (exit 1)                read the job's log
    │   ├── JobFailed                    carries the command's own exit code
    │   ├── RemoteError                  the function raised; carries type, message and traceback
    │   ├── ResultNotPicklable           the function returned what cannot travel
    │   ├── JobCancelled (130)
    │   ├── JobTimedOut (124)
    │   └── WorkerLost (75)
    └── WaitTimeout (exit 124)           wait longer: the job goes on; is also a TimeoutError

Guarantees: a message is one line that says what is wrong, where and what to do; `code` is stable and unique,
and goes into `--json` and problem details; `exit_code` is the command's exit code; every error survives
pickling whole, and calls itself by the name that everybody catches it by: `gpulayer.BadRequirement`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

# So many known names are told to who wrote an unknown one.
MOST_NAMES = 40
# The package that hands out every error of this file by its name: tracebacks and pickles name it.
PUBLIC = "gpulayer"


class GpulayerError(Exception):
    """The root. `job_id` and `value` name the job and the offending value where there is one."""

    code: ClassVar[str] = "error"
    exit_code: int = 1
    __module__ = PUBLIC

    def __init_subclass__(cls) -> None:
        if cls.__module__ == __name__:
            cls.__module__ = PUBLIC

    def __init__(self, message: str, *, job_id: str | None = None, value: object = None) -> None:
        super().__init__(_one_line(message))
        self.job_id = job_id
        self.value = value

    def as_dict(self) -> dict[str, object]:
        """What `--json` and problem details show of it; a value that is not plain is shown by its text."""
        plain = self.value is None or isinstance(self.value, (str, int, float))
        return {
            "code": self.code,
            "message": str(self),
            "job_id": self.job_id,
            "value": self.value if plain else str(self.value),
        }


def _one_line(message: str) -> str:
    if "\n" not in message:
        return message
    return " ".join(line.strip() for line in message.splitlines() if line.strip())


class UsageError(GpulayerError):
    """The request cannot be meant as it stands; nothing was submitted."""

    code = "usage"
    exit_code = 2


class BadRequirement(UsageError):
    """A requirement that is not well formed or contradicts another."""

    code = "bad_requirement"


class BadSize(UsageError):
    """A size or duration that cannot be read."""

    code = "bad_size"


class BadSource(UsageError):
    """The folder or file to ship is missing or cannot be read."""

    code = "bad_source"


class SourceTooLarge(UsageError):
    """The folder to ship has more bytes or files than the limit."""

    code = "source_too_large"


class NotPicklable(UsageError):
    """The function or one of its arguments cannot be pickled."""

    code = "not_picklable"


class UnknownName(UsageError):
    """A name that nobody gave to anything; made by `among`, it offers the nearest known one."""

    code = "unknown_name"

    @classmethod
    def among(cls, what: str, name: str, known: Iterable[str]) -> UnknownName:
        """The error for a `what` called `name`, with the nearest known name or all of them."""
        return cls(f"{what} '{name}' is not known: {did_you_mean(name, known)}", value=name)


class MustFit(UsageError):
    """The job was to be refused if no known worker can ever run it, and none can."""

    code = "must_fit"


class TooManyRequirements(UsageError):
    """The namespace holds as many distinct requirements as it may."""

    code = "too_many_requirements"


class IdempotencyConflict(UsageError):
    """The idempotency key belongs to a different request."""

    code = "idempotency_conflict"


class JobNotFound(UsageError):
    """No job has this id, or its record's time is over."""

    code = "job_not_found"

    @classmethod
    def named(cls, job_id: str, *others: str) -> JobNotFound:
        """The error for this id, or for several."""
        whole, slash, _ = job_id.partition("/")
        if slash:
            return cls(f"'{job_id}' is no job: the calls of a map have one id, '{whole}'", value=job_id)
        more = f", nor {len(others)} others" if len(others) > 1 else f", nor '{others[0]}'" if others else ""
        return cls(f"no job '{job_id}'{more}: gpulayer jobs lists them", value=job_id)


class ConfigError(GpulayerError):
    """The set-up is wrong, not the request."""

    code = "config"
    exit_code = 78


class ServerTooOld(ConfigError):
    """The Redis or Valkey server is older than GPUlayer needs."""

    code = "server_too_old"


class UnsafeEviction(ConfigError):
    """The server's maxmemory-policy would let it throw jobs away."""

    code = "unsafe_eviction"


class BadStateFolder(ConfigError):
    """The state or runtime folder is missing rights, or somebody else's."""

    code = "bad_state_folder"


class BadSetting(ConfigError):
    """A setting is unknown, or its value has no sense."""

    code = "bad_setting"


class FormatTooNew(ConfigError):
    """A record holds what only a newer GPUlayer understands."""

    code = "format_too_new"


class Unavailable(GpulayerError):
    """The queue cannot serve this now; the same call may succeed later."""

    code = "unavailable"
    exit_code = 69


class QueueUnreachable(Unavailable):
    """No connection to the queue or server."""

    code = "queue_unreachable"


class QueueFull(Unavailable):
    """The namespace holds as many queued jobs as it may."""

    code = "queue_full"


class ServerOutOfMemory(Unavailable):
    """The queue's server has reached its memory limit and takes nothing new."""

    code = "server_out_of_memory"


class NotAllowed(GpulayerError):
    """The login or token may not do this."""

    code = "not_allowed"
    exit_code = 77


class StoreError(GpulayerError):
    """Stored content is not what was asked for."""

    code = "store"


class BlobMissing(StoreError):
    """The store does not hold this content."""

    code = "blob_missing"


class BlobCorrupt(StoreError):
    """The content does not have the hash that names it."""

    code = "blob_corrupt"


class HostileTree(StoreError):
    """A manifest or archive names a path outside its folder, or what is no file, folder or link."""

    code = "hostile_tree"


class JobError(GpulayerError):
    """The job ended without success; `end_reason` is the typed reason of its final state.

    `log_tail` are the last lines of its log where no traceback says why it died; a note of the error shows them.
    """

    code = "job"

    def __init__(
        self,
        message: str,
        *,
        job_id: str | None = None,
        value: object = None,
        end_reason: str | None = None,
        exit_code: int | None = None,
        log_tail: str = "",
    ) -> None:
        super().__init__(message, job_id=job_id, value=value)
        self.end_reason = end_reason
        self.log_tail = log_tail
        if log_tail:
            self.add_note(f"the last lines of its log:\n{log_tail}")
        if exit_code is not None:
            self.exit_code = exit_code

    def as_dict(self) -> dict[str, object]:
        """As every error's, and the end reason, and the log's last lines where there are any."""
        tail = {"log_tail": self.log_tail} if self.log_tail else {}
        return {**super().as_dict(), "end_reason": self.end_reason, **tail}


class JobFailed(JobError):
    """The command ended with a code other than 0, or by a signal."""

    code = "job_failed"


class RemoteError(JobError):
    """The job's function raised: the error's type by name, its message, and its traceback's text."""

    code = "remote_error"

    def __init__(
        self,
        type_name: str,
        message: str,
        traceback: str = "",
        *,
        job_id: str | None = None,
        end_reason: str | None = "user_error",
        log_tail: str = "",
    ) -> None:
        super().__init__(f"{type_name}: {message}", job_id=job_id, end_reason=end_reason, log_tail=log_tail)
        # Unpickling calls the class with `args`, so they are what the constructor takes.
        self.args = (type_name, message, traceback)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


class ResultNotPicklable(JobError):
    """The function returned something that cannot travel back."""

    code = "result_not_picklable"


class JobCancelled(JobError):
    """Somebody cancelled the job."""

    code = "job_cancelled"
    exit_code = 130


class JobTimedOut(JobError):
    """The job ran longer than its own timeout."""

    code = "job_timed_out"
    exit_code = 124


class WorkerLost(JobError):
    """The job was given up after its workers were lost."""

    code = "worker_lost"
    exit_code = 75


class WaitTimeout(GpulayerError, TimeoutError):
    """The wait ended before the job did; the job goes on."""

    code = "wait_timeout"
    exit_code = 124


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, or what is known, in the order given."""
    from difflib import get_close_matches

    names = list(known)
    if near := get_close_matches(name.lower(), names, n=1, cutoff=0.6):
        return f"did you mean '{near[0]}'?"
    if not names:
        return "none is known"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"known are {', '.join(names[:MOST_NAMES])}{more}"
