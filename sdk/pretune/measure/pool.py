"""A pool of persistent workers: build in parallel, time one at a time, survive any candidate."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune import env
from pretune.errors import MeasureError
from pretune.measure import worker
from pretune.measure.base import MAX_WORKERS, TURN_TIMEOUT_S, Finish, Pool, Request, not_built, timed
from pretune.measure.process import Answer, Died, Job, Late, WorkerProcess, kill_all, wait_any
from pretune.measure.result import Measured

if TYPE_CHECKING:
    import tvm

PATIENCE_S = 0.05
"""See `MeasurePool`: the search forgives a latency that is wrong, and times its finalists in many turns."""
_MAX_START_FAILURES = 3  # in a row: then it is the installation, not a candidate
_MAX_CALIBRATION_DEATHS = 3  # what kills a worker while it calibrates may have nothing to do with it
_MAX_IDLE_DEATHS = 10  # in a row: then something outside kills the workers


class MeasurePool(Pool):
    """Worker processes that compile and time candidates in isolation.

    Builds run on all workers at once, then candidates are timed one at a time while nothing builds. A
    candidate that crashes its worker, or misses a deadline, costs itself and a restart; what that worker had
    built is built again. The first worker starts at once, in the background. Not thread-safe; workers end
    at the latest with the thread that started them.

    Every method raises `MeasureError` if workers die one after another before they are ready, and kills the
    workers if it is interrupted; the next call starts new ones.

    Parameters
    ----------
    target : Target, mapping or str
        What to compile for.
    workers : int, optional
        Processes; as many as the target has cores by default, at most 16.
    num_threads : int, optional
        Threads of a candidate that runs; `PRETUNE_NUM_THREADS`, or the target's cores, by default.
    build_timeout, run_timeout : float
        Seconds a candidate may take to compile, and to be timed.
    patience : float
        Seconds that each measurement may wait for the machine to itself, on average, unless
        ``PRETUNE_PATIENCE`` says otherwise.
    quiet : callable, optional
        Returns a context manager held while candidates are timed, such as one that pauses other jobs.
    batch : int
        Candidates built before timing starts; bounds the memory of compiled ones.
    """

    def __init__(
        self,
        target: tvm.target.Target | Mapping[str, Any] | str,
        *,
        workers: int | None = None,
        num_threads: int | None = None,
        build_timeout: float = 10.0,
        run_timeout: float = 10.0,
        patience: float = PATIENCE_S,
        quiet: Callable[[], AbstractContextManager[Any]] | None = None,
        batch: int = 32,
    ) -> None:
        import tvm

        super().__init__()
        target = tvm.target.Target(target)
        attrs: Any = target.attrs
        cores = int(attrs.get("num-cores", 0)) or len(os.sched_getaffinity(0))
        self.size = max(1, workers or min(cores, MAX_WORKERS))
        self.num_threads = num_threads or env.num_threads() or cores
        self._patience = env.patience(patience)
        self.build_timeout, self.run_timeout, self.batch = build_timeout, run_timeout, batch
        self._target = str(tvm.ir.save_json(target))
        self._quiet = quiet or contextlib.nullcontext
        self._start_failures = 0
        self._idle_deaths = 0
        self._workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, kill_all, self._workers, os.getpid())
        self._staff(1)

    def close(self) -> None:
        """Kill the workers."""
        kill_all(self._workers, os.getpid())

    # What the pool is for

    def _measure(self, jobs: Sequence[Job], request: Request, finish: Finish) -> None:
        finished: set[int] = set()

        def done(job: Job, result: Measured) -> None:
            finished.add(job.index)
            finish(job, result)

        pending, room = deque(jobs), self.batch
        with self._kill_on_error():
            while pending:
                batch = [pending.popleft() for _ in range(min(room, len(pending)))]
                self._build(batch, done)
                with self._quiet():
                    for one in list(self._workers):
                        time.sleep(worker.SPIN_S)
                        for job, build_s in list(one.built.values()):
                            answer = self._call(one, request(job), self.run_timeout)
                            if answer is None:  # it had died before: what it had built is lost
                                break
                            done(job, timed(answer, build_s))
                            one.built.pop(job.index)
                            if not one.alive:
                                break
                lost = [job for job in batch if job.index not in finished]
                pending.extendleft(reversed(lost))
                # Where many candidates kill their workers, build fewer at once: fewer are built twice.
                room = max(min(self.size, self.batch), room // 4) if lost else min(self.batch, room * 2)

    def interleave(self, candidates: Sequence[tvm.IRModule | str], *, rounds: int = 5) -> list[Measured]:
        jobs = [self._job(candidate) for candidate in candidates]
        failed: dict[int, Measured] = {}
        times: dict[int, list[float]] = {job.index: [] for job in jobs}
        numbers = dict.fromkeys(times, 0)
        build_s = dict.fromkeys(times, 0.0)
        run_s = dict.fromkeys(times, 0.0)
        limit = max(self.run_timeout, TURN_TIMEOUT_S)

        def fail(job: Job, result: Measured) -> None:
            failed[job.index] = result

        def one_round(one: WorkerProcess, turn: int) -> bool:
            for job, seconds in list(one.built.values()):
                index = job.index
                if index in failed or len(times[index]) > turn:
                    continue
                answer = self._call(one, worker.Repeat(index, numbers[index]), limit)
                if answer is None:
                    return False
                build_s[index] = seconds
                if isinstance(answer, worker.Done):
                    times[index].extend(answer.latencies)
                    numbers[index] = answer.number
                    run_s[index] += answer.seconds
                else:
                    failed[index] = timed(answer, seconds)
                if not one.alive:
                    return False
            return True

        with self._kill_on_error():
            while todo := [job for job in jobs if job.index not in failed and len(times[job.index]) < rounds]:
                self._build(todo, fail, most=1)
                for one in self._workers[:1]:
                    with self._quiet():
                        for turn in range(rounds):
                            if not one_round(one, turn):
                                break
                    self._drop(one)
        return [
            failed.get(index)
            or Measured(latencies=tuple(times[index]), build_s=build_s[index], run_s=run_s[index])
            for index in times
        ]

    def calibrate(self) -> float:
        deaths = 0
        with self._kill_on_error():
            while True:
                one = self._ready()
                with self._quiet():
                    answer = self._call(one, worker.Calibrate(), self.build_timeout + self.run_timeout)
                if isinstance(answer, worker.Done):
                    return min(answer.latencies)
                if answer is None:
                    continue
                deaths += 1
                if isinstance(answer, worker.Failed) or deaths == _MAX_CALIBRATION_DEATHS:
                    raise MeasureError(
                        f"the calibration kernel does not run: {answer.error}; run: pretune doctor"
                    )

    # Steps of these

    def _build(self, jobs: Iterable[Job], finish: Finish, *, most: int | None = None) -> None:
        """Build on up to `most` workers. On return all workers are idle; failed jobs are finished.

        The rest are in some worker's `built`, except for those whose worker died while it built another.
        """
        queue = deque(jobs)
        most = most or self.size
        while queue or any(one.busy for one in self._workers):
            self._staff(min(most, self.size, len(queue) + sum(one.job is not None for one in self._workers)))
            for one in self._workers[:most]:
                if queue and not one.busy:
                    if one.send(worker.Build(queue[0].index, queue[0].text), self.build_timeout):
                        one.job = queue.popleft()
                    else:
                        self._bury(one)
            for one, answer in self._answers():
                job, one.job = one.job, None
                if job is None:
                    continue
                if isinstance(answer, worker.Done):
                    one.built[job.index] = (job, answer.seconds)
                else:
                    finish(job, not_built(answer))

    def _outputs(
        self, job: Job, seed: int, signed: bool, want: tuple[int, ...]
    ) -> dict[int, np.ndarray] | Measured:
        failures: list[Measured] = []
        with self._kill_on_error():
            while not failures:
                self._build([job], lambda _, result: failures.append(result), most=1)
                if failures:
                    break
                one = next(one for one in self._workers if job.index in one.built)
                answer = self._call(one, worker.Outputs(job.index, seed, signed, want), self.run_timeout)
                if one.alive:
                    self._drop(one)
                if isinstance(answer, worker.Done):
                    return {array.position: worker.to_numpy(array) for array in answer.arrays}
                if answer is not None:
                    return timed(answer, 0.0)
        return failures[0]

    # Workers

    def _staff(self, count: int) -> None:
        """Start workers, without waiting for them, until there are `count`."""
        while len(self._workers) < count:
            self._workers.append(WorkerProcess(self._target, self.num_threads, self._patience))

    def _ready(self) -> WorkerProcess:
        """Wait for the first worker."""
        while not self._workers or self._workers[0].busy:
            self._staff(1)
            self._answers()
        return self._workers[0]

    def _call(self, one: WorkerProcess, request: worker.AnyRequest, seconds: float) -> Answer | None:
        """Have one worker carry out a request while the others are idle; None if it was dead before."""
        if not one.send(request, seconds):
            self._bury(one)
            return None
        while True:
            for other, answer in self._answers():
                if other is one:
                    return answer

    def _drop(self, one: WorkerProcess) -> None:
        """Have a worker forget what it has built."""
        for index in list(one.built):
            if not one.alive or self._call(one, worker.Drop(index), self.run_timeout) is None:
                break
        one.built.clear()

    def _answers(self) -> list[tuple[WorkerProcess, Answer]]:
        """Wait for requests to end; dead workers leave the pool here."""
        answers: list[tuple[WorkerProcess, Answer]] = []
        for one, answer in wait_any(self._workers):
            starting = one.starting
            one.starting = False
            if isinstance(answer, Died | Late):
                self._workers.remove(one)
            if not starting:
                answers.append((one, answer))
            elif isinstance(answer, Died | Late):
                self._start_failed(answer.error)
            else:
                self._start_failures = 0
            if isinstance(answer, worker.Done) and not starting:
                self._idle_deaths = 0
        return answers

    def _start_failed(self, error: str) -> None:
        self._start_failures += 1
        if self._start_failures < _MAX_START_FAILURES:
            return
        if not self._workers or all(one.starting for one in self._workers):
            self.close()
            raise MeasureError(f"measuring workers do not start: {error}; run: pretune doctor")
        self.size = len(self._workers)  # too many for this machine's memory, say
        self._start_failures = 0

    def _bury(self, one: WorkerProcess) -> None:
        """Take a worker that died while it was idle out of the pool."""
        self._workers.remove(one)
        error = one.kill(died=True)
        self._idle_deaths += 1
        if self._idle_deaths >= _MAX_IDLE_DEATHS:
            raise MeasureError(f"something keeps killing idle workers ({error}); run: pretune doctor")

    @contextlib.contextmanager
    def _kill_on_error(self) -> Iterator[None]:
        """A worker that is interrupted in a request cannot be spoken to again, so end all of them."""
        try:
            yield
        except BaseException:
            self.close()
            raise
