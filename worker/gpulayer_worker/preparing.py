"""What a job's folder holds before the job begins: its source, its inputs, and what other jobs have returned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event

from gpulayer_broker.errors import QueueUnreachable
from gpulayer_broker.given import Given
from gpulayer_broker.settings import Settings
from gpulayer_broker.spec import Spec
from gpulayer_broker.store.blobstore import BlobStore
from gpulayer_broker.store.tree import Manifest
from gpulayer_broker.store.unpack import load_manifest, unpack
from gpulayer_worker.given import write_given
from gpulayer_worker.scratch import Scratch
from gpulayer_worker.workshop import Workshop

OUTAGE_PAUSE_S = 0.2


def unpack_folders(spec: Spec, store: BlobStore, settings: Settings, folder: Path) -> Manifest | None:
    """Unpacks source and inputs, which may replace files of the source; what is in the folder then."""
    whole: Manifest | None = None
    for digest in filter(None, (spec.source, spec.inputs)):
        manifest = load_manifest(digest, store)
        unpack(
            manifest,
            store,
            folder,
            limit_bytes=settings.source_bytes,
            limit_files=settings.source_files,
            replace=True,
        )
        known = whole.entries if whole else ()
        paths = {entry.path for entry in manifest.entries}
        whole = Manifest.of([*(each for each in known if each.path not in paths), *manifest.entries])
    return whole


def fetch_given(
    given: Sequence[Given], shop: Workshop, store: BlobStore, scratch: Scratch, stopped: Event
) -> None:
    """Writes what other jobs returned; an outage of the queue is waited out, until the attempt is stopped."""
    while given:
        try:
            limit_bytes = shop.settings.argument_blob_bytes
            write_given(given, shop.results, store, Path(scratch.file("given")), limit_bytes)
            return
        except QueueUnreachable:
            if stopped.wait(OUTAGE_PAUSE_S):
                return
