"""Gradient-boosted trees on MetaSchedule's features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune_export.dataset import TaskData
from pretune_export.encoded import Data, Machine
from pretune_export.evidence.baselines.config import BaselineConfig, quality
from pretune_export.evidence.ranking import Scorer, slowdowns
from pretune_export.evidence.stores import WIDTH, Stores, candidate_keys

if TYPE_CHECKING:
    import xgboost


@dataclass(frozen=True)
class _Rows:
    """Inputs of several tasks.

    Attributes
    ----------
    x : numpy.ndarray
        float32 ``[rows, features]``, one or several rows per candidate.
    candidate : numpy.ndarray
        Which candidate a row is of, counted through all tasks.
    counts : list of int
        Candidates of each task.
    """

    x: np.ndarray
    candidate: np.ndarray
    counts: list[int]

    def sums(self, of_rows: np.ndarray) -> np.ndarray:
        """Sums over the rows of each candidate."""
        return np.bincount(self.candidate, weights=of_rows, minlength=sum(self.counts))

    def by_task(self, of_rows: np.ndarray) -> list[np.ndarray]:
        """`sums`, split by task."""
        return np.split(self.sums(of_rows), np.cumsum(self.counts)[:-1])


def _rows(tasks: Sequence[TaskData], machines: dict[str, Machine], stores: Stores, pooled: bool) -> _Rows:
    parts, counts = [], []
    for task in tasks:
        counts.append(sum(len(group.latency) for group in task.groups))
        for group in task.groups:
            vector = machines[group.machine].vector
            for key in candidate_keys(group):
                x = _pool(stores[key]) if pooled else stores[key]
                parts.append(np.hstack([x, np.broadcast_to(vector, (len(x), len(vector)))]))
    candidate = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return _Rows(np.concatenate(parts), candidate, counts)


def _pool(x: np.ndarray) -> np.ndarray:
    """Sum and maximum over a candidate's store statements, and their number: ``[1, 2 * WIDTH + 1]``."""
    if not len(x):
        return np.full((1, 2 * WIDTH + 1), np.nan, np.float32)  # XGBoost takes it for missing
    return np.concatenate([x.sum(0), x.max(0), [len(x)]])[None].astype(np.float32)


def grow(kind: str, data: Data, stores: Stores, config: BaselineConfig) -> tuple[Scorer, dict[str, Any]]:
    """Grow trees until `quality` on the validation tasks gets no better."""
    import xgboost
    from xgboost.callback import EarlyStopping

    pooled = kind != "metaschedule"
    train, validation = (
        _rows(tasks, data.machines, stores, pooled) for tasks in (data.train, data.validation)
    )
    # Normalised throughput, as all of them learn it: 1 is the task's best candidate.
    label = np.concatenate([1.0 / slowdowns(task) for task in data.train]).astype(np.float32)
    matrix = xgboost.DMatrix(train.x, label=label[train.candidate])
    slower = [slowdowns(task) for task in data.validation]

    def judged(predicted: np.ndarray, _matrix: xgboost.DMatrix) -> tuple[str, float]:
        return "quality", quality(validation.by_task(predicted), slower)

    def pack_sum(predicted: np.ndarray, matrix: xgboost.DMatrix) -> tuple[np.ndarray, np.ndarray]:
        # As in MetaSchedule's XGBModel: squared error of the sum, weighted by the label.
        label = matrix.get_label()
        return (train.sums(predicted)[train.candidate] - label) * label, label

    if kind == "ndcg":
        matrix.set_group(train.counts)
    stop = EarlyStopping(
        rounds=config.patience, metric_name="quality", data_name="validation", maximize=True, save_best=True
    )
    booster = xgboost.train(
        _settings(kind, config),
        matrix,
        config.rounds,
        evals=[(xgboost.DMatrix(validation.x), "validation")],
        obj=None if pooled else pack_sum,
        custom_metric=judged,
        callbacks=[stop],
        verbose_eval=False,
    )

    def score(task: TaskData) -> np.ndarray:
        rows = _rows([task], data.machines, stores, pooled)
        return rows.sums(booster.predict(xgboost.DMatrix(rows.x)))

    return score, {"trees": booster.num_boosted_rounds()}


def _settings(kind: str, config: BaselineConfig) -> dict[str, Any]:
    common = {
        "seed": config.seed, "nthread": config.threads, "tree_method": "hist",
        "disable_default_eval_metric": 1,
    }  # fmt: skip
    if kind == "metaschedule":
        from tvm.s_tir.meta_schedule.cost_model.xgb_model import XGBConfig

        stock = XGBConfig()
        return common | {
            "max_depth": stock.max_depth, "gamma": stock.gamma, "min_child_weight": stock.min_child_weight,
            "eta": stock.eta,
        }  # fmt: skip
    objectives = {
        "regression": {"objective": "reg:squarederror"},
        # The throughput is the gain; without this it would be the exponent of one, and a whole number.
        "ndcg": {"objective": "rank:ndcg", "ndcg_exp_gain": False},
    }
    return common | objectives[kind] | {
        "max_depth": config.depth, "eta": config.eta, "subsample": config.subsample,
        "colsample_bytree": config.columns,
    }  # fmt: skip
