"""Hyper-parameters of the baselines, and what they are stopped by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretune.bench.stats import spearman
from pretune_export.quality import ENOUGH, top_k


@dataclass(frozen=True)
class BaselineConfig:
    """Hyper-parameters of all baselines.

    Attributes
    ----------
    rounds, patience : int
        Most trees, and trees without a better `quality` after which no more are grown.
    depth, eta, subsample, columns : int, float
        Of the trees on pooled features; MetaSchedule's cost model keeps its own (`XGBConfig`).
    epochs, tasks_per_batch, candidates_per_task, learning_rate, weight_decay, regression
        As in `pretune_export.config.TrainConfig`.
    mlp_hidden, tlp_hidden, tlp_heads : int
    """

    rounds: int = 600
    patience: int = 60
    depth: int = 8
    eta: float = 0.08
    subsample: float = 0.8
    columns: float = 0.5
    epochs: int = 30
    tasks_per_batch: int = 8
    candidates_per_task: int = 48
    learning_rate: float = 1e-3
    weight_decay: float = 1e-4
    regression: float = 0.3
    mlp_hidden: int = 256
    tlp_hidden: int = 128
    tlp_heads: int = 8
    seed: int = 0
    threads: int = 2


def quality(scores: Sequence[np.ndarray], slower: Sequence[np.ndarray]) -> float:
    """What training is stopped by: top-1 + top-5 + half of Spearman, means over tasks.

    Parameters
    ----------
    scores, slower : sequence of numpy.ndarray
        Per task scores and `slowdowns`, ``[n]`` each.
    """
    rows = [
        top_k(s, x, 1) + top_k(s, x, 5) + 0.5 * (spearman(s, -x) or 0.0)
        for s, x in zip(scores, slower, strict=True)
        if len(x) >= ENOUGH
    ]
    return float(np.mean(rows))
