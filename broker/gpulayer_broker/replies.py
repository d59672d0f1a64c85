"""What a queue server can answer instead of a reply, for those who react to it.

NoAnswer, a QueueUnreachable, is what passes (a lost connection, loading, a failover, a full disk): worth another
try. Whatever the server refuses that is nobody's fault but the caller's is a ReplyError with the reply's first word:
functions answer with words of their own.
"""

from __future__ import annotations

from gpulayer_broker.errors import GpulayerError, QueueUnreachable


class NoAnswer(QueueUnreachable):
    """The server did not answer, or not now. `sent` is False only when it surely did not run the command.

    `word` is the first of its refusal, such as LOADING or MISCONF; empty where nothing came.
    """

    def __init__(self, message: str, *, sent: bool = False, word: str = "") -> None:
        super().__init__(message)
        self.sent = sent
        self.word = word


class ReplyError(GpulayerError):
    """An error reply that has no class of its own; `word` is its first, such as ERR, WRONGTYPE or STALE."""

    code = "reply_error"

    def __init__(self, text: str, *, word: str = "ERR") -> None:
        super().__init__(text)
        self.word = word
