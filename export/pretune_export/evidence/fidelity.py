"""How faithful scores are to latencies, on tasks with many measured schedules.

Random schedules of held-out tasks, such as 1 000 for each of 12 subgraphs that have so many::

    pretune-export suite paper22.py suite.jsonl.gz
    pretune-export collect suite.jsonl.gz collected --random 1000 --rounds 0 --limit 12 --min-space 5000
    pretune-export dataset collected --corpus suite.jsonl.gz --out hub_cards/datasets/NAME-fidelity \\
        --machine HOST

An evaluation with that folder among the ``test_datasets`` of its configuration takes them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pretune_export.dataset import TaskData
from pretune_export.encoded import Data
from pretune_export.evidence.ranking import Scorer, judge, rankable

FIGURES = ("spearman", "kendall", "top1", "top5", "top10")

TASKS = 12
"""Tasks that an evaluation looks at, those with the most schedules."""

MANY = 200
"""A task with fewer schedules is no evidence of it."""


def set_apart(data: Data) -> tuple[dict[str, list[TaskData]], list[TaskData]]:
    """Tasks whose ranking is judged, by split, and the `TASKS` with the most schedules, for fidelity.

    Tasks with so many schedules were chosen another way, so a ranking is judged without any of them where
    there are others.
    """
    many = with_many_schedules(data.test if rankable(data.test) else data.validation, TASKS, MANY)
    ranked = {}
    for split, tasks in (("test", data.test), ("validation", data.validation)):
        others = [task for task in tasks if _schedules(task) < MANY]
        ranked[split] = others if rankable(others) else tasks
    return ranked, many


def with_many_schedules(tasks: Sequence[TaskData], count: int, least: int) -> list[TaskData]:
    """Up to `count` different tasks with at least `least` schedules on one machine, by name."""
    chosen: dict[str, TaskData] = {}
    for task in sorted(tasks, key=_schedules, reverse=True):
        if _schedules(task) >= least and len(chosen) < count:
            chosen.setdefault(task.task, task)
    return sorted(chosen.values(), key=lambda task: (task.name, task.task))


def fidelity(score: Scorer, tasks: Sequence[TaskData]) -> dict[str, Any]:
    """Judge the scores of tasks that `with_many_schedules` gave.

    Returns
    -------
    dict
        ``mean`` of `FIGURES`; ``rows`` as `judge` gives them, with the points of a scatter plot: ``scores``
        and ``latencies`` in seconds, of the schedules that did not fail.
    """
    rows = []
    for task in tasks:
        (row,) = judge(score, [task])["rows"]
        latency = np.concatenate([group.latency for group in task.groups])
        ran = np.isfinite(latency)
        points = {"scores": score(task)[ran], "latencies": latency[ran]}
        rows.append(row | {name: [float(f"{x:.4g}") for x in each] for name, each in points.items()})
    return {"mean": {f: float(np.mean([row[f] for row in rows])) for f in FIGURES}, "rows": rows}


def _schedules(task: TaskData) -> int:
    return sum(len(group.latency) for group in task.groups)
