"""A farm: candidates are built here, and timed on the devices behind TVM's RPC tracker."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from pretune import env
from pretune.errors import EnvironmentFaultError, MeasureError, one_line
from pretune.measure import remote, worker
from pretune.measure.base import MAX_WORKERS, SLOW_FACTOR, OnResult, Pool, timed
from pretune.measure.process import Answer, Died, Job, Late, WorkerProcess, kill_all, wait_any
from pretune.measure.result import ErrorKind, Measured
from pretune.measure.tracker import RPCAddress, Tracker
from pretune.messages import notice

if TYPE_CHECKING:
    import tvm

GUARD = Path(__file__).parent / "guard.cc"

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

MAX_KILLS, MAX_LOST = 2, 3
"""A candidate is at fault once it has ended so many sessions of servers that lived on, or so many in all."""

POLL_S = 0.5
LONGEST_ABSENCE_S = 60.0
"""A device that fails again and again is left alone for this long, in seconds."""
_MAX_START_FAILURES = 3

Request = Callable[[Job], worker.Time | worker.Outputs]
Finish = Callable[[Job, Measured, Answer], None]


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
        super().__init__(target, num_threads, remote.__name__)
        self.device: Device | None = None
        self.stage: Literal["start", "open", "calibrate", "ready"] = "start"
        self.began = 0.0


class FarmPool(Pool):
    """Builds candidates in worker processes here, and times them on all devices under one key of a tracker.

    A candidate goes to whichever device is free. One whose session is lost is run again elsewhere, unless it
    has ended several: then it is at fault. Devices are calibrated when a session with them begins; one that
    differs from the others, varies wildly or computes wrongly is set aside with a notice, so that latencies
    compare. `Measured.device` says where a candidate ran.

    Needs a C++ compiler that links for the devices: ``CXX``, or the first on PATH.

    Parameters
    ----------
    target : Target, mapping or str
        What the devices are; this machine need not be.
    address : RPCAddress
    workers : int, optional
        Processes that build; one a core by default.
    num_threads : int, optional
        Threads of a candidate that runs; `PRETUNE_NUM_THREADS`, or the target's cores, by default.
    build_timeout, run_timeout : float
        Seconds a candidate may take to compile and link, and to be sent and timed.
    batch : int
        Candidates built ahead.
    tolerance : float
        See `TOLERANCE`; infinite to take every device.
    wait : float
        See `WAIT_S`.
    notify : callable
        Called with a line for whatever happens to a device.

    Raises
    ------
    EnvironmentFaultError
        If nothing can be linked.
    MeasureError
        If there is no tracker, or no server under the key.
    """

    def __init__(
        self,
        target: tvm.target.Target | Mapping[str, Any] | str,
        address: RPCAddress,
        *,
        workers: int | None = None,
        num_threads: int | None = None,
        build_timeout: float = 10.0,
        run_timeout: float = 10.0,
        batch: int = 32,
        tolerance: float = TOLERANCE,
        wait: float = WAIT_S,
        notify: Callable[[str], None] = notice,
    ) -> None:
        import tvm

        super().__init__()
        made = tvm.target.Target(target)
        attrs: Any = made.attrs
        self.size = workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.num_threads = num_threads or env.num_threads() or int(attrs.get("num-cores", 0)) or 1
        self.build_timeout, self.run_timeout = build_timeout, run_timeout
        self.devices: dict[str, Device] = {}
        self._batch, self._tolerance, self._wait, self._notify = batch, tolerance, wait, notify
        self._target = str(tvm.ir.save_json(made))
        self._tracker = Tracker(address)
        self._look_for_servers()
        self._folder = tempfile.TemporaryDirectory(prefix="pretune-farm-")
        self._guard = _link_guard(Path(self._folder.name))
        self._kernel: Trial | None = None
        self._processes: list[WorkerProcess] = []
        self._doing: dict[WorkerProcess, Trial] = {}
        self._speed = math.nan  # `Device.speed` that is usual here
        self._compared = False
        self._start_failures = 0
        self._next_poll = self._last_seen = 0.0
        self._waiting = False
        self._finalizer = weakref.finalize(self, kill_all, self._processes, os.getpid())

    def close(self) -> None:
        """End all sessions and workers."""
        self._stop()
        self._folder.cleanup()

    # What the pool is for

    def measure(
        self,
        candidates: Sequence[tvm.IRModule | str],
        *,
        best: float | None = None,
        slow_factor: float = SLOW_FACTOR,
        serial: bool = False,
        on_result: OnResult | None = None,
    ) -> list[Measured]:
        results: dict[int, Measured] = {}
        jobs = [self._job(candidate) for candidate in candidates]
        position = {job.index: at for at, job in enumerate(jobs)}

        def request(job: Job) -> worker.Time:
            limit = worker.ABSOLUTE_LIMIT_S if best is None else best * slow_factor
            return worker.Time(job.index, limit, serial)

        def finish(job: Job, result: Measured, _answer: Answer) -> None:
            nonlocal best
            results[position[job.index]] = result
            if best is not None:
                best = min(best, result.latency)
            if on_result is not None:
                on_result(position[job.index], result)

        self._run(jobs, request, finish)
        return [results[at] for at in range(len(jobs))]

    def interleave(self, candidates: Sequence[tvm.IRModule | str], *, rounds: int = 5) -> list[Measured]:
        trials = [self._trial(self._job(candidate)) for candidate in candidates]
        turns: dict[int, Measured] = {}
        with self._stop_on_error():
            self._prepare()
            failed = self._build(trials)
            while todo := [t for t in trials if t.job.index not in failed and t.job.index not in turns]:
                turns |= self._take_turns(self._ready(), todo, rounds, failed)
        for trial in trials:
            trial.path.unlink(missing_ok=True)
        return [failed.get(trial.job.index) or turns[trial.job.index] for trial in trials]

    def calibrate(self) -> float:
        with self._stop_on_error():
            self._prepare()
            for session in [self._ready(), *self._idle()[1:]]:
                self._calibrate(session)
            self._compared = False
            self._ready()
            return self._speed

    def _outputs(
        self, job: Job, seed: int, signed: bool, want: tuple[int, ...]
    ) -> dict[int, np.ndarray] | Measured:
        found: list[dict[int, np.ndarray] | Measured] = []

        def finish(_job: Job, result: Measured, answer: Answer) -> None:
            if isinstance(answer, worker.Done) and not result.error_kind:
                found.append({array.position: worker.to_numpy(array) for array in answer.arrays})
            else:
                found.append(result)

        self._run([job], lambda job: worker.Outputs(job.index, seed, signed, want), finish)
        return found[0]

    # Candidates

    def _trial(self, job: Job) -> Trial:
        return Trial(job, Path(self._folder.name) / f"{job.index}.so")

    def _run(self, jobs: Sequence[Job], request: Request, finish: Finish) -> None:
        """Build candidates, and run each on a device that is free; `finish` is called once for each."""
        to_build = deque(self._trial(job) for job in jobs)
        ready: deque[Trial] = deque()
        left = len(jobs)
        with self._stop_on_error():
            self._prepare()
            while left:
                self._feed(to_build, self._batch - len(ready))
                for session in self._idle():
                    if trial := self._pick(ready, session):
                        ready.remove(trial)
                        if not self._start(session, trial, request(trial.job)):
                            ready.appendleft(trial)
                for one, answer in self._answers(left):
                    trial = self._doing.pop(one)
                    if isinstance(one, Session):
                        result = self._judge(one, trial, answer)
                        put = ready.appendleft
                    else:
                        result = self._was_built(trial, answer)
                        put = ready.append
                    if result is None:
                        put(trial)
                        continue
                    trial.path.unlink(missing_ok=True)
                    left -= 1
                    finish(trial.job, result, answer)

    def _build(self, trials: Sequence[Trial]) -> dict[int, Measured]:
        """Build candidates only; those that fail, by `Job.index`."""
        queue, failed = deque(trials), dict[int, Measured]()
        while queue or self._doing:
            self._feed(queue, len(trials))
            for one, answer in self._answers(0):
                trial = self._doing.pop(one)
                if (result := self._was_built(trial, answer)) is not None:
                    failed[trial.job.index] = result
        return failed

    def _feed(self, queue: deque[Trial], room: int) -> None:
        """Have idle workers build what is in a queue, `room` of it at once."""
        builders = [one for one in self._processes if not isinstance(one, Session)]
        building = sum(one in self._doing for one in builders)
        while len(builders) < min(self.size, building + len(queue)):
            builders.append(WorkerProcess(self._target, 1))
            self._processes.append(builders[-1])
        for one in builders:
            if queue and building < room and not one.busy:
                trial = queue.popleft()
                build = worker.Export(trial.job.index, trial.job.text, str(trial.path))
                if self._send(one, trial, build, self.build_timeout):
                    building += 1
                else:
                    queue.appendleft(trial)

    def _pick(self, ready: deque[Trial], session: Session) -> Trial | None:
        """The next candidate for a device: not one that it was lost on, while there are other devices."""
        assert session.device is not None
        here = session.device.address
        alone = sum(one.device is not None for one in self._sessions()) == 1
        return next((trial for trial in ready if alone or here not in trial.lost_on), None)

    def _start(
        self, session: Session, trial: Trial, request: worker.Time | worker.Outputs | worker.Repeat
    ) -> bool:
        trial.seconds = self.run_timeout
        message = remote.OnDevice(str(trial.path), trial.signature, trial.seconds, request)
        return self._send(session, trial, message, trial.seconds + STALL_S)

    def _send(self, one: WorkerProcess, trial: Trial, message: worker.Request, seconds: float) -> bool:
        """Have a process work on a candidate; False if it was dead."""
        if not one.send(message, seconds):
            self._end(one)
            return False
        self._doing[one] = trial
        return True

    def _was_built(self, trial: Trial, answer: Answer) -> Measured | None:
        """None if it was; else how it failed."""
        if isinstance(answer, worker.Done):
            trial.signature, trial.build_s = answer.signature, answer.seconds
            return None
        kind: ErrorKind = "build" if isinstance(answer, worker.Failed) else "crash"
        if isinstance(answer, Late):
            kind = "build-timeout"
        return Measured(build_s=answer.seconds, error_kind=kind, error=answer.error)

    def _judge(self, session: Session, trial: Trial, answer: Answer) -> Measured | None:
        """The result of a candidate that was run; None if it is to run again, since its device was lost."""
        device = session.device
        assert device is not None
        if isinstance(answer, worker.Done | worker.Failed):
            device.failures = 0
            device.trials += 1
            return msgspec.structs.replace(timed(answer, trial.build_s), device=device.address)
        if isinstance(answer, Died) and answer.seconds >= trial.seconds:  # its device ended it
            late = Late(answer.seconds, f"took longer than {trial.seconds:g} s")
            return msgspec.structs.replace(timed(late, trial.build_s), device=device.address)
        trial.lost_on.append(device.address)
        if isinstance(answer, Late):
            self._leave(device, f"has not answered for {answer.seconds:.0f} s")
        elif self._is_connected(device):
            trial.kills += 1
            self._leave(device, f"lost its session ({answer.error})")
        else:
            self._leave(device, "is gone")
        if trial.kills < MAX_KILLS and len(trial.lost_on) < MAX_LOST:
            return None
        error = f"ended {len(trial.lost_on)} sessions; the last, on {device.address}: {answer.error}"
        return msgspec.structs.replace(timed(answer, trial.build_s), device=device.address, error=error)

    def _take_turns(
        self, session: Session, trials: Sequence[Trial], rounds: int, failed: dict[int, Measured]
    ) -> dict[int, Measured]:
        """Time candidates in turns on one device; none of them if it is lost meanwhile."""
        assert session.device is not None
        times: dict[int, list[float]] = {trial.job.index: [] for trial in trials}
        numbers = dict.fromkeys(times, 0)
        run_s = dict.fromkeys(times, 0.0)
        for _ in range(rounds):
            for trial in trials:
                index = trial.job.index
                if index in failed:
                    continue
                if not self._start(session, trial, worker.Repeat(index, numbers[index])):
                    return {}
                answer = self._wait_for(session)
                if isinstance(answer, worker.Done):
                    times[index].extend(answer.latencies)
                    numbers[index] = answer.number
                    run_s[index] += answer.seconds
                    continue
                if (result := self._judge(session, trial, answer)) is not None:
                    failed[index] = result
                if not session.alive:
                    return {}
        self._end(session)  # with the candidates in its memory
        return {
            trial.job.index: Measured(
                latencies=tuple(times[trial.job.index]),
                build_s=trial.build_s,
                run_s=run_s[trial.job.index],
                device=session.device.address,
            )
            for trial in trials
            if trial.job.index not in failed
        }

    # Devices

    def _sessions(self) -> list[Session]:
        return [one for one in self._processes if isinstance(one, Session)]

    def _idle(self) -> list[Session]:
        """Sessions that can take a candidate; none before their devices have been compared."""
        sessions = self._sessions()
        if not self._compared:
            met = [one for one in sessions if one.stage == "ready"]
            if not met or any(one.busy for one in sessions):
                return []
            self._compare(met)
        idle = []
        for one in self._sessions():
            if one.stage == "ready" and not one.busy:
                if time.monotonic() - one.began + self.run_timeout + STALL_S > SESSION_S:
                    self._end(one)
                else:
                    idle.append(one)
        return idle

    def _ready(self) -> Session:
        """Wait for a device."""
        while not (idle := self._idle()):
            self._answers(MAX_DEVICES)
        return idle[0]

    def _wait_for(self, session: Session) -> Answer:
        while True:
            for one, answer in self._answers(0):
                self._doing.pop(one)
                if one is session:
                    return answer

    def _answers(self, wanted: int) -> list[tuple[WorkerProcess, Answer]]:
        """Wait a moment for processes; what comes of candidates. Up to `wanted` devices are of use now."""
        if wanted:
            self._recruit(wanted)
        if not any(one.busy for one in self._processes):
            time.sleep(POLL_S)
        answers: list[tuple[WorkerProcess, Answer]] = []
        for one, answer in wait_any(self._processes):
            starting, one.starting = one.starting, False
            if isinstance(answer, Died | Late):
                self._processes.remove(one)
            if starting:
                self._has_started(answer)
            elif one in self._doing:
                answers.append((one, answer))
            elif isinstance(one, Session):
                self._meet(one, answer)
        return answers

    def _has_started(self, answer: Answer) -> None:
        self._start_failures = 0 if isinstance(answer, worker.Done) else self._start_failures + 1
        if not isinstance(answer, worker.Done) and self._start_failures == _MAX_START_FAILURES:
            raise MeasureError(f"measuring workers do not start: {answer.error}; run: pretune doctor")

    def _recruit(self, wanted: int) -> None:
        """Open sessions with servers that are free."""
        now = time.monotonic()
        sessions = self._sessions()
        held = [one for one in sessions if one.device is not None]
        if any(one.stage == "ready" for one in held):
            self._last_seen, self._waiting = now, False
        elif now - self._last_seen > self._wait:
            address, key = self._tracker.address, self._tracker.address.key
            raise MeasureError(
                f"no device under the key {key} at {address} could be used for {self._wait:.0f} s; "
                "what was measured is kept; "
                f"see: python -m tvm.exec.query_rpc_tracker --host {address.host} --port {address.port}"
            )
        elif now - self._last_seen > OPEN_S and not self._waiting:
            self._waiting = True
            self._notify(f"waiting for a device, up to {self._wait:.0f} s")
        lacking = min(wanted, MAX_DEVICES) - len(held)
        if now < self._next_poll or lacking <= 0:
            return
        self._next_poll = now + POLL_S
        with contextlib.suppress(MeasureError):  # The tracker may come back; devices in use do not need it.
            free, _ = self._tracker.summary()
            spare = [one for one in sessions if one.device is None]
            for _ in range(min(free, lacking) - len(spare)):
                self._processes.append(Session(self._target, self.num_threads))
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
            self._end(session)

    def _calibrate(self, session: Session) -> None:
        assert self._kernel is not None
        session.stage = "calibrate"
        if not session.send(remote.CalibrateDevice(str(self._kernel.path), self._kernel.signature), OPEN_S):
            self._end(session)

    def _meet(self, session: Session, answer: Answer) -> None:
        """Take the next step towards a session that can be used."""
        device = session.device
        assert device is not None
        if isinstance(answer, Died | Late):
            self._leave(device, f"fails to {session.stage} ({answer.error})")
        elif isinstance(answer, worker.Failed):
            self._end(session)
            if session.stage == "open":
                self._leave(device, f"opens no session ({answer.error})")
            else:
                self._set_aside(device, answer.error, math.inf)
        elif session.stage == "open":
            self._calibrate(session)
        else:
            session.stage = "ready"
            device.speed = min(answer.latencies)
            if statistics.median(answer.latencies) > (1 + 3 * self._tolerance) * device.speed:
                self._end(session)
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
            one.device.speed for one in self._sessions()
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
                self._end(one)
                self._set_aside(one.device, f"it takes {ratio:.2f} times as long as the others")

    def _set_aside(self, device: Device, why: str, seconds: float | None = None) -> None:
        """Do not use a device that cannot be trusted, for a while or ever."""
        device.failures += 1
        seconds = seconds or min(2.0**device.failures, LONGEST_ABSENCE_S)
        device.away_until = time.monotonic() + seconds
        again = "" if math.isinf(seconds) else f"; looked at again in {seconds:.0f} s"
        self._notify(f"device {device.address} is set aside: {why}{again}")

    def _leave(self, device: Device, why: str) -> None:
        """Try a device that was lost again, later if it happens again and again."""
        device.failures += 1
        if device.failures > 1:
            device.away_until = time.monotonic() + min(2.0**device.failures, LONGEST_ABSENCE_S)
        self._notify(f"device {device.address} {why}; candidates go to others meanwhile")

    def _is_connected(self, device: Device) -> bool:
        """Whether the server of a session that has just ended lives on."""
        time.sleep(POLL_S)  # the tracker notices a moment later
        with contextlib.suppress(MeasureError):
            return device.address in self._tracker.summary()[1]
        return False

    # Processes

    def _prepare(self) -> None:
        """Build the calibration kernel, once."""
        self._last_seen = time.monotonic()
        if self._kernel is not None:
            return
        setup_kernel = self._trial(self._job(worker.calibration_kernel()))
        if failed := self._build([setup_kernel]):
            error = failed[setup_kernel.job.index].error
            raise MeasureError(f"the calibration kernel does not build for the target: {error}")
        self._kernel = setup_kernel

    def _end(self, one: WorkerProcess) -> None:
        """End a process; its server then takes another client."""
        if one in self._processes:
            self._processes.remove(one)
        one.kill()

    def _stop(self) -> None:
        kill_all(self._processes, os.getpid())
        self._doing.clear()

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """A process that is interrupted in a request cannot be spoken to again, so end all of them."""
        try:
            yield
        except BaseException:
            self._stop()
            raise

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


def _link_guard(folder: Path) -> Path:
    """Compile the guard, which shows whether anything can be linked."""
    from tvm.support import cc

    if cc.get_cc() is None:
        raise EnvironmentFaultError(
            "a farm needs a C++ compiler to link candidates with, and none is on PATH; run: apt-get install "
            "g++, or set CXX to one for the devices"
        )
    path = folder / "guard.so"
    try:
        cc.create_shared(str(path), [str(GUARD)])
    except (OSError, RuntimeError) as error:
        raise EnvironmentFaultError(
            f"{cc.get_cc()} cannot link candidates ({one_line(error)}); set CXX to a C++ compiler for the "
            "devices"
        ) from error
    return path
