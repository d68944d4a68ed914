"""The processes of a farm: workers that build here, and sessions with devices, which come and go."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pretune.errors import MeasureError
from pretune.measure import remote, worker
from pretune.measure.process import SLICE_S, Answer, Died, Job, Late, WorkerProcess, kill_all, wait_any
from pretune.measure.tracker import RPCAddress, Tracker

TOLERANCE = 0.10
"""A device whose calibration kernel takes a different time than the others' by more than this fraction is
set aside, and so is one on which it varies by more than three times as much."""

WAIT_S = 300.0
"""How long there may be no device at all before a run ends, in seconds."""

MAX_DEVICES = 32
"""Sessions at once; each has a process here."""

SESSION_S = 300
"""Sessions end after this long, so that devices are shared, and free again when this machine has vanished."""

OPEN_S = 20.0
"""Seconds that a device may take to open a session, and to calibrate."""

STALL_S = 10.0
"""A device ends a candidate at its deadline by itself; so many seconds later, it is taken as stalled."""

POLL_S = 0.2
NOTICE_S = 0.5
"""Seconds after which the tracker knows that a server is gone."""
LONGEST_ABSENCE_S = 240.0
"""A device that fails again and again is left alone for this long at most, in seconds: less than `WAIT_S`, so
that a run does not end before the last one was looked at again."""
_MAX_START_FAILURES = 3


@dataclass
class Device:
    """What is known about a device.

    Attributes
    ----------
    address : str
        ``HOST:PORT`` of its RPC server.
    speed : float
        Seconds of the calibration kernel, the fastest call; NaN while unknown.
    trials : int
        Candidates it has run.
    failures : int
        Sessions lost in a row.
    away_until : float
        Not used before, by `time.monotonic`.
    """

    address: str
    speed: float = math.nan
    trials: int = 0
    failures: int = 0
    away_until: float = 0.0

    def absence(self) -> float:
        """Seconds to leave it alone after its latest failure."""
        return min(2.0 ** min(self.failures, 10), LONGEST_ABSENCE_S)  # 2.0**1024 is an error


@dataclass
class Trial:
    """A candidate on its way through the farm.

    Attributes
    ----------
    path : Path
        Its library, once it is built.
    seconds : float
        Its deadline where it runs now.
    lost_on : list of str
        Addresses of the devices whose sessions ended while it ran.
    kills : int
        How many of these had a server that lived on.
    """

    job: Job
    path: Path
    signature: worker.Signature = ()
    build_s: float = 0.0
    seconds: float = 0.0
    lost_on: list[str] = field(default_factory=list)
    kills: int = 0


class Session(WorkerProcess):
    """The process of a session with a device.

    Attributes
    ----------
    device : Device or None
        None until there is one for it.
    stage : str
        What it does, or has done last.
    began : float
        When the session was opened, by `time.monotonic`.
    """

    def __init__(self, target: str, num_threads: int) -> None:
        super().__init__(target, num_threads, module=remote.__name__)
        self.device: Device | None = None
        self.stage: Literal["start", "open", "calibrate", "ready"] = "start"
        self.began = 0.0


class Fleet:
    """The workers and sessions of a `FarmPool`. Its parameters are those of the pool.

    Attributes
    ----------
    devices : dict of str to Device
        All that were ever met, by address.
    processes : list of WorkerProcess
        Workers that build, and sessions.
    doing : dict of WorkerProcess to Trial
        Which candidate they work on.
    kernel : Trial or None
        The calibration kernel, built; needed before the first session.
    """

    def __init__(
        self,
        target: str,
        num_threads: int,
        address: RPCAddress,
        *,
        guard: Path,
        tolerance: float,
        wait: float,
        notify: Callable[[str], None],
    ) -> None:
        self.devices: dict[str, Device] = {}
        self.processes: list[WorkerProcess] = []
        self.doing: dict[WorkerProcess, Trial] = {}
        self.kernel: Trial | None = None
        self._target, self._num_threads, self._guard = target, num_threads, guard
        self._tolerance, self._wait, self._notify = tolerance, wait, notify
        self._tracker = Tracker(address)
        self._look_for_servers()
        self._speed = math.nan  # `Device.speed` that is usual here
        self._compared = False
        self._start_failures = 0
        self._next_poll = self._last_look = self._alone_s = 0.0
        self._waiting = False
        self._finalizer = weakref.finalize(self, kill_all, self.processes, os.getpid())

    def sessions(self) -> list[Session]:
        """Those that there are, or will be."""
        return [one for one in self.processes if isinstance(one, Session)]

    def idle(self, seconds: float) -> list[Session]:
        """Sessions that can take a candidate for so many seconds; none before devices have been compared."""
        sessions = self.sessions()
        if not self._compared:
            met = [one for one in sessions if one.stage == "ready"]
            if not met or any(one.busy for one in sessions):
                return []
            self._compare(met)
        idle = []
        for one in self.sessions():
            if one.stage == "ready" and not one.busy:
                if time.monotonic() - one.began + seconds > SESSION_S:
                    self.end(one)
                else:
                    idle.append(one)
        return idle

    def ready(self, seconds: float) -> list[Session]:
        """Wait for a device; all that are `idle`."""
        while not (idle := self.idle(seconds)):
            self.answers(MAX_DEVICES)
        return idle

    def wait_for(self, session: Session) -> Answer:
        """What comes of the candidate that a device runs, while nothing else is done."""
        while True:
            for one, answer in self.answers(0):
                self.doing.pop(one)
                if one is session:
                    return answer

    def answers(self, wanted: int) -> list[tuple[WorkerProcess, Answer]]:
        """Wait a moment for processes; what comes of candidates. Up to `wanted` devices are of use now."""
        if wanted:
            self._recruit(wanted)
        if not any(one.busy for one in self.processes):
            time.sleep(POLL_S)
        answers: list[tuple[WorkerProcess, Answer]] = []
        for one, answer in wait_any(self.processes):
            starting, one.starting = one.starting, False
            if isinstance(answer, Died | Late):
                self.processes.remove(one)
            if starting:
                self._has_started(answer)
            elif one in self.doing:
                answers.append((one, answer))
            elif isinstance(one, Session):
                self._meet(one, answer)
        return answers

    def _has_started(self, answer: Answer) -> None:
        self._start_failures = 0 if isinstance(answer, worker.Done) else self._start_failures + 1
        if not isinstance(answer, worker.Done) and self._start_failures >= _MAX_START_FAILURES:
            raise MeasureError(f"measuring workers do not start: {answer.error}; run: pretune doctor")

    def _recruit(self, wanted: int) -> None:
        """Open sessions with servers that are free."""
        now = time.monotonic()
        sessions = self.sessions()
        held = [one for one in sessions if one.device is not None]
        # In small steps: a machine that was suspended has not waited.
        self._alone_s += min(now - self._last_look, SLICE_S)
        self._last_look = now
        if any(one.stage == "ready" for one in held):
            self._alone_s, self._waiting = 0.0, False
        elif self._alone_s > self._wait:
            address, key = self._tracker.address, self._tracker.address.key
            raise MeasureError(
                f"no device under the key {key} at {address} could be used for {self._wait:.0f} s; "
                "what was measured is kept; "
                f"see: python -m tvm.exec.query_rpc_tracker --host {address.host} --port {address.port}"
            )
        elif self._alone_s > OPEN_S and not self._waiting:
            self._waiting = True
            self._notify(f"waiting for a device, up to {self._wait:.0f} s")
        lacking = min(wanted, MAX_DEVICES) - len(held)
        if now < self._next_poll or lacking <= 0:
            return
        self._next_poll = now + POLL_S
        with contextlib.suppress(MeasureError):  # The tracker may come back; devices in use do not need it.
            free, servers = self._tracker.summary()
            # The tracker gives any server. While the free ones can only be such as are set aside, leave them
            # to others: a server that is taken in vain is free again only after some seconds.
            known = [one.device for one in held if one.device]
            known += [device for device in self.devices.values() if now < device.away_until]
            free = min(free, lacking, len({*servers} - {device.address for device in known}))
            spare = [one for one in sessions if one.device is None]
            for _ in range(free - len(spare)):
                self.processes.append(Session(self._target, self._num_threads))
            for one in [one for one in spare if not one.busy][:free]:
                self._open(one)

    def _open(self, session: Session) -> None:
        """Begin a session with whichever server the tracker gives."""
        server = self._tracker.take()
        if server is None:
            return
        device = self.devices.setdefault(server.address, Device(server.address))
        if time.monotonic() < device.away_until:
            return  # Nobody connects, so its server will be free again in some seconds.
        session.device, session.stage, session.began = device, "open", time.monotonic()
        message = remote.Open(server.host, server.port, server.matchkey, SESSION_S, str(self._guard))
        if not session.send(message, OPEN_S):
            self.end(session)

    def calibrate(self, seconds: float) -> float:
        """Calibrate all devices at once and compare them anew; the `Device.speed` that is usual."""
        for session in self.ready(seconds):
            self._calibrate(session)
        self._compared = False
        self.ready(seconds)
        return self._speed

    def _calibrate(self, session: Session) -> None:
        assert self.kernel is not None
        session.stage = "calibrate"
        if not session.send(remote.CalibrateDevice(str(self.kernel.path), self.kernel.signature), OPEN_S):
            self.end(session)

    def _meet(self, session: Session, answer: Answer) -> None:
        """Take the next step towards a session that can be used."""
        device = session.device
        assert device is not None
        if isinstance(answer, Died | Late):
            self.leave(device, f"fails to {session.stage} ({answer.error})")
        elif isinstance(answer, worker.Failed):
            self.end(session)
            if session.stage == "open":
                self.leave(device, f"opens no session ({answer.error})")
            else:
                self._set_aside(device, answer.error, math.inf)
        elif session.stage == "open":
            self._calibrate(session)
        else:
            session.stage = "ready"
            device.speed = min(answer.latencies)
            if statistics.median(answer.latencies) > (1 + 3 * self._tolerance) * device.speed:
                self.end(session)
                slowest = max(answer.latencies) / device.speed
                self._set_aside(device, f"its timings vary wildly, by a factor of up to {slowest:.1f}")
            elif self._compared:
                self._compare_newcomer(session, device)

    def _compare(self, sessions: Sequence[Session]) -> None:
        """Compare devices that were just calibrated with each other."""
        speeds = {one.device.address: one.device.speed for one in sessions if one.device}
        usual = statistics.median_low(speeds.values())
        change = usual / self._speed - 1
        if abs(change) > self._tolerance:  # false for the first ones
            self._notify(f"the farm's devices take {1 + change:.2f} times as long as before")
        self._speed, self._compared = usual, True
        self._reject(sessions, differing(speeds, usual, self._tolerance))

    def _compare_newcomer(self, session: Session, device: Device) -> None:
        others = [
            one.device.speed for one in self.sessions()
            if one.device and one.stage == "ready" and one is not session
        ]  # fmt: skip
        if others:
            self._speed = statistics.median_low(others)
        elif device.trials:  # It is back, and alone: slower, perhaps, but the same.
            self._speed = device.speed
        self._reject([session], differing({device.address: device.speed}, self._speed, self._tolerance))

    def _reject(self, sessions: Sequence[Session], ratios: Mapping[str, float]) -> None:
        for one in sessions:
            if one.device and (ratio := ratios.get(one.device.address)):
                self.end(one)
                self._set_aside(one.device, f"it takes {ratio:.2f} times as long as the others")

    def _set_aside(self, device: Device, why: str, seconds: float | None = None) -> None:
        """Do not use a device that cannot be trusted, for a while or ever."""
        device.failures += 1
        seconds = seconds or device.absence()
        device.away_until = time.monotonic() + seconds
        again = "" if math.isinf(seconds) else f"; looked at again in {seconds:.0f} s"
        self._notify(f"device {device.address} is set aside: {why}{again}")

    def leave(self, device: Device, why: str) -> None:
        """Try a device that was lost again, later if it happens again and again."""
        device.failures += 1
        if device.failures > 1:
            device.away_until = time.monotonic() + device.absence()
        self._notify(f"device {device.address} {why}; candidates go to others meanwhile")

    def is_connected(self, device: Device) -> bool:
        """Whether the server of a session that has just ended lives on."""
        time.sleep(NOTICE_S)
        with contextlib.suppress(MeasureError):
            return device.address in self._tracker.summary()[1]
        return False

    def send(self, one: WorkerProcess, trial: Trial, message: worker.Request, seconds: float) -> bool:
        """Have a process work on a candidate; False if it was dead."""
        if not one.send(message, seconds):
            self.end(one)
            return False
        self.doing[one] = trial
        return True

    def end(self, one: WorkerProcess) -> None:
        """End a process; its server then takes another client."""
        if one in self.processes:
            self.processes.remove(one)
        one.kill()

    def stop(self) -> None:
        """End all processes."""
        kill_all(self.processes, os.getpid())
        self.doing.clear()

    def _look_for_servers(self) -> None:
        address = self._tracker.address
        _, servers = self._tracker.summary()
        if not servers:
            known = ", ".join(self._tracker.keys()) or "none"
            raise MeasureError(
                f"no server has the key {address.key} at the tracker {address} (keys there: {known}); run on "
                f"each device: python -m tvm.exec.rpc_server --tracker {address} --key {address.key}"
            )


def differing(speeds: Mapping[str, float], usual: float, tolerance: float) -> dict[str, float]:
    """How many times as long as usual the calibration kernel takes on those devices where that is unusual."""
    ratios = {address: speed / usual for address, speed in speeds.items()}
    return {address: ratio for address, ratio in ratios.items() if abs(ratio - 1) > tolerance}
