"""What every pool offers, and what does not depend on where its candidates run."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from pretune.errors import MeasureError
from pretune.measure import check, worker
from pretune.measure.process import Answer, Died, Job, Late
from pretune.measure.result import ErrorKind, Measured

if TYPE_CHECKING:
    import tvm

SLOW_FACTOR = 4.0
"""A candidate this many times slower than the best known one is not timed any further."""

MAX_WORKERS = 16

TURN_TIMEOUT_S = 60.0
"""Seconds that a finalist may take for a turn."""

OnResult = Callable[[int, Measured], None]
Request = Callable[[Job], worker.Time]
Finish = Callable[[Job, Measured], None]


class Pool(abc.ABC):
    """Compiles and times candidates, none of which can end the run.

    Not thread-safe. Every method raises `MeasureError` if measuring as a whole cannot go on.

    Attributes
    ----------
    size : int
        Processes that compile.
    num_threads : int
        Threads of a candidate that runs.
    build_timeout, run_timeout : float
        Seconds a candidate may take to compile, and to be timed.
    """

    size: int
    num_threads: int
    build_timeout: float
    run_timeout: float

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._reference: tuple[str, int, bool, dict[int, np.ndarray]] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """End its processes."""

    def measure(
        self,
        candidates: Sequence[tvm.IRModule | str],
        *,
        best: float | None = None,
        slow_factor: float = SLOW_FACTOR,
        serial: bool = False,
        on_result: OnResult | None = None,
    ) -> list[Measured]:
        """Build and time candidates.

        Parameters
        ----------
        candidates : sequence of IRModule or str
            Scheduled modules with one PrimFunc ``main``, or what `tvm.ir.save_json` makes of them.
        best : float, optional
            The best latency known, in seconds: a candidate more than `slow_factor` times slower is stopped
            early, and it improves with every candidate. Without it, candidates above 0.05 s are.
        serial : bool
            Time candidates that are not stopped early on one thread as well: one build, a second label.
        on_result : callable, optional
            Called with the position and result of each candidate as soon as it is known, before the next one
            is timed. If it raises, the exception passes through.

        Returns
        -------
        list of Measured
            In the order of `candidates`.
        """
        results: dict[int, Measured] = {}
        jobs = [self._job(candidate) for candidate in candidates]
        position = {job.index: at for at, job in enumerate(jobs)}

        def request(job: Job) -> worker.Time:
            limit = worker.ABSOLUTE_LIMIT_S if best is None else best * slow_factor
            return worker.Time(job.index, limit, serial)

        def finish(job: Job, result: Measured) -> None:
            nonlocal best
            results[position[job.index]] = result
            if best is not None:
                best = min(best, result.latency)
            if on_result is not None:
                on_result(position[job.index], result)

        self._measure(jobs, request, finish)
        return [results[at] for at in range(len(jobs))]

    @abc.abstractmethod
    def _measure(self, jobs: Sequence[Job], request: Request, finish: Finish) -> None:
        """Build and time each: `request` says how, when its turn comes, and `finish` is told the result."""

    @abc.abstractmethod
    def interleave(self, candidates: Sequence[tvm.IRModule | str], *, rounds: int = 5) -> list[Measured]:
        """Time finalists in turns (A B C A B C ...), so that a drifting machine treats them alike.

        All run in one process, on the same arrays. A turn may take `TURN_TIMEOUT_S`: all have run before, and
        slow ones are called several times.

        Returns
        -------
        list of Measured
            In the order of `candidates`, one latency for each round; fewer rounds where a session with a
            device is too short for all.
        """

    @abc.abstractmethod
    def calibrate(self) -> float:
        """Seconds of a fixed kernel, a matmul on all threads, to notice a machine whose speed has changed."""

    @abc.abstractmethod
    def _outputs(
        self, job: Job, seed: int, signed: bool, want: tuple[int, ...]
    ) -> dict[int, np.ndarray] | Measured:
        """What `outputs` returns, with the arguments in `want` added; or how the program failed."""

    def outputs(
        self, candidate: tvm.IRModule | str, *, seed: int = 0, signed: bool = True
    ) -> dict[int, np.ndarray]:
        """Run a program once on seeded random arguments, and take those that it changed.

        Parameters
        ----------
        seed : int
            The same seed gives the same arguments.
        signed : bool
            Whether floats have either sign or are positive; magnitudes are 0.1 to 1. Integers are 0 or 1.

        Returns
        -------
        dict of int to ndarray
            Contents after the call by argument position.

        Raises
        ------
        MeasureError
            If it does not build or run.
        """
        found = self._outputs(self._job(candidate), seed, signed, ())
        if isinstance(found, Measured):
            raise MeasureError(f"the program fails to {STAGE[found.error_kind]}: {found.error}")
        return found

    def compare(
        self,
        reference: tvm.IRModule | str,
        candidate: tvm.IRModule | str,
        *,
        seed: int = 0,
        tolerance: Mapping[str, tuple[float, float]] | None = None,
    ) -> str | None:
        """Check that a candidate computes what the reference does, on random arguments.

        Floats have either sign; where that gives the reference a NaN (a square root), positive ones are tried
        as well.

        Parameters
        ----------
        tolerance : mapping of str to (float, float), optional
            Relative and absolute tolerance by dtype, in place of those in `pretune.measure.TOLERANCE`.

        Returns
        -------
        str or None
            None if it does; else one line with the largest difference, or why the candidate does not run.

        Raises
        ------
        MeasureError
            If the reference does not build or run.
        """
        original, other = self._job(reference), self._job(candidate)
        for signed in (True, False):
            want = self._reference_outputs(original, seed, signed)
            got = self._outputs(other, seed, signed, tuple(want))
            if isinstance(got, Measured):
                return f"fails to {STAGE[got.error_kind]}: {got.error}"
            if extra := set(got) - set(want):
                # Changed by the candidate only; equal all the same if the reference wrote what was there.
                again = self._outputs(original, seed, signed, tuple(extra))
                want = want if isinstance(again, Measured) else want | again
            if line := check.difference(want, got, tolerance):
                return line
            if not any(check.has_nan(array) for array in want.values()):
                break
        return None

    def _job(self, candidate: tvm.IRModule | str) -> Job:
        if not isinstance(candidate, str):
            import tvm

            candidate = str(tvm.ir.save_json(candidate))
        return Job(next(self._ids), candidate)

    def _reference_outputs(self, job: Job, seed: int, signed: bool) -> dict[int, np.ndarray]:
        # Candidates of one task are compared one after another: keep the last reference's outputs.
        if self._reference is None or self._reference[:3] != (job.text, seed, signed):
            found = self._outputs(job, seed, signed, ())
            if isinstance(found, Measured):
                raise MeasureError(f"the reference fails to {STAGE[found.error_kind]}: {found.error}")
            self._reference = (job.text, seed, signed, found)
        return self._reference[3]


STAGE: dict[ErrorKind, str] = {
    "build": "build",
    "build-timeout": "build",
    "run": "run",
    "run-timeout": "run",
    "crash": "run",
}
"""What a candidate was about when it failed."""


def not_built(answer: worker.Failed | Died | Late) -> Measured:
    """The result of a candidate that did not build."""
    kind: ErrorKind = "build" if isinstance(answer, worker.Failed) else "crash"
    if isinstance(answer, Late):
        kind = "build-timeout"
    return Measured(build_s=answer.seconds, error_kind=kind, error=answer.error)


def timed(answer: Answer, build_s: float) -> Measured:
    """The result of a candidate that was run."""
    if isinstance(answer, worker.Done):
        return Measured(
            latencies=answer.latencies,
            serial_latencies=answer.serial_latencies,
            build_s=build_s,
            run_s=answer.seconds,
            stopped_early=answer.stopped_early,
        )
    kind: ErrorKind = "run" if isinstance(answer, worker.Failed) else "crash"
    if isinstance(answer, Late):
        kind = "run-timeout"
    return Measured(build_s=build_s, run_s=answer.seconds, error_kind=kind, error=answer.error)
