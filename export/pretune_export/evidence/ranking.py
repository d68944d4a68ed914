"""How well scores rank measured candidates, as TenSet and TLP judge cost models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pretune.bench.stats import spearman
from pretune_export.batches import FAILED
from pretune_export.dataset import TaskData
from pretune_export.quality import ENOUGH, top_k

Scorer = Callable[[TaskData], np.ndarray]
"""Scores of all candidates of a task, in the order of its groups: ``[n]``, higher is faster."""

KS = (1, 5, 10)

FIGURES = (
    *(f"top{k}" for k in KS), "spearman", "kendall", *(f"random_top{k}" for k in KS),
)  # fmt: skip
"""What every task gets; means over tasks are reported."""


def slowdowns(task: TaskData) -> np.ndarray:
    """Latency of each candidate over the best of the task: ``[n]``; ``e**FAILED`` for one that failed."""
    latency = np.concatenate([group.latency for group in task.groups])
    return np.minimum(latency / latency.min(), np.exp(FAILED))


def rankable(tasks: Sequence[TaskData]) -> list[TaskData]:
    """The tasks with `ENOUGH` candidates."""
    return [task for task in tasks if sum(len(group.latency) for group in task.groups) >= ENOUGH]


def judge(score: Scorer, tasks: Sequence[TaskData]) -> dict[str, Any]:
    """Rank the candidates of each of the tasks that are `rankable`; there must be one.

    Returns
    -------
    dict
        ``tasks`` and ``schedules``, how many there were; ``mean``, `figures` of all rows; ``machines`` and
        ``networks``, the same of each; ``rows``, one per task and machine.
    """
    rows = [_row(score, task) for task in rankable(tasks)]
    machines = sorted({row["machine"] for row in rows})
    networks = sorted({network for row in rows for network in row["networks"]})
    return {
        "tasks": len(rows),
        "schedules": sum(row["schedules"] for row in rows),
        "mean": figures(rows),
        "machines": {
            m: {"tasks": len(own), **figures(own)}
            for m in machines
            if (own := [row for row in rows if row["machine"] == m])
        },
        "networks": {
            n: {"tasks": len(own), **figures(own, n)}
            for n in networks
            if (own := [row for row in rows if n in row["networks"]])
        },
        "rows": rows,
    }


def _row(score: Scorer, task: TaskData) -> dict[str, Any]:
    from scipy.stats import kendalltau

    scores, slower = score(task), slowdowns(task)
    tau: Any = kendalltau(scores, -slower)
    return {
        "task": task.name,
        "id": task.task,
        "networks": list(task.networks),
        "weights": list(task.weights),
        "machine": task.groups[0].machine,
        "schedules": len(scores),
        "best": float(min(group.latency.min() for group in task.groups)),
        **{f"top{k}": top_k(scores, slower, k) for k in KS},
        "spearman": spearman(scores, -slower),
        # Undefined where all scores are equal, which orders nothing.
        "kendall": float(np.nan_to_num(tau.statistic)),
        **{f"random_top{k}": random_top_k(slower, k) for k in KS},
    }


def random_top_k(slower: np.ndarray, k: int) -> float:
    """Expected top-k score of a random order, from `slowdowns` ``[n]``."""
    n, total = len(slower), 0.0
    chance = min(k, n) / n  # that the best of all is among the k drawn; then the next best, and so on
    for i, value in enumerate(np.sort(slower)):
        total += chance / value
        chance *= max(n - k - i, 0) / max(n - 1 - i, 1)
    return total


def figures(rows: Sequence[dict[str, Any]], network: str | None = None) -> dict[str, float]:
    """Means of `FIGURES`, and `weighted_top_k` as ``weighted_top1`` and so on, a mean over machines."""
    machines = {row["machine"] for row in rows}
    return {f: float(np.mean([row[f] for row in rows])) for f in FIGURES} | {
        f"weighted_top{k}": float(
            np.mean([weighted_top_k([r for r in rows if r["machine"] == m], k, network) for m in machines])
        )
        for k in KS
    }


def weighted_top_k(rows: Sequence[dict[str, Any]], k: int, network: str | None = None) -> float:
    """Latency of networks with each task's best candidate over that with the best of the `k` ranked first.

    ``sum(weight * best) / sum(weight * best among k)`` over the tasks of `network`, or over those of all
    networks, of one machine; a task's weight is how often the network calls it. As TenSet (Zheng et al.,
    NeurIPS 2021 datasets track, section 4) and TLP (Zhai et al., ASPLOS 2023, section 6) define it.
    """
    best = chosen = 0.0
    for row in rows:
        for name, weight in zip(row["networks"], row["weights"], strict=True):
            if network in (None, name):
                best += weight * row["best"]
                chosen += weight * row["best"] / row[f"top{k}"]
    return best / chosen
