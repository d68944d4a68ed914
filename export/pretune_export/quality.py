"""How well scores order measured candidates: what epochs and weights are compared by."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pretune.bench.stats import spearman
from pretune.errors import OptionError
from pretune_export.batches import make_batch
from pretune_export.dataset import TaskData
from pretune_export.encoded import Machine
from pretune_export.losses import predict
from pretune_export.nets import WorldModelNet

ENOUGH = 8
"""A task with fewer candidates says little about a ranking."""


def top_k(score: np.ndarray, latency: np.ndarray, k: int) -> float:
    """Best latency over the best latency among the `k` best-ranked candidates."""
    best = latency[np.argsort(-score, kind="stable")[:k]].min()
    return float(latency.min() / best)


@torch.no_grad()
def score_task(
    net: WorldModelNet, task: TaskData, machines: dict[str, Machine], without: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and latencies of all candidates of a task."""
    batch = make_batch([task], machines, 10**9, np.random.default_rng(0), states=False)
    score, _ = predict(net, batch, without)
    return score.numpy(), np.exp(-batch.target.numpy().astype(np.float64))


def validate(
    net: WorldModelNet, tasks: list[TaskData], machines: dict[str, Machine], without: str = ""
) -> dict[str, float]:
    """Mean top-1, top-5 and Spearman over tasks with at least `ENOUGH` candidates.

    Raises
    ------
    OptionError
        If there is no such task.
    """
    net.eval()
    rows = []
    for task in tasks:
        score, latency = score_task(net, task, machines, without)
        if len(score) >= ENOUGH:
            rows.append((top_k(score, latency, 1), top_k(score, latency, 5), spearman(score, -latency)))
    net.train()
    if not rows:
        raise OptionError(
            f"no validation task has {ENOUGH} measured schedules, so no epoch can be chosen; "
            "run: pretune-export collect, for networks of the validation split too"
        )
    mean = np.mean(rows, axis=0)
    return {
        "top1": float(mean[0]),
        "top5": float(mean[1]),
        "spearman": float(mean[2]),
        "tasks": float(len(rows)),
    }


def merit(quality: Mapping[str, float]) -> float:
    """What epochs and weights are compared by: the good end of the ranking counts most."""
    return quality["top1"] + quality["top5"] + 0.5 * quality["spearman"]
