"""The world model inside stock MetaSchedule: a search strategy and a cost model for ``ms.tune_tir``.

    from tvm.s_tir import meta_schedule as ms
    import pretune
    ms.tune_tir(mod, target, work_dir, 64, strategy=pretune.LatentSearch(), cost_model=pretune.CostModel())

Either works without the other: the strategy ranks by itself and does not ask the cost model; the cost model
scores what the stock evolutionary search proposes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune import env
from pretune.compat import setup_tvm
from pretune.messages import notice

setup_tvm()  # for this machine; each context sets up for its own target, see there

from tvm.s_tir.meta_schedule.arg_info import ArgInfo  # noqa: E402
from tvm.s_tir.meta_schedule.cost_model import PyCostModel  # noqa: E402

# Taken from there, since its own module differs between versions of TVM.
from tvm.s_tir.meta_schedule.cost_model.xgb_model import derived_object  # noqa: E402
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate, PySearchStrategy  # noqa: E402

from pretune.hardware import detect, hardware_for_target  # noqa: E402
from pretune.hub.sources import find_weights  # noqa: E402
from pretune.model import TaskScorer, TraceScorer, WorldModel  # noqa: E402
from pretune.search import Posterior, Proposal, TaskSearch  # noqa: E402
from pretune.space import DesignSpace, TaskSpace  # noqa: E402
from pretune.space.trace import trace_to_json  # noqa: E402

if TYPE_CHECKING:
    from tvm.s_tir.meta_schedule import TuneContext


class _Models:
    """World models by target, built on first use."""

    def __init__(self, weights: str | Path | None) -> None:
        self.weights = weights
        self._made: dict[str, tuple[WorldModel, Any]] = {}

    def get(self, target: Any) -> tuple[WorldModel, Any]:
        key = str(target)
        if key not in self._made:
            hardware = hardware_for_target(target, detect())
            threads = env.num_threads() or hardware.cores
            weights = find_weights(hardware, self.weights)
            if weights.notice:
                notice(weights.notice)
            self._made[key] = (WorldModel(weights, threads), hardware)
        return self._made[key]


@derived_object
class LatentSearch(PySearchStrategy):
    """Search in latent space as a MetaSchedule search strategy.

    Parameters
    ----------
    weights : str or Path, optional
        Weights folder; by default the installed one that covers the target best.
    batch : int
        Candidates per round, whatever ``num_trials_per_iter`` asks for at most: smaller rounds learn sooner.
    seed : int
    """

    def __init__(
        self,
        weights: str | Path | None = None,
        *,
        batch: int = 16,
        seed: int = 0,
        _models: _Models | None = None,
    ) -> None:
        super().__init__()
        self._models = _models or _Models(weights)
        self._arguments = (weights, batch, seed)
        self._batch, self._seed = batch, seed
        self._context: TuneContext | None = None
        self._search: TaskSearch | None = None
        self._pending: list[Proposal] = []
        self._left = 0

    def _initialize_with_tune_context(self, context: TuneContext) -> None:
        self._context = context

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: Any,
        database: Any = None,
        cost_model: Any = None,
    ) -> None:
        context = self._context
        assert context is not None and context.mod is not None and context.target is not None
        assert context.space_generator is not None and context.space_generator.postprocs is not None
        model, hardware = self._models.get(context.target)
        postprocs = list(context.space_generator.postprocs)
        spaces = [DesignSpace(context.mod, sch, postprocs, self._seed + 1) for sch in design_spaces]
        space = TaskSpace(context.mod, context.target, spaces)
        self._search = TaskSearch(space, TaskScorer(model, space, hardware), seed=self._seed)
        self._left = max_trials
        self._batch = min(self._batch, num_trials_per_iter)
        self._args = ArgInfo.from_entry_func(context.mod, remove_preproc=True)

    def post_tuning(self) -> None:
        self._search = None

    def generate_measure_candidates(self) -> list[MeasureCandidate] | None:
        if self._search is None or self._left <= 0:
            return None
        self._pending = self._search.propose(min(self._batch, self._left))
        self._left -= len(self._pending)
        if not self._pending:
            return None
        return [MeasureCandidate(p.candidate.schedule, self._args) for p in self._pending]

    def notify_runner_results(self, measure_candidates: Any, results: Any) -> None:
        if self._search is not None and self._pending:
            self._search.update(self._pending, [_latency(r) for r in results])
        self._pending = []

    # `tune_relax` clones it for each task: models are shared. TVM wants a SearchStrategy, which only
    # `derived_object` makes of it.
    def clone(self) -> LatentSearch:  # pyright: ignore[reportIncompatibleMethodOverride]
        weights, batch, seed = self._arguments
        return LatentSearch(weights, batch=batch, seed=seed, _models=self._models)


def _latency(result: Any) -> float:
    if result.run_secs is None or result.error_msg is not None:
        return float("inf")
    return float(np.mean([float(s) for s in result.run_secs]))


@derived_object
class CostModel(PyCostModel):
    """The world model as a MetaSchedule cost model: scores candidates of any search strategy.

    Trials correct it on each task (`pretune.search.Posterior`); nothing is trained.

    Parameters
    ----------
    weights : str or Path, optional
        Weights folder; by default the installed one that covers the target best.
    """

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        self._models = _Models(weights)
        self._tasks: dict[int, _Scored] = {}

    def load(self, path: str) -> None:
        """Nothing to do: weights are read-only, and trials are remembered by the tuning database."""

    def save(self, path: str) -> None:
        """Nothing to do; see `load`."""

    def update(self, context: TuneContext, candidates: list[MeasureCandidate], results: list[Any]) -> None:
        task = self._task(context)
        score, embedding = task.score(candidates)
        task.posterior.update(score, embedding, np.array([_latency(r) for r in results]))

    def predict(self, context: TuneContext, candidates: list[MeasureCandidate]) -> np.ndarray:
        task = self._task(context)
        mean, _deviation = task.posterior.predict(*task.score(candidates))
        return mean.astype("float64")

    def _task(self, context: TuneContext) -> _Scored:
        from tvm_ffi import structural_hash

        key = structural_hash(context.mod)
        if key not in self._tasks:
            self._tasks[key] = _Scored(context, *self._models.get(context.target))
        return self._tasks[key]


class _Scored:
    """One task: the scorer of its traces, and what its trials taught."""

    def __init__(self, context: TuneContext, model: WorldModel, hardware: Any) -> None:
        assert context.mod is not None
        self.scorer = TraceScorer(context.mod, model, hardware)
        self.posterior = Posterior()

    def score(self, candidates: list[MeasureCandidate]) -> tuple[np.ndarray, np.ndarray]:
        """Scores ``[n]`` and embeddings ``[n, e]``."""
        return self.scorer.score([trace_to_json(candidate.sch.trace) for candidate in candidates])
