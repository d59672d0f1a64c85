"""The app that Dramatiq's command line runs in tests: each run of an actor appends a line to the file APP_TOLD."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import dramatiq
from dramatiq.middleware import Middleware, Shutdown

from gpulayer_broker.broker import CapabilityBroker
from gpulayer_broker.settings import load_settings
from tests.support import PATIENCE_S

broker = CapabilityBroker(os.environ["APP_QUEUE"], settings=load_settings())
dramatiq.set_broker(broker)
# A connection that is open before the fork: every process must have its own.
broker.queue.link.call("PING")


def tell(line: str) -> None:
    with open(os.environ["APP_TOLD"], "a") as file:
        file.write(f"{line}\n")


class Ready(logging.Handler):
    """Hears Dramatiq say that its process is up."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage() == "Worker process is ready for action.":
            self.heard.set()


ready = Ready()
logging.getLogger("dramatiq").addHandler(ready)


class Dies(Middleware):
    """Kills its process, once, at the moment that APP_DIES names: the follow-up is over, or the end is committed.

    Not before it has told its master that it is up: killed with the lock of that in its hand, it leaves a master that
    waits for the lock for ever.
    """

    def _die(self, moment: str) -> None:
        marker = os.environ["APP_TOLD"] + ".died"
        if os.environ.get("APP_DIES") == moment and not os.path.exists(marker):
            open(marker, "w").close()
            assert ready.heard.wait(PATIENCE_S), "Dramatiq does not say that it is up"
            os.kill(os.getpid(), signal.SIGKILL)

    def before_ack(self, broker: dramatiq.Broker, message: dramatiq.MessageProxy) -> None:
        self._die("before")

    def after_ack(self, broker: dramatiq.Broker, message: dramatiq.MessageProxy) -> None:
        self._die("after")


broker.add_middleware(Dies())


@dramatiq.actor
def first(name: str) -> str:
    tell(f"first {name}")
    return name


@dramatiq.actor
def second(name: str) -> None:
    tell(f"second {name}")


@dramatiq.actor(queue_name="elsewhere")
def elsewhere(name: str) -> None:
    tell(f"elsewhere {name}")


@dramatiq.actor(max_retries=5, min_backoff=50, max_backoff=100)
def flaky(name: str) -> None:
    tell(f"flaky {name}")
    if Path(os.environ["APP_TOLD"]).read_text().count(f"flaky {name}") == 1:
        raise RuntimeError("the first try fails")


@dramatiq.actor
def process_of(name: str) -> None:
    tell(f"process {os.getpid()} {name}")
    time.sleep(0.1)


@dramatiq.actor(notify_shutdown=True, max_retries=3, min_backoff=1, max_backoff=2)
def interruptible(name: str) -> None:
    tell(f"began {name}")
    try:
        for _ in range(600):
            time.sleep(0.05)
    except Shutdown:
        tell(f"interrupted {name}")
        raise
