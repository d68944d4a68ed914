"""How well a pretrained transition predicts the programs of tasks that it has not seen."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from pretune_export.trajectories import Group, make_batch

from .config import PretrainConfig
from .model import Pretrainer, nest_targets

STEPS = (1, 4, 8, 16, 32, 64, 128)
"""Bounds of the numbers of steps over which the rollout's error is averaged."""


@torch.no_grad()
def evaluate(
    model: Pretrainer, groups: list[Group], config: PretrainConfig, most_tasks: int | None = None
) -> dict[str, Any]:
    """Figures on held-out tasks, by kind of target.

    Returns
    -------
    dict
        For ``"cpu"`` and ``"cuda"``: ``nest`` and ``stores``, the R2 of what is decoded from the predicted
        final latent (``_real``: from the real one; ``_within``: around the mean of each task, which is what
        a ranking needs); ``rollout``, by number of steps the mean squared error over the variance of real
        latents; ``retrieval``, how often the predicted final latent is nearest to its own among those of
        the task, with ``chance``; ``valid``, how often the verdict on a GPU candidate is right, with
        ``valid_majority``.
    """
    model.eval()
    tasks: dict[bool, dict[tuple[str, str], list[Group]]] = {False: {}, True: {}}
    for g in groups:
        tasks[g.judged].setdefault((g.task, g.target), []).append(g)
    out = {}
    for judged, name in ((False, "cpu"), (True, "cuda")):
        members = list(tasks[judged].values())[:most_tasks]
        if members:
            out[name] = _figures(model, members, config)
    model.train()
    return out


def _figures(model: Pretrainer, tasks: Iterable[list[Group]], config: PretrainConfig) -> dict[str, Any]:
    decoded: dict[str, list[list[np.ndarray]]] = defaultdict(list)  # goal, from predicted, from real; by task
    errors, latents, steps, hits, chances, verdicts = [], [], [], [], [], []
    for members in tasks:
        batch = make_batch(members, config.per_group, np.random.default_rng(config.seed))
        predicted, true = model(batch)
        errors.append((predicted - true).square().mean(1).numpy())
        latents.append(true.numpy())
        steps.append(batch.state_at[:, 1].numpy() + 1)
        end, ends = batch.final, torch.nonzero(batch.final).squeeze(1)
        goal = model.nest.goal(torch.from_numpy(nest_targets(batch.states)))[end]
        decoded["nest"].append([x.numpy() for x in (goal, model.nest(predicted[end]), model.nest(true[end]))])
        rows = ends[torch.searchsorted(batch.state_at[end, 0].contiguous(), batch.stores_at)]
        if len(rows):
            goal = model.stores.goal(batch.stores)
            decoded["stores"].append(
                [x.numpy() for x in (goal, model.stores(predicted[rows]), model.stores(true[rows]))]
            )
        if len(ends) > 1:
            own = torch.cdist(predicted[end], true[end])
            hits.append(float((own.diagonal() <= own.amin(1)).float().mean()))
            chances.append(1 / len(ends))
        said = model.valid(predicted[end]).squeeze(1) > 0
        verdicts.append(torch.stack([said, batch.valid], 1)[batch.judged].numpy())
    out: dict[str, Any] = {"tasks": len(errors), "states": sum(map(len, errors))}
    for name, parts in decoded.items():
        goal, ours, real = (np.concatenate([p[i] for p in parts]) for i in range(3))
        task = np.repeat(np.arange(len(parts)), [len(p[0]) for p in parts])
        out[name], out[f"{name}_real"] = _r2(goal, ours), _r2(goal, real)
        goal, ours, real = (_centred(x, task) for x in (goal, ours, real))
        out[f"{name}_within"], out[f"{name}_real_within"] = _r2(goal, ours), _r2(goal, real)
    error, length = np.concatenate(errors), np.concatenate(steps)
    spread = float(np.concatenate(latents).var(0).mean())
    bins = [(a, b, (length >= a) & (length < b)) for a, b in itertools.pairwise(STEPS)]
    out["rollout"] = {
        f"{a}-{b - 1}": round(float(error[m].mean()) / spread, 4) for a, b, m in bins if m.any()
    }
    out["retrieval"], out["chance"] = (round(float(np.mean(x)), 4) for x in (hits, chances))
    verdict = np.concatenate(verdicts)
    if len(verdict):
        out["valid"] = round(float((verdict[:, 0] == verdict[:, 1]).mean()), 4)
        out["valid_majority"] = round(float(max(verdict[:, 1].mean(), 1 - verdict[:, 1].mean())), 4)
    return out


def _centred(values: np.ndarray, task: np.ndarray) -> np.ndarray:
    """`values` without the mean of their task."""
    count = np.bincount(task)[:, None]
    total = np.zeros((len(count), values.shape[1]))
    np.add.at(total, task, values)
    return values - (total / count)[task]


def _r2(goal: np.ndarray, guess: np.ndarray) -> float:
    """Explained share of the variance, all features together, each in its standard deviations."""
    rest = np.square(goal - guess).sum()
    return round(float(1 - rest / np.square(goal - goal.mean(0)).sum()), 4)
