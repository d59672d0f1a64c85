"""What has ended, run again: the same files, arguments and options under new ids.

Of a group the members that did not succeed can be chosen, of an array the items. What is not there any more (files, or
which items failed) is told before anything is submitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpulayer.options import Plan
from gpulayer.payload import Courier
from gpulayer.session import Session
from gpulayer.submitting import Order
from gpulayer_broker import requirements
from gpulayer_broker.errors import BlobMissing, UsageError
from gpulayer_broker.items import Items, pack_items, read_outcomes
from gpulayer_broker.job import MESSAGE, JobRecord
from gpulayer_broker.spec import Payload, Spec, decode, message_options


def orders_again(session: Session, records: Sequence[JobRecord]) -> list[Order]:
    """An order for each ended job; BlobMissing if the files of one are no longer kept."""
    specs = [_ended_spec(record) for record in records]
    missing = session.store.has({sha for spec in specs for sha in _blobs_of(spec)})
    for record, spec in zip(records, specs, strict=True):
        if missing & _blobs_of(spec):
            raise BlobMissing(
                f"job {record.id} cannot be run again: its files are no longer kept; submit it anew",
                job_id=record.id,
            )
    return [_order(record, spec) for record, spec in zip(records, specs, strict=True)]


def failed_items_again(session: Session, courier: Courier, record: JobRecord) -> Order | None:
    """An order for an array of the items that did not succeed, in their order; None where all did."""
    (order,) = orders_again(session, [record])
    call = order.spec.call
    assert call is not None
    numbers = _without_success(session, record)
    if not numbers:
        return None
    items = Items(_bytes_of(session, call.arguments))
    label = f"arguments of '{call.qualname or 'function'}'"
    arguments = courier.items(pack_items([items[number] for number in numbers]), label)
    return replace(
        order, spec=replace(order.spec, call=replace(call, arguments=arguments)), count=len(numbers)
    )


def _without_success(session: Session, record: JobRecord) -> list[int]:
    pages = session.attempt(lambda queue: queue.pages(record.id))
    done, _ = session.attempt(lambda queue: queue.item_counts(record.id))
    outcomes = {n: outcome.ok for start, page in pages.items() for n, outcome in read_outcomes(start, page)}
    if len(outcomes) < done:
        raise BlobMissing(
            f"which items of job {record.id} failed is no longer kept: gpulayer retry {record.id} runs them all",
            job_id=record.id,
        )
    return [number for number in range(record.count) if not outcomes.get(number)]


def _ended_spec(record: JobRecord) -> Spec:
    if not record.final:
        raise UsageError(
            f"job {record.id} is {record.state}: only what has ended can be run again", job_id=record.id
        )
    if record.kind == MESSAGE:
        raise UsageError(
            f"job {record.id} is a message of a Dramatiq app, which requeues it: broker.requeue_dead_letters",
            job_id=record.id,
        )
    return decode(record.spec)


def _order(record: JobRecord, spec: Spec) -> Order:
    plan = Plan(
        requirements.decode(spec.requirements),
        name=record.name,
        priority=record.priority,
        on_outage=spec.on_outage,
        retries=int(message_options(record.spec).get("max_retries") or 0),
        permit=record.permit,
        rate=record.rate,
        keep_ms=record.keep_ms,
    )
    again = replace(spec, extra={**spec.extra, "retry_of": record.id})
    return Order(again, plan, record.count)


def _blobs_of(spec: Spec) -> set[str]:
    """The blobs without which the job cannot begin, those that its manifests name apart."""
    payloads = (spec.call.function, spec.call.arguments) if spec.call else ()
    return {sha for sha in (spec.source, spec.inputs, *(payload.sha256 for payload in payloads)) if sha}


def _bytes_of(session: Session, payload: Payload) -> bytes:
    if payload.data is not None:
        return payload.data
    return session.store.read_bytes(payload.sha256, session.settings.argument_blob_bytes)
