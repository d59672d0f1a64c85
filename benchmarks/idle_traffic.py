"""What idle workers cost: commands a worker and second, and the server's share of a core, for 1 and for 1,000 of them.

    python benchmarks/idle_traffic.py [--seconds 40] [--save FOLDER]

One worker is a real membership with its three connections. A thousand are a thousand connections that send what a
membership sends when idle (a blocking read, a claim after it, a renewal), at the default intervals, from one event
loop: a thousand processes do not fit on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import machine, own_queue, requirements_of, save
from gpulayer_broker import functions
from gpulayer_broker.attempts import Attempt
from gpulayer_broker.connection import Endpoint
from gpulayer_broker.functions import Call, Offer, Registration
from gpulayer_broker.local_facts import own_capabilities
from gpulayer_broker.member import Callbacks, Identity, Member
from gpulayer_broker.queue import Queue
from gpulayer_broker.settings import Settings

MANY = 1000
SETTINGS = Settings(namespace="bench")


def counters(queue: Queue) -> tuple[int, float]:
    """(commands that clients sent, CPU seconds of the server)."""
    text = queue.link.call("INFO", "everything").decode()
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    cpu_s = float(facts["used_cpu_user"]) + float(facts["used_cpu_sys"])
    sent = sum(
        int(value.split("calls=")[1].split(",")[0])
        for name, value in facts.items()
        if name in ("cmdstat_fcall", "cmdstat_xread", "cmdstat_ping")
    )
    return sent, cpu_s


def measure(queue: Queue, workers: int, seconds: float) -> dict[str, Any]:
    before, start = counters(queue), time.monotonic()
    time.sleep(seconds)
    after, took_s = counters(queue), time.monotonic() - start
    return {
        "workers": workers,
        "commands_per_worker_s": (after[0] - before[0]) / workers / took_s,
        "server_cpu_percent": (after[1] - before[1]) / took_s * 100,
    }


def one(endpoint: Endpoint, queue: Queue, seconds: float) -> dict[str, Any]:
    def refuse(attempt: Attempt) -> None:
        raise AssertionError("nothing was submitted")

    caps = own_capabilities(queues=("gpulayer",))
    member = Member(endpoint, SETTINGS, Identity("w_bench", "n_bench"), caps, Callbacks(deliver=refuse))
    member.join(2)
    try:
        time.sleep(2)
        return measure(queue, 1, seconds)
    finally:
        member.leave()


class Idler:
    """One connection that behaves like an idle worker."""

    def __init__(self, queue: Queue, number: int) -> None:
        self.root, self.id = queue.keys.root, f"w_{number}"
        self.inbox = queue.keys.inbox(self.id)

    async def connect(self, path: str) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(path)

    async def send(self, *args: object) -> Any:
        parts = [b"*%d\r\n" % len(args)]
        for arg in args:
            raw = arg if isinstance(arg, bytes) else str(arg).encode()
            parts.append(b"$%d\r\n%s\r\n" % (len(raw), raw))
        self.writer.write(b"".join(parts))
        return await self.reply()

    async def reply(self) -> Any:
        line = (await self.reader.readline())[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b"*":
            return None if rest == b"-1" else [await self.reply() for _ in range(int(rest))]
        if kind == b"$":
            return None if rest == b"-1" else (await self.reader.readexactly(int(rest) + 2))[:-2]
        return rest

    async def run(self, call: Call[Any]) -> Any:
        return await self.send(*call.command(self.root))

    async def idle(self, caps_id: str, caps: bytes, sent: list[int]) -> None:
        registration = Registration(
            self.id, f"n_{self.id}", "i", caps_id, 2, 2, 8000, 10_000, 10_000, b"{}", caps
        )
        await self.run(functions.register(registration, "0", {}))
        beat_s = time.monotonic() + secrets.randbelow(10_000) / 1000
        while True:
            sent[0] += 2
            offer = Offer(self.id, "i", 2, secrets.token_hex(16), 60_000, 1 << 20)
            await self.run(functions.claim(offer))
            await self.send("XREAD", "BLOCK", 10_000, "STREAMS", self.inbox, "0-0")
            if time.monotonic() > beat_s:
                sent[0] += 1
                beat_s = time.monotonic() + 10
                await self.run(functions.renew(self.id, "i", 60_000, ()))


async def crowd(endpoint: Endpoint, queue: Queue, seconds: float) -> dict[str, Any]:
    caps = own_capabilities(queues=("gpulayer",))
    idlers = [Idler(queue, n) for n in range(MANY)]
    sent = [0]
    tasks = []
    for idler in idlers:
        await idler.connect(endpoint.path)
        tasks.append(asyncio.create_task(idler.idle(caps.class_id, caps.canonical(), sent)))
        await asyncio.sleep(0.01)
    await asyncio.sleep(2)
    before, first, start = counters(queue), sent[0], time.monotonic()
    await asyncio.sleep(seconds)
    after, took_s = counters(queue), time.monotonic() - start
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "workers": MANY,
        "commands_per_worker_s": (sent[0] - first) / MANY / took_s,
        "server_cpu_percent": (after[1] - before[1]) / took_s * 100,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--save", metavar="FOLDER")
    args = parser.parse_args()
    print(machine())
    rows = []
    with own_queue() as (endpoint, queue):
        queue.introduce(requirements_of(0))
        rows.append(one(endpoint, queue, args.seconds))
    with own_queue() as (endpoint, queue):
        rows.append(asyncio.run(crowd(endpoint, queue, args.seconds)))
    for row in rows:
        print(
            f"{row['workers']:>5} idle: {row['commands_per_worker_s']:.2f} commands a worker and second, "
            f"server {row['server_cpu_percent']:.2f} % of a core"
        )
    save("idle_traffic", {"rows": rows}, args.save)


if __name__ == "__main__":
    main()
