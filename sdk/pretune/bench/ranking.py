"""``pretune bench ranking``: candidates ranked a second, against those that stock MetaSchedule scores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune.bench.common import (
    Bench,
    conv2d_relu,
    depthwise_relu,
    environment,
    matmul_relu,
    prepare,
    show_environment,
    softmax,
)
from pretune.bench.metaschedule import check_xgboost
from pretune.bench.stats import geomean
from pretune.model import TaskScorer
from pretune.search import TaskSearch
from pretune.space import TaskSpace

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.intake import Task

CANDIDATES = 32768
"""Ranked in one go, over all design spaces of a task."""

TRAINED_ON = 128
"""Candidates that XGBModel is trained on: below 100 it returns random numbers and computes no features."""

BATCH = 64


def run(*, rounds: int = 2, weights: str | Path | None = None) -> dict[str, Any]:
    """Time both on the same tasks, in turns.

    pretune: encoding, rolling out and ranking random decision vectors. MetaSchedule: a whole round of its
    evolutionary search, with the candidates that its trained cost model scored in it.

    Parameters
    ----------
    rounds : int
        Turns of each; medians count.
    weights : str or Path, optional
        Weights folder.

    Returns
    -------
    dict
        ``ratio``, the geometric mean over the tasks of pretune's rate over MetaSchedule's; ``rows`` by task,
        with rates in candidates a second. ``search_rate`` is that of pretune's whole proposal (sampling,
        evolving and replaying 64 candidates in TVM included).
    """
    check_xgboost()
    bench = prepare(weights)
    rows = [_row(bench, task, rounds) for task in (matmul_relu(), conv2d_relu(), softmax(), depthwise_relu())]
    ratios = [row["ratio"] for row in rows]
    return {
        "benchmark": "ranking",
        "ratio": geomean(ratios),
        "pretune_rate": geomean([row["pretune_rate"] for row in rows]),
        "metaschedule_rate": geomean([row["metaschedule_rate"] for row in rows]),
        "weights": bench.weights.config.name,
        "rows": rows,
        **environment(bench.machine),
    }


def render(found: Mapping[str, Any], console: Console) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table("task")
    for name in ("pretune, a second", "its whole search", "MetaSchedule, a second", "ratio"):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        rates = (f"{row[rate]:,.0f}" for rate in ("pretune_rate", "search_rate", "metaschedule_rate"))
        table.add_row(row["name"], *rates, f"{row['ratio']:.1f}x")
    console.print(table)
    console.print(f"geometric mean: {found['ratio']:.1f}x, with {found['threads']} threads")
    show_environment(dict(found), console)


def _row(bench: Bench, task: Task, rounds: int) -> dict[str, Any]:
    space = TaskSpace.generate(task.mod, bench.target)
    rng = np.random.default_rng(0)
    stock = _Stock(task, bench.target)
    times: dict[str, list[float]] = {"pretune_rate": [], "search_rate": [], "metaschedule_rate": []}
    for turn in range(rounds):
        rows = [one.sample(CANDIDATES // len(space.spaces), rng) for one in space.spaces]
        start = time.perf_counter()
        scorer = TaskScorer(bench.model, space, bench.hardware)  # the encoder's part is counted too
        scorer.score_all(rows)
        times["pretune_rate"].append(sum(map(len, rows)) / (time.perf_counter() - start))

        search = TaskSearch(space, scorer, seed=turn)
        start = time.perf_counter()
        search.propose(BATCH)
        times["search_rate"].append(search.scored / (time.perf_counter() - start))

        times["metaschedule_rate"].append(stock.rate())
    row: dict[str, Any] = {name: statistics.median(each) for name, each in times.items()}
    return {"name": task.name, **row, "ratio": row["pretune_rate"] / row["metaschedule_rate"], "all": times}


class _Stock:
    """MetaSchedule's evolutionary search on a task, with its cost model trained."""

    def __init__(self, task: Task, target: Any) -> None:
        from tvm.s_tir import meta_schedule as ms
        from tvm.s_tir.meta_schedule.runner import RunnerResult

        self.ms, self.task = ms, task
        self.context = ms.TuneContext(
            mod=task.mod,
            target=target,
            space_generator="post-order-apply",
            search_strategy="evolutionary",
            num_threads="physical",
            rand_state=1,
        )
        self.counter, self.scored = self._counting(ms.cost_model.XGBModel())
        # The latencies are made up, of what a learner can tell apart: the trees grow as they would.
        context = ms.TuneContext(
            mod=task.mod,
            target=target,
            space_generator="post-order-apply",
            search_strategy="replay-trace",
            num_threads="physical",
            rand_state=2,
        )
        context.pre_tuning(TRAINED_ON, TRAINED_ON, context.generate_design_space(), None, None)
        candidates: list[Any] = list(context.generate_measure_candidates() or [])
        if len(candidates) < 100:
            raise RuntimeError(f"{task.name}: MetaSchedule sampled {len(candidates)} candidates")
        results = [RunnerResult([1e-6 * len(c.sch.mod.script())], None) for c in candidates]
        self.counter.update(self.context, candidates, results)

    def _counting(self, model: Any) -> tuple[Any, list[int]]:
        """A cost model that asks another one, and a list of how many candidates it scored each time."""
        from tvm.s_tir.meta_schedule.cost_model.xgb_model import derived_object  # its own module moves

        scored: list[int] = []

        @derived_object
        class Counting(self.ms.cost_model.PyCostModel):
            def load(self, path: str) -> None:
                model.load(path)

            def save(self, path: str) -> None:
                model.save(path)

            def update(self, context: Any, candidates: Any, results: Any) -> None:
                model.update(context, candidates, results)

            def predict(self, context: Any, candidates: Any) -> Any:
                scored.append(len(candidates))
                return model.predict(context, candidates)

        return Counting(), scored

    def rate(self) -> float:
        """Candidates scored a second in one round of the search."""
        context = self.context
        context.pre_tuning(
            BATCH, BATCH, context.generate_design_space(), self.ms.database.MemoryDatabase(), self.counter
        )
        self.scored.clear()
        start = time.perf_counter()
        context.generate_measure_candidates()
        seconds = time.perf_counter() - start
        context.post_tuning()
        return sum(self.scored) / seconds
