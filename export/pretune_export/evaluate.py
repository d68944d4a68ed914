"""How well weights rank measured schedules of networks they were not trained on.

One JSON, and plots for the card.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretune.bench.stats import spearman
from pretune.errors import OptionError
from pretune_export.dataset import TaskData
from pretune_export.nets import WorldModelNet
from pretune_export.train import ENOUGH, Data, Machine, make_batch, score_task, top_k

FIGURES = ("top1", "top5", "top10", "spearman", "random_top1", "random_top5")


@torch.no_grad()
def rollout_error(
    net: WorldModelNet, tasks: list[TaskData], machines: dict[str, Machine]
) -> dict[int, float]:
    """Squared distance of predicted to real latents, by number of actions rolled out: medians over `tasks`.

    Divided by the mean squared distance between real latents of different candidates of the same batch, so
    that 1 means: as far off as another candidate.
    """
    out: dict[int, list[float]] = defaultdict(list)
    rng = np.random.default_rng(0)
    for task in tasks:
        batch = make_batch([task], machines, 10**9, rng)
        if batch.states is None or len(batch.state_at) < 4:
            continue
        zs = torch.stack(
            net.rollout(net.encoder(*batch.initial)[batch.task], batch.types, batch.actions, batch.mask), 1
        )
        real = net.encoder(*batch.states)
        row, step = batch.state_at[:, 0], batch.state_at[:, 1]
        error = (zs[row, step] - real).square().mean(-1)
        scale = (real - real[torch.randperm(len(real))]).square().mean().clamp_min(1e-6)
        for s, e in zip(step.tolist(), (error / scale).tolist(), strict=True):
            out[s + 1].append(e)
    return {s: float(np.median(e)) for s, e in sorted(out.items())}


def judge_tasks(net: WorldModelNet, tasks: list[TaskData], machines: dict[str, Machine]) -> dict[str, Any]:
    """Rank the candidates of each task that has `ENOUGH` of them.

    Returns
    -------
    dict
        ``mean`` over tasks, counts, the same by network, random choice for scale, rollout error by step, and
        the rows.
    """
    rows = []
    rng = np.random.default_rng(0)
    for task in tasks:
        score, latency = score_task(net, task, machines)
        if len(score) < ENOUGH:
            continue
        random = [top_k(rng.random(len(latency)), latency, k) for k in (1, 5) for _ in range(20)]
        rows.append(
            {
                "task": task.name,
                "id": task.task,
                "networks": list(task.networks),
                "machine": task.groups[0].machine,
                "schedules": len(score),
                "top1": top_k(score, latency, 1),
                "top5": top_k(score, latency, 5),
                "top10": top_k(score, latency, 10),
                "spearman": spearman(score, -latency),
                "random_top1": float(np.mean(random[:20])),
                "random_top5": float(np.mean(random[20:])),
            }
        )
    by_network: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        for network in row["networks"] or ["?"]:
            by_network[network].append(row)
    return {
        "mean": {f: float(np.mean([r[f] for r in rows])) for f in FIGURES},
        "tasks": len(rows),
        "schedules": sum(r["schedules"] for r in rows),
        "networks": {
            n: {"tasks": len(v), **{f: float(np.mean([r[f] for r in v])) for f in FIGURES}}
            for n, v in sorted(by_network.items())
        },
        "rollout_error": rollout_error(net, tasks, machines),
        "rows": rows,
    }


def evaluate(net: WorldModelNet, data: Data, out: Path) -> dict[str, Any]:
    """Judge the weights on the test split and on the validation split, whose figures chose the epoch.

    Writes ``evaluation.json`` and ``ranking.png`` to `out`.

    Returns
    -------
    dict
        ``test`` and ``validation`` as `judge_tasks` gives them, each only if the datasets have it; ``main``,
        which of the two the figures to quote come from (the test split where there is one); ``mean`` of that.

    Raises
    ------
    OptionError
        If neither split has a task with enough candidates.
    """
    net.eval()
    result: dict[str, Any] = {}
    for split, tasks in (("test", data.test), ("validation", data.validation)):
        if any(sum(len(g.latency) for g in task.groups) >= ENOUGH for task in tasks):
            result[split] = judge_tasks(net, tasks, data.machines)
    if not result:
        raise OptionError(
            f"no task for test or validation has {ENOUGH} measured schedules; run: pretune-export collect"
        )
    main = next(iter(result))
    result = {"main": main, "mean": result[main]["mean"], **result}
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    _plot(result[main], out / "ranking.png")
    return result


def _plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    names = list(result["networks"])
    at = np.arange(len(names))
    for k, (key, label) in enumerate(
        (("random_top1", "random, top-1"), ("top1", "pretune, top-1"), ("top5", "pretune, top-5"))
    ):
        left.bar(at + (k - 1) * 0.27, [result["networks"][n][key] for n in names], 0.27, label=label)
    left.set_xticks(at, names, rotation=60, ha="right", fontsize=7)
    left.set_ylim(0, 1)
    left.set_ylabel("best latency / best among the k first")
    left.set_title("Ranking on held-out tasks")
    left.legend(fontsize=8)
    steps = result["rollout_error"]
    right.plot(list(steps), list(steps.values()), marker="o")
    right.set_xlabel("actions rolled out")
    right.set_ylabel("error (1 = another candidate)")
    right.set_title("Predicted against real latents")
    right.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
