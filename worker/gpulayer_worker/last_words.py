"""What a job's log ended with, put into the error of a job that died: a kill by the kernel leaves no other word.

Only for deaths that no traceback explains: by a signal, for memory, for disk, past the timeout, by an exit code. What
succeeded, raised, or was handed back costs one comparison.
"""

from __future__ import annotations

from dataclasses import replace

from gpulayer_broker.consumer import Outcome, dumps, loads
from gpulayer_broker.log_lines import last_lines
from gpulayer_worker.joblog import JobLog

# Enough for the last lines behind a progress bar that was drawn a few hundred times.
READ_BYTES = 1 << 16
# Of a process that ended, and did not tell itself why.
DEATHS = frozenset({"CommandFailed", "DiskOver", "JobTimedOut", "NoReport", "OutOfMemory", "Signalled"})


def with_last_words(outcome: Outcome, job_log: JobLog | None) -> Outcome:
    """The outcome; that of a death has the log's last lines in its error, as `tail`. The log is complete by now."""
    error = outcome.fields.get("error")
    if job_log is None or not job_log.size or not isinstance(error, bytes):
        return outcome
    told = loads(error)
    if told.get("type") not in DEATHS or told.get("traceback"):
        return outcome
    tail = last_lines(job_log.last(READ_BYTES))
    return (
        replace(outcome, fields={**outcome.fields, "error": dumps({**told, "tail": tail})})
        if tail
        else outcome
    )
