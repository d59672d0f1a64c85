"""Keeps an eye on a machine's devices while a worker runs, through child processes that may hang or die.

One thread, one child that serves readings and tells of critical errors (Xid), and now and then a fresh one that looks
at everything anew: only a fresh process sees that a driver was changed under the machine. Whoever asks gets an answer
within a fraction of a second, or the answer that the driver gives none; heartbeats never ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpulayer_broker.errors import GpulayerError
from gpulayer_worker.devices.facts import Device, Reading, Report, readings_of
from gpulayer_worker.devices.probe import Child

log = logging.getLogger("gpulayer")

READING_AGE_S = 0.2
READING_LIMIT_S = 0.5
RETRY_S = 1.0
# A driver that was silent for so many limits is taken for dead, and the jobs on its devices for lost.
DEAD_AFTER_LIMITS = 3

# Errors of a program that used the device; the device itself goes on.
APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
XIDS = {
    48: "double-bit memory error",
    63: "faulty memory to be remapped at a reset",
    64: "memory remapping failed",
    74: "NVLink error",
    79: "fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its firmware does not answer",
    120: "its firmware failed",
}


@dataclass(frozen=True)
class Sight:
    """What is known now. While the driver is silent the devices are those of its last answer."""

    report: Report = field(default_factory=Report)
    answers: bool = True
    dead: bool = False
    read_s: float = 0.0

    @property
    def usable(self) -> tuple[Device, ...]:
        return self.report.usable

    def reading(self, uuid: str) -> Reading | None:
        return self.report.reading(uuid)


class Watch(threading.Thread):
    """`on_change` is told, on this thread, when devices come, go, or fall silent; it is told again if it fails."""

    def __init__(
        self,
        *,
        limit_s: float,
        every_s: float,
        read_every_s: float,
        root: Path | None = None,
        on_change: Callable[[Sight], None] = lambda sight: None,
    ) -> None:
        super().__init__(name="gpulayer-devices", daemon=True)
        self.on_change = on_change
        self._limit_s, self._every_s, self._read_every_s, self._root = limit_s, every_s, read_every_s, root
        self._changed = threading.Condition()
        self._sight: Sight | None = None
        self._told: Sight | None = None
        self._wanted = False
        self._serving: Child | None = None
        self._coming: Child | None = None
        self._next_look_s = 0.0
        self._failures = 0
        self._silent_since_s: float | None = None
        self._sick: dict[str, str] = {}
        self._known: dict[str, Device] = {}
        self._stopping = False
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)

    # --- for other threads ---

    def first(self) -> Sight:
        """The first look, which takes at most the probe's limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._sight is not None, self._limit_s + READING_LIMIT_S)
            return self._sight or Sight(answers=False)

    @property
    def sight(self) -> Sight:
        """What is known, without asking."""
        return self._sight or Sight(answers=False)

    def fresh(self) -> Sight:
        """What is true now, asked of the driver unless that was just done; a silent driver is waited for once."""
        if threading.current_thread() is self:
            return self.sight  # it cannot wait for its own answer
        asked_s = time.monotonic()
        with self._changed:
            if self._sight is None or not self._sight.answers or not self._sight.usable:
                return self.sight
            if not self._is_fresh(asked_s) and not self._overdue(asked_s):
                self._wanted = True
                self._wake()
                self._changed.wait_for(lambda: self._is_fresh(asked_s), READING_LIMIT_S)
            return self.sight if self._is_fresh(asked_s) else replace(self.sight, answers=False)

    def _is_fresh(self, asked_s: float) -> bool:
        return not self.sight.answers or self.sight.read_s >= asked_s - READING_AGE_S

    def _overdue(self, now_s: float) -> bool:
        child = self._serving
        return child is not None and child.asked_s is not None and now_s - child.asked_s > READING_LIMIT_S

    def stop(self) -> None:
        self._stopping = True
        self._wake()
        if self.ident is not None:
            self.join(self._limit_s)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"x")

    # --- the thread ---

    def run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        finally:
            for child in (self._serving, self._coming):
                if child is not None:
                    child.kill()
            os.close(self._wake_reader)

    def _turn(self) -> None:
        try:
            self._keep_time(time.monotonic())
            self._tell()
            self._listen()
        except Exception:  # the thread must go on: without it GPUs would never be offered again
            log.exception("watching the devices")
            time.sleep(RETRY_S)

    def _listen(self) -> None:
        children = [child for child in (self._serving, self._coming) if child is not None]
        waited_for: list[int | Child] = [self._wake_reader, *children]
        ready, _, _ = select.select(waited_for, [], [], self._pause_s())
        if self._wake_reader in ready:
            os.read(self._wake_reader, 4096)
        for child in children:
            if child in ready:
                self._hear(child)

    def _pause_s(self) -> float:
        """Until the next thing that is due without anybody's word."""
        due_s = [self._next_look_s] if self._coming is None else [self._coming.started_s + self._limit_s]
        if self._serving is not None:
            asked_s = self._serving.asked_s
            due_s.append(
                self.sight.read_s + self._read_every_s if asked_s is None else asked_s + self._limit_s
            )
        if self._silent_since_s is not None and not self.sight.dead:
            due_s.append(self._silent_since_s + DEAD_AFTER_LIMITS * self._limit_s)
        if self._told != self._sight:
            due_s.append(time.monotonic() + RETRY_S)
        return max(0.0, min(due_s) - time.monotonic())

    def _hear(self, child: Child) -> None:
        for kind, content in child.messages():
            if kind == "report":
                self._reported(child)
            elif kind == "readings":
                self._read(*content)
            elif kind == "xid":
                self._xid(content["uuid"], content["code"])
        if child.ended:
            self._gone(child)

    def _keep_time(self, now_s: float) -> None:
        serving, coming = self._serving, self._coming
        if coming is not None and now_s - coming.started_s >= self._limit_s:
            self._silent(coming, now_s)
        if serving is not None and serving.asked_s is not None and now_s - serving.asked_s >= self._limit_s:
            self._silent(serving, now_s)
        if self._coming is None and now_s >= self._next_look_s:
            self._coming = Child(self._root)
            self._next_look_s = now_s + self._every_s
        if self._silent_since_s is not None and not self.sight.dead:
            self._set(
                replace(self.sight, dead=now_s - self._silent_since_s >= DEAD_AFTER_LIMITS * self._limit_s)
            )
        due = self._wanted or now_s - self.sight.read_s >= self._read_every_s
        if self._serving is not None and self._serving.asked_s is None and due:
            self._wanted = False
            self._serving.ask()

    def _reported(self, child: Child) -> None:
        """A fresh look is complete: its child serves from now on."""
        assert child.report is not None
        former = self._serving
        self._serving, self._coming, self._failures = child, None, 0
        if former is not None:
            former.kill()
        self._silent_since_s = None
        self._set(Sight(self._judged(child.report), read_s=child.started_s))

    def _judged(self, report: Report) -> Report:
        """The report with what it cannot know: what was there before, and what told of an error."""
        failures = {reading.uuid: reading.failure for reading in report.readings}
        devices = [
            device.unusable(reason)
            if (reason := self._sick.get(device.uuid) or failures.get(device.uuid)) and device.usable
            else device
            for device in report.devices
        ]
        self._known.update((device.uuid, device) for device in devices if device.usable)
        here = {device.uuid for device in devices}
        why = report.faults[0] if report.faults else "no longer shown by its driver"
        gone = [
            device.unusable(why)
            for uuid, device in self._known.items()
            if uuid not in here and not device.mig and not _is_taken(devices, device)
        ]
        return replace(report, devices=(*devices, *gone))

    def _read(self, asked_s: float, records: Any) -> None:
        if self._serving is None or self._serving.report is None:
            return
        self._silent_since_s = None
        report = self._judged(replace(self._serving.report, readings=readings_of(records)))
        self._set(Sight(report, read_s=asked_s))

    def _xid(self, uuid: str, code: int) -> None:
        if code in APPLICATION_XIDS:
            log.warning("device %s: Xid %d, an error of the program that used it", uuid, code)
            return
        what = XIDS.get(code, "critical error")
        self._sick[uuid] = f"Xid {code}: {what}; reset the device, then restart the worker"
        log.error("device %s is not used any more: Xid %d, %s", uuid, code, what)
        self._set(replace(self.sight, report=self._judged(self.sight.report)))

    def _gone(self, child: Child) -> None:
        """A child has ended: as it should, with nothing to serve, or in the middle."""
        child.kill()
        if child is self._serving:
            self._serving = None
            served = child.report is not None and child.report.usable
        else:
            self._coming = None
            served = ()
            if self._sight is None:
                self._set(Sight(child.listed, answers=False))
        if served or child.report is None:
            log.warning("the process that asks the device drivers has ended (%s); another starts", child.exit)
            self._failures += child.report is None
            pause_s = min(self._every_s, RETRY_S * 2 ** min(self._failures, 6))
            self._next_look_s = min(self._next_look_s, time.monotonic() + pause_s)

    def _silent(self, child: Child, now_s: float) -> None:
        """The driver takes too long: nothing is known of its devices until it answers again."""
        child.kill()
        self._serving = None if child is self._serving else self._serving
        self._coming = None if child is self._coming else self._coming
        if self._silent_since_s is None:
            log.error("the device driver does not answer within %g s", self._limit_s)
            self._silent_since_s = now_s
        self._next_look_s = now_s + RETRY_S
        known = self._sight.report if self._sight is not None else child.listed
        self._set(replace(self.sight, report=known, answers=False))

    def _set(self, sight: Sight) -> None:
        with self._changed:
            self._sight = sight
            self._changed.notify_all()

    def _tell(self) -> None:
        """Tells what changed but for mere readings; on failure it is tried again."""
        sight = self._sight
        if sight is None or (self._told is not None and _same(self._told, sight)):
            self._told = sight
            return
        try:
            self.on_change(sight)
            self._told = sight
        except GpulayerError as error:
            log.warning("devices have changed, which could not be told: %s", error)


def _is_taken(devices: list[Device], other: Device) -> bool:
    """Whether one of the devices sits where the other did: a card that the driver cannot name any more."""
    return other.pci is not None and any(device.pci == other.pci for device in devices)


def _same(one: Sight, other: Sight) -> bool:
    return (one.report.devices, one.answers, one.dead) == (other.report.devices, other.answers, other.dead)
