"""What a job is to do: the immutable record that the queue carries and gives back verbatim.

One canonical encoding, versioned: a Dramatiq message of the actor `gpulayer.run` in JSON with sorted keys, so
that the same job has the same bytes wherever it is encoded. What changes between attempts (retries, tracebacks)
stands beside it in the job's record, never in it. Fields that a newer release added survive decoding and encoding.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpulayer_broker import inline
from gpulayer_broker.errors import FormatTooNew, GpulayerError, UsageError
from gpulayer_broker.given import Given
from gpulayer_broker.requirements import DEFAULT_QUEUE

FORMAT = 1
ACTOR = "gpulayer.run"


class UndecodableSpec(GpulayerError):
    """A record in the queue is not a job that this release can read; it is set aside, and the queue goes on."""

    code = "undecodable"


@dataclass(frozen=True)
class Payload:
    """Bytes that travel with a job: in the record itself (`data`), or in the store under their SHA-256."""

    data: bytes | None = None
    sha256: str = ""
    size: int = 0

    def encode(self) -> Mapping[str, Any]:
        if self.data is not None:
            return inline.pack(self.data)
        return {"sha256": self.sha256, "size": self.size}

    @classmethod
    def decode(cls, raw: Mapping[str, Any]) -> Payload:
        if "sha256" in raw:
            return cls(None, str(raw["sha256"]), int(raw["size"]))
        data = inline.unpack(raw)
        return cls(data, "", len(data))


@dataclass(frozen=True)
class FunctionCall:
    """A pickled function and its pickled (args, kwargs), the Python that pickled them and what to import beforehand.

    `given` are arguments that other jobs return.
    """

    function: Payload
    arguments: Payload
    module: str = ""
    qualname: str = ""
    python: str = ""
    modules: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()


@dataclass(frozen=True)
class Spec:
    """One job. `source` and `inputs` are digests of manifests; `outputs` are globs below the job's folder;
    `retry_on` are the failures that another try may mend (all where it is empty), as `failures.py` names them."""

    kind: str
    name: str = ""
    argv: tuple[str, ...] = ()
    call: FunctionCall | None = None
    requirements: bytes = b"{}"
    source: str = ""
    inputs: str = ""
    outputs: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None
    isolation: str = "fresh"
    on_outage: str = ""
    retry_on: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_preparation(self) -> bool:
        """Whether a worker has something to fetch before the job itself can start."""
        return bool(self.source or self.inputs)


class Frame(NamedTuple):
    """A message but for the arguments of its call, its id and its time: what stands before, between and after them."""

    before: bytes
    id: bytes
    time: bytes
    after: bytes

    def filled(self, job_id: str, created_ms: int, arguments: Payload) -> bytes:
        """What `encode` gives for such a job with these arguments."""
        before, before_id, before_time, after = self
        data = arguments.data
        told = inline.written(data) if data is not None else _dumped(arguments.encode())
        # An id is of letters that JSON writes as they are.
        return b"%b%b%b%b%b%d%b" % (before, told, before_id, job_id.encode(), before_time, created_ms, after)


def frame(spec: Spec, options: Mapping[str, Any] | None = None) -> Frame:
    """The frame of all jobs that differ from this one in the arguments of their call alone."""
    # What is drawn anew stands nowhere else in the message, whatever its names and texts are.
    mark = secrets.token_hex(16)
    plain = _plain(spec)
    plain["call"]["arguments"] = mark
    data = _dumped(_message(mark, mark, plain, options))
    before, before_id, time, after = data.split(b'"%b"' % mark.encode())
    return Frame(before, before_id + b'"', b'"' + time, after)


def encode(job_id: str, created_ms: int, spec: Spec, options: Mapping[str, Any] | None = None) -> bytes:
    """The message, as bytes; `options` are the message's options (max_retries, min_backoff, …)."""
    return _dumped(_message(job_id, created_ms, _plain(spec), options))


def _message(
    job_id: str, created_ms: int | str, job: Mapping[str, Any], options: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "actor_name": ACTOR,
        "args": [],
        "kwargs": {"job": job},
        "message_id": job_id,
        "message_timestamp": created_ms,
        "options": dict(options or {}),
        "queue_name": DEFAULT_QUEUE,
    }


def decode(data: bytes) -> Spec:
    """The spec of an encoded message; UndecodableSpec for anything else."""
    import orjson

    try:
        return decode_job(orjson.loads(data)["kwargs"]["job"])
    except (ValueError, KeyError, TypeError) as error:
        raise UndecodableSpec(f"not a job's record: {type(error).__name__}: {error}") from None


def job_of(data: bytes) -> dict[str, Any]:
    """What an encoded message says of its job, undecoded."""
    import orjson

    return dict(orjson.loads(data)["kwargs"]["job"])


def message_options(data: bytes) -> dict[str, Any]:
    """The options of an encoded message, such as max_retries."""
    import orjson

    try:
        return dict(orjson.loads(data)["options"])
    except (ValueError, KeyError, TypeError) as error:
        raise UndecodableSpec(f"not a job's record: {type(error).__name__}: {error}") from None


