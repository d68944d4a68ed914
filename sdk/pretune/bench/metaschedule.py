"""The baseline: stock MetaSchedule, measuring through the same pool as pretune."""

from __future__ import annotations

import itertools
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.bench.common import output_to
from pretune.compat import setup_tvm
from pretune.errors import MissingExtraError, one_line
from pretune.space import trace_to_json

if TYPE_CHECKING:
    from pretune.intake import Task
    from pretune.measure import MeasurePool


@dataclass
class Baseline:
    """What MetaSchedule found for one task.

    Attributes
    ----------
    trace : list or None
        Its best schedule; None if it has no record, and compiling leaves the program untuned.
    latency : float or None
        Seconds of that one.
    traces : list of list
        Its finalists, in the order of their latencies while it tuned: `trace` is the one that was fastest
        when they were timed in turns. Empty in what earlier versions kept: then `trace` is the fastest while
        it tuned.
    trials, failures : int
        Candidates measured, and how many of them failed to build or run.
    seconds : float
        Wall time of ``tune_tir``.
    error : str
        What ended it, if something did.
    """

    trace: list[Any] | None = None
    latency: float | None = None
    trials: int = 0
    failures: int = 0
    seconds: float = 0.0
    error: str = ""
    traces: list[Any] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def check_xgboost() -> None:
    """MetaSchedule's default cost model needs XGBoost.

    Raises
    ------
    MissingExtraError
        If it is not installed.
    """
    try:
        import xgboost  # noqa: F401
    except ImportError:
        raise MissingExtraError("stock MetaSchedule's cost model", "bench") from None


def tune_stock(
    task: Task, target: Any, pool: MeasurePool, *, trials: int, seed: int, work_dir: Path
) -> Baseline:
    """Tune a task with ``ms.tune_tir`` as it comes: EvolutionarySearch, XGBModel, 64 candidates an iteration.

    Only builder and runner are ours. Slow candidates stop early, as they do for pretune, and a candidate's
    latency is its fastest repeat, as it is for pretune. As for pretune too, the best candidates are timed in
    turns before the winner is named; `Baseline.seconds` leaves that out, since ``tune_tir`` does not do it.

    Parameters
    ----------
    work_dir : Path
        MetaSchedule's logs, and what it prints, go here.

    Raises
    ------
    MissingExtraError
        If XGBoost is not installed.
    """
    check_xgboost()
    setup_tvm()
    from tvm.s_tir import meta_schedule as ms

    from pretune.tuning import FINALISTS

    found = Baseline()
    database = ms.database.MemoryDatabase()
    stopped: list[BaseException] = []
    builder, runner = through_pool(pool, found, stopped)
    work_dir.mkdir(parents=True, exist_ok=True)
    silence_logger()
    start = time.perf_counter()
    with output_to(work_dir / "output.log"):
        try:
            ms.tune_tir(
                task.mod,
                target,
                str(work_dir),
                trials,
                num_trials_per_iter=64,
                builder=builder,
                runner=runner,
                database=database,
                cost_model="xgb",
                strategy="evolutionary",
                # Without the one that deletes the folder of each built library: there are no such folders.
                measure_callbacks=[
                    ms.measure_callback.AddToDatabase(),
                    ms.measure_callback.UpdateCostModel(),
                ],
                seed=seed,
            )
        except Exception as error:  # it has many ways to fail, of several types; what it found before counts
            if stopped:  # by Ctrl-C or a dead pool, which TVM may have turned into an error of its own
                raise stopped[0] from None
            found.error = one_line(error)
    found.seconds = time.perf_counter() - start
    record = database.query_tuning_record(task.mod, target, "main")
    if record is not None and len(record.trace.insts):
        found.trace = trace_to_json(record.trace)
        found.latency = min(float(value) for value in record.run_secs or ())
        best = database.get_top_k(record.workload, FINALISTS)
        # A failure may be on record too, with a latency of 1e10 s.
        found.traces = [
            trace_to_json(one.trace)
            for one in best
            if len(one.trace.insts) and all(float(value) < 1e9 for value in one.run_secs or ())
        ]
        _name_winner(task, pool, found)
    return found


def _name_winner(task: Task, pool: MeasurePool, found: Baseline) -> None:
    """Time the finalists in turns, as pretune does with its own, and keep the fastest."""
    from pretune.tuning import FINAL_ROUNDS, replay

    timed = pool.interleave([replay(task.mod, trace) for trace in found.traces], rounds=FINAL_ROUNDS)
    winner = min(range(len(timed)), key=lambda i: timed[i].latency, default=None)
    if winner is not None and timed[winner].ok:
        found.trace, found.latency = found.traces[winner], timed[winner].latency


def silence_logger() -> None:
    """Keep ``tune_tir`` from logging to stdout; to be called before each."""
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    # Its console handler takes the level that the logger has then; the logger's own it sets to DEBUG.
    logger.setLevel(logging.ERROR)
    # It sets the handlers up anew, and fails on one without a name, as test runners attach them.
    logger.handlers.clear()


def through_pool(pool: MeasurePool, found: Baseline, stopped: list[BaseException]) -> tuple[Any, Any]:
    """A builder that keeps the programs, and a runner that builds and times them in the pool."""
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.cost_model.xgb_model import derived_object  # its own module moves
    from tvm.s_tir.meta_schedule.runner import PyRunner, RunnerFuture, RunnerResult

    programs: dict[str, Any] = {}
    names = (f"candidate-{number}" for number in itertools.count())
    best = math.inf

    @derived_object
    class KeepBuilder(PyBuilder):
        def build(self, build_inputs: Any) -> Any:
            results = []
            for one in build_inputs:
                name = next(names)
                programs[name] = one.mod
                results.append(BuilderResult(name, None))
            return results

    @derived_object
    class PoolRunner(PyRunner):
        def run(self, runner_inputs: Any) -> Any:
            nonlocal best
            mods = [programs.pop(str(one.artifact_path)) for one in runner_inputs]
            futures = []
            try:
                results = pool.measure(mods, best=best if math.isfinite(best) else None)
            except BaseException as error:
                stopped.append(error)
                raise
            for measured in results:
                found.trials += 1
                found.failures += not measured.ok
                best = min(best, measured.latency)
                if measured.ok:
                    result = RunnerResult([measured.latency], None)
                else:
                    result = RunnerResult(None, measured.error or measured.error_kind)
                futures.append(RunnerFuture(lambda: True, lambda result=result: result))
            return futures

    return KeepBuilder(), PoolRunner()
