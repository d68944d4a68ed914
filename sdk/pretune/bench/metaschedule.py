"""The baseline: stock MetaSchedule, measuring through the same pool as pretune."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.bench.common import output_to
from pretune.bench.found import Found, best_so_far
from pretune.compat import setup_tvm
from pretune.errors import MissingExtraError, one_line
from pretune.records import trace_key
from pretune.space import trace_to_json

if TYPE_CHECKING:
    from pretune.intake import Task
    from pretune.measure import Pool


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
    task: Task, target: Any, pool: Pool, *, budgets: Sequence[int], seed: int, work_dir: Path
) -> dict[int, Found]:
    """Tune a task with ``ms.tune_tir`` as it comes: EvolutionarySearch, XGBModel, 64 candidates an iteration.

    Only builder and runner are ours. Slow candidates stop early, as they do for pretune, and a candidate's
    latency is its fastest repeat, as it is for pretune. As for pretune too, the best candidates are timed in
    turns before the winner is named; `Found.seconds` leaves that out, since ``tune_tir`` does not do it.

    It is run once, with the largest budget, and smaller ones are its first trials. EvolutionarySearch looks
    at ``max_trials`` only to cut the last iteration short (``GenerateMeasureCandidates`` in TVM's
    ``evolutionary_search.cc``), XGBModel and a scheduler with one task never do. So a multiple of 64 is the
    beginning of every longer run, as long as iterations give 64 candidates; where one gives fewer, for it had
    drawn some before, the few that complete a smaller budget are the best predicted of the next iteration,
    as they would be in a run of its own, but for the one in twenty that is drawn at random.

    Parameters
    ----------
    budgets : sequence of int
        Trials.
    work_dir : Path
        MetaSchedule's logs, and what it prints, go here.

    Returns
    -------
    dict of int to Found
        By budget. `Found.seconds` of a smaller one ends with the iteration that its last trial is in.

    Raises
    ------
    MissingExtraError
        If XGBoost is not installed.
    """
    check_xgboost()
    setup_tvm()
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.MemoryDatabase()
    trials = Trials()
    builder, runner = through_pool(pool, trials)
    work_dir.mkdir(parents=True, exist_ok=True)
    silence_logger()
    ended = ""
    with output_to(work_dir / "output.log"):
        try:
            ms.tune_tir(
                task.mod,
                target,
                str(work_dir),
                max(budgets),
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
            if trials.stopped:  # by Ctrl-C or a dead pool, which TVM may have turned into an error of its own
                raise trials.stopped from None
            ended = one_line(error)
    seconds = trials.clock()
    # One record for each trial, in their order: a failure has a latency of 1e10 s.
    records = list(database.get_all_tuning_records())
    found: dict[int, Found] = {}
    for budget in budgets:
        latencies = trials.latencies[:budget]
        whole = len(latencies) == len(trials.latencies)
        found[budget] = Found(
            traces=[trace_to_json(record.trace) for record in _finalists(records[:budget])],
            trials=len(latencies),
            failures=sum(map(math.isinf, latencies)),
            seconds=seconds if whole else trials.done[budget - 1],
            error=ended if whole else "",
            curve=best_so_far(latencies),
            chosen_by="search",
        )
    _name_winners(task, pool, list(found.values()))
    return found


def _finalists(records: Sequence[Any]) -> list[Any]:
    """The fastest records, by their latencies while MetaSchedule tuned."""
    from pretune.tuning import FINALISTS

    ran = [(min(float(value) for value in record.run_secs or (math.inf,)), record) for record in records]
    ran = [(seconds, record) for seconds, record in ran if seconds < 1e9 and len(record.trace.insts)]
    return [record for _seconds, record in sorted(ran, key=lambda one: one[0])[:FINALISTS]]


def _name_winners(task: Task, pool: Pool, found: Sequence[Found]) -> None:
    """Time all finalists in turns, as pretune does with its own, and keep the fastest of each."""
    from pretune.tuning import FINAL_ROUNDS, replay

    traces = {trace_key(trace): trace for one in found for trace in one.traces}
    timed = pool.interleave([replay(task.mod, trace) for trace in traces.values()], rounds=FINAL_ROUNDS)
    latencies = {key: measured.latency for key, measured in zip(traces, timed, strict=True)}
    for one in found:
        trace = min(one.traces, key=lambda trace: latencies[trace_key(trace)], default=None)
        if trace is not None:
            latency = latencies[trace_key(trace)]
            one.trace, one.latency = trace, latency if math.isfinite(latency) else None


def silence_logger() -> None:
    """Keep ``tune_tir`` from logging to stdout; to be called before each."""
    logger = logging.getLogger("tvm.s_tir.meta_schedule")
    # Its console handler takes the level that the logger has then; the logger's own it sets to DEBUG.
    logger.setLevel(logging.ERROR)
    # It sets the handlers up anew, and fails on one without a name, as test runners attach them.
    logger.handlers.clear()


@dataclass
class Trials:
    """What went through the pool.

    Attributes
    ----------
    latencies : list of float
        Of each candidate, in seconds; infinite for one that failed.
    done : list of float
        Seconds from the start to the end of the iteration that the candidate was measured in.
    stopped : BaseException or None
        What ended it from outside.
    """

    latencies: list[float] = field(default_factory=list)
    done: list[float] = field(default_factory=list)
    stopped: BaseException | None = None
    start: float = field(default_factory=time.perf_counter)

    def clock(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start


def through_pool(pool: Pool, trials: Trials) -> tuple[Any, Any]:
    """A builder that keeps the programs, and a runner that builds and times them in the pool."""
    from tvm.s_tir.meta_schedule.builder import BuilderResult, PyBuilder
    from tvm.s_tir.meta_schedule.cost_model.xgb_model import derived_object  # its own module moves
    from tvm.s_tir.meta_schedule.runner import PyRunner, RunnerFuture, RunnerResult

    programs: dict[str, Any] = {}
    names = (f"candidate-{number}" for number in itertools.count())

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
            mods = [programs.pop(str(one.artifact_path)) for one in runner_inputs]
            best = min(trials.latencies, default=math.inf)
            futures = []
            try:
                results = pool.measure(mods, best=best if math.isfinite(best) else None)
            except BaseException as error:
                trials.stopped = error
                raise
            for measured in results:
                trials.latencies.append(measured.latency)
                trials.done.append(trials.clock())
                if measured.ok:
                    result = RunnerResult([measured.latency], None)
                else:
                    result = RunnerResult(None, measured.error or measured.error_kind)
                futures.append(RunnerFuture(lambda: True, lambda result=result: result))
            return futures

    return KeepBuilder(), PoolRunner()