def decode_job(raw: Mapping[str, Any]) -> Spec:
    """The spec of a message's `job` argument; UndecodableSpec where a field is missing or of another type."""
    try:
        version = raw["v"]
        if not isinstance(version, int) or version > FORMAT:
            raise FormatTooNew(
                f"job record of format {version}: update gpulayer on this machine", value=version
            )
        return Spec(
            kind=_kind(raw["kind"]),
            name=str(raw.get("name", "")),
            argv=tuple(map(str, raw.get("argv", ()))),
            call=_call(raw["call"]) if raw.get("call") else None,
            requirements=str(raw.get("requirements", "{}")).encode(),
            source=str(raw.get("source", "")),
            inputs=str(raw.get("inputs", "")),
            outputs=tuple(map(str, raw.get("outputs", ()))),
            env={str(k): str(v) for k, v in dict(raw.get("env", {})).items()},
            timeout_s=None if raw.get("timeout_s") is None else float(raw["timeout_s"]),
            isolation=str(raw.get("isolation", "fresh")),
            on_outage=str(raw.get("on_outage", "")),
            retry_on=tuple(map(str, raw.get("retry_on", ()))),
            extra={key: value for key, value in raw.items() if key not in _KNOWN},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UndecodableSpec(f"not a job's record: {type(error).__name__}: {error}") from None


def request_digest(spec: Spec) -> str:
    """What an idempotency key compares: the request, not a function's pickle (which differs between runs).

    Nor the job that submitted it: a parent that runs again as another job means the same child.
    """

    plain = _plain(spec)
    plain.pop("parent", None)
    if spec.call:
        plain["call"] = {
            "module": spec.call.module,
            "qualname": spec.call.qualname,
            "arguments": _digest(spec.call.arguments),
            **({"given": [each.encode() for each in spec.call.given]} if spec.call.given else {}),
        }
    return hashlib.sha256(_dumped(plain)).hexdigest()


def lane_of(spec: Spec) -> str:
    """What calls agree in that one slot may run one after another; '' where that is not for this one.

    All but their arguments. A retry, an array's items and what other jobs return are for a message of their own.
    """
    if spec.call is None or spec.call.given or spec.needs_preparation or spec.outputs:
        return ""
    plain = _plain(spec)
    plain["call"]["arguments"] = None
    return hashlib.blake2b(_dumped(plain), digest_size=10).hexdigest()


def _dumped(plain: Mapping[str, Any] | str) -> bytes:
    import orjson

    try:
        return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise UsageError(
            f"the job cannot be written down: {error}; its command, variables and patterns are UTF-8 text"
        ) from None


_KNOWN = frozenset(
    {
        "v",
        "kind",
        "name",
        "argv",
        "call",
        "requirements",
        "source",
        "inputs",
        "outputs",
        "env",
        "timeout_s",
        "isolation",
        "on_outage",
        "retry_on",
    }
)
_KINDS = ("command", "function")


def _plain(spec: Spec) -> dict[str, Any]:
    """The fields that say something; a default is left out, so that records stay small."""
    plain: dict[str, Any] = {**spec.extra, "v": FORMAT, "kind": spec.kind}
    if spec.call:
        call = spec.call
        plain["call"] = {
            "function": call.function.encode(),
            "arguments": call.arguments.encode(),
            "module": call.module,
            "qualname": call.qualname,
            "python": call.python,
            "modules": list(call.modules),
        }
        if call.given:
            plain["call"]["given"] = [each.encode() for each in call.given]
    optional: dict[str, Any] = {
        "name": spec.name,
        "argv": list(spec.argv),
        "requirements": spec.requirements.decode(),
        "source": spec.source,
        "inputs": spec.inputs,
        "outputs": list(spec.outputs),
        "env": dict(spec.env),
        "on_outage": spec.on_outage,
        "retry_on": list(spec.retry_on),
    }
    plain.update({key: value for key, value in optional.items() if value})
    if spec.timeout_s is not None:
        plain["timeout_s"] = spec.timeout_s
    if spec.isolation != "fresh":
        plain["isolation"] = spec.isolation
    return plain


def _kind(value: Any) -> str:
    if value not in _KINDS:
        raise ValueError(f"kind is {value!r}")
    return str(value)


def _call(raw: Mapping[str, Any]) -> FunctionCall:
    return FunctionCall(
        function=Payload.decode(raw["function"]),
        arguments=Payload.decode(raw["arguments"]),
        module=str(raw.get("module", "")),
        qualname=str(raw.get("qualname", "")),
        python=str(raw.get("python", "")),
        modules=tuple(map(str, raw.get("modules", ()))),
        given=tuple(map(Given.decode, raw.get("given", ()))),
    )


def _digest(payload: Payload) -> str:
    return payload.sha256 or hashlib.sha256(payload.data or b"").hexdigest()
