"""A farm: candidates are built here, and timed on the devices behind TVM's RPC tracker."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pretune import env
from pretune.errors import EnvironmentFaultError, MeasureError, OptionError, one_line
from pretune.measure import base, remote, worker
from pretune.measure.base import MAX_WORKERS, TURN_TIMEOUT_S, Pool, not_built, timed
from pretune.measure.fleet import (
    OPEN_S,
    SESSION_S,
    STALL_S,
    TOLERANCE,
    WAIT_S,
    Device,
    Fleet,
    Session,
    Trial,
)
from pretune.measure.process import START_TIMEOUT, Answer, Died, Job, Late, WorkerProcess
from pretune.measure.result import Measured
from pretune.measure.tracker import RPCAddress
from pretune.messages import notice

if TYPE_CHECKING:
    import tvm

GUARD = Path(__file__).parent / "guard.cc"

MAX_KILLS, MAX_LOST = 2, 4
"""A candidate is at fault once it has ended so many sessions of servers that lived on, or so many in all."""

Request = Callable[[Job], worker.Time | worker.Outputs]
Finish = Callable[[Job, Measured, Answer], None]


MOST_RUN_S = SESSION_S - STALL_S - 2 * OPEN_S
"""Seconds that a candidate may run for at most, in a session that has just been opened and calibrated."""


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
        if run_timeout > MOST_RUN_S:
            raise OptionError(
                f"run_timeout {run_timeout:g} s is longer than a session with a device allows; give "
                f"{MOST_RUN_S:g} or less"
            )
        made = tvm.target.Target(target)
        attrs: Any = made.attrs
        self.size = workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.num_threads = num_threads or env.num_threads() or int(attrs.get("num-cores", 0)) or 1
        self.build_timeout, self.run_timeout = build_timeout, run_timeout
        self._batch, self._target = batch, str(tvm.ir.save_json(made))
        self._folder = tempfile.TemporaryDirectory(prefix="pretune-farm-")
        self._fleet = Fleet(
            self._target,
            self.num_threads,
            address,
            guard=_link_guard(Path(self._folder.name)),
            tolerance=tolerance,
            wait=wait,
            notify=notify,
        )

    @property
    def devices(self) -> dict[str, Device]:
        """The devices that were ever met, by address."""
        return self._fleet.devices

    def close(self) -> None:
        """End all sessions and workers."""
        self._fleet.stop()
        self._folder.cleanup()

    # What the pool is for

    def _measure(self, jobs: Sequence[Job], request: base.Request, finish: base.Finish) -> None:
        self._run(jobs, request, lambda job, result, _answer: finish(job, result))

    def interleave(self, candidates: Sequence[tvm.IRModule | str], *, rounds: int = 5) -> list[Measured]:
        trials = [self._trial(self._job(candidate)) for candidate in candidates]
        turns: dict[int, Measured] = {}
        with self._stop_on_error():
            self._prepare()
            failed = self._build(trials, self.build_timeout)
            while todo := [t for t in trials if t.job.index not in failed and t.job.index not in turns]:
                session = self._fleet.ready(SESSION_S / 2)[0]  # all turns are of one
                turns |= self._take_turns(session, todo, rounds, failed)
        for trial in trials:
            trial.path.unlink(missing_ok=True)
        return [failed.get(trial.job.index) or turns[trial.job.index] for trial in trials]

    def calibrate(self) -> float:
        with self._stop_on_error():
            self._prepare()
            return self._fleet.calibrate(self._longest())

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
                self._feed(to_build, self._batch - len(ready), self.build_timeout)
                for session in self._fleet.idle(self._longest()):
                    if trial := self._pick(ready, session):
                        ready.remove(trial)
                        if not self._start(session, trial, request(trial.job), self.run_timeout):
                            ready.appendleft(trial)
                for one, answer in self._fleet.answers(left):
                    trial = self._fleet.doing.pop(one)
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

    def _build(self, trials: Sequence[Trial], seconds: float) -> dict[int, Measured]:
        """Build candidates only, each within so many seconds; those that fail, by `Job.index`."""
        queue, failed = deque(trials), dict[int, Measured]()
        while queue or self._fleet.doing:
            self._feed(queue, len(trials), seconds)
            for one, answer in self._fleet.answers(0):
                trial = self._fleet.doing.pop(one)
                if (result := self._was_built(trial, answer)) is not None:
                    failed[trial.job.index] = result
        return failed

    def _feed(self, queue: deque[Trial], room: int, seconds: float) -> None:
        """Have idle workers build what is in a queue, `room` of it at once, each within so many seconds."""
        builders = [one for one in self._fleet.processes if not isinstance(one, Session)]
        building = sum(one in self._fleet.doing for one in builders)
        while len(builders) < min(self.size, building + len(queue)):
            builders.append(WorkerProcess(self._target, 1, 0.0))
            self._fleet.processes.append(builders[-1])
        for one in builders:
            if queue and building < room and not one.busy:
                trial = queue.popleft()
                build = worker.Export(trial.job.index, trial.job.text, str(trial.path))
                if self._fleet.send(one, trial, build, seconds):
                    building += 1
                else:
                    queue.appendleft(trial)

    def _pick(self, ready: deque[Trial], session: Session) -> Trial | None:
        """The next candidate for a device: not one that it was lost on, while there are others for it."""
        assert session.device is not None
        here = session.device.address
        devices = {one.device.address for one in self._fleet.sessions() if one.device is not None}
        return next((t for t in ready if here not in t.lost_on or devices <= {*t.lost_on}), None)

    def _start(
        self,
        session: Session,
        trial: Trial,
        request: worker.Time | worker.Outputs | worker.Repeat,
        seconds: float,
    ) -> bool:
        trial.seconds = seconds
        message = remote.OnDevice(str(trial.path), trial.signature, seconds, request)
        return self._fleet.send(session, trial, message, seconds + STALL_S)

    def _was_built(self, trial: Trial, answer: Answer) -> Measured | None:
        """None if it was; else how it failed."""
        if isinstance(answer, worker.Done):
            trial.signature, trial.build_s = answer.signature, answer.seconds
            return None
        return not_built(answer)

    def _judge(self, session: Session, trial: Trial, answer: Answer) -> Measured | None:
        """The result of a candidate that was run; None if it is to run again, since its device was lost."""
        device = session.device
        assert device is not None
        if isinstance(answer, worker.Done | worker.Failed):
            device.failures = 0
            device.trials += 1
            return msgspec.structs.replace(timed(answer, trial.build_s), device=device.address)
        trial.lost_on.append(device.address)
        error = answer.error
        if isinstance(answer, Late):
            self._fleet.leave(device, f"has not answered for {answer.seconds:.0f} s")
        elif answer.seconds >= trial.seconds:
            # It kept the deadline; or was stalled until after it, and is back.
            trial.kills += 1
            answer = Late(answer.seconds, f"took longer than {trial.seconds:g} s")
        elif time.monotonic() - session.began >= SESSION_S:
            pass  # the server ended it, as was agreed
        elif self._fleet.is_connected(device):
            trial.kills += 1
            self._fleet.leave(device, f"lost its session ({error})")
        else:
            self._fleet.leave(device, "is gone")
        if trial.kills < MAX_KILLS and len(trial.lost_on) < MAX_LOST:
            return None
        if isinstance(answer, Died):
            answer = Died(
                answer.seconds, f"ended {len(trial.lost_on)} sessions; on {device.address}: {error}"
            )
        return msgspec.structs.replace(timed(answer, trial.build_s), device=device.address)

    def _take_turns(
        self, session: Session, trials: Sequence[Trial], rounds: int, failed: dict[int, Measured]
    ) -> dict[int, Measured]:
        """Time candidates in turns on one device; none of them if it is lost meanwhile."""
        assert session.device is not None
        times: dict[int, list[float]] = {trial.job.index: [] for trial in trials}
        numbers = dict.fromkeys(times, 0)
        run_s = dict.fromkeys(times, 0.0)
        seconds = max(self.run_timeout, TURN_TIMEOUT_S)
        begun = time.monotonic()
        for turn in range(rounds):
            now = time.monotonic()
            if turn and now + (now - begun) / turn > session.began + SESSION_S:
                break  # the session would end in the middle of it
            for trial in trials:
                index = trial.job.index
                if index in failed:
                    continue
                if not self._start(session, trial, worker.Repeat(index, numbers[index]), seconds):
                    return {}
                answer = self._fleet.wait_for(session)
                if isinstance(answer, worker.Done):
                    times[index].extend(answer.latencies)
                    numbers[index] = answer.number
                    run_s[index] += answer.seconds
                    continue
                if (result := self._judge(session, trial, answer)) is not None:
                    failed[index] = result
                if not session.alive:
                    return {}
        self._fleet.end(session)  # with the candidates in its memory
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

    def _prepare(self) -> None:
        """Build the calibration kernel, once."""
        if self._fleet.kernel is not None:
            return
        kernel = self._trial(self._job(worker.matmul(worker.CALIBRATION)))
        if failed := self._build([kernel], START_TIMEOUT):  # beside it, a search is impatient
            error = failed[kernel.job.index].error
            raise MeasureError(f"the calibration kernel does not build for the target: {error}")
        self._fleet.kernel = kernel

    def _longest(self) -> float:
        """Seconds until a device that runs a candidate has answered, or is given up."""
        return self.run_timeout + STALL_S

    @contextlib.contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        """A process that is interrupted in a request cannot be spoken to again, so end all of them."""
        try:
            yield
        except BaseException:
            self._fleet.stop()
            raise


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
