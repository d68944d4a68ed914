"""What each part of the model is worth: the same training with one part left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pretune.bench.stats import spearman
from pretune_export.batches import make_batch
from pretune_export.config import ABLATIONS, TrainConfig
from pretune_export.dataset import TaskData
from pretune_export.encoded import Machine, load_data
from pretune_export.evidence.ranking import judge
from pretune_export.losses import predict, rank
from pretune_export.nets import WorldModelNet
from pretune_export.quality import ENOUGH, score_task, top_k
from pretune_export.train import load_best, train


def ablate(config: TrainConfig, run: Path, *, epochs: int) -> dict[str, dict[str, float]]:
    """Train with each part left out, and judge on the validation split.

    Parameters
    ----------
    config : TrainConfig
    run : pathlib.Path
        Gets ``ablations.json`` and a training run of each, so that a second call continues.
    epochs : int
        Of every training, the complete model's included: fewer than those of the published weights.

    Returns
    -------
    dict
        `evidence.ranking.figures` by what was left out. The last two compare predicted with real final states
        of the same candidates: see `judge_states`.
    """
    out: dict[str, dict[str, float]] = {}
    cache = run / "encoded.pickle"
    for name, what in {"": f"nothing left out, {epochs} epochs", **ABLATIONS}.items():
        settings = msgspec.structs.replace(config, without=name, epochs=epochs)
        folder = run / "ablations" / (name or "nothing")
        train(settings, folder, cache=cache)
        net, data = load_best(folder, settings), load_data(settings, cache)

        def score(
            task: TaskData, net: Any = net, machines: Any = data.machines, name: str = name
        ) -> np.ndarray:
            return score_task(net, task, machines, name)[0]

        out[what] = judge(score, data.validation)["mean"]
        if not name:
            states = judge_states(net, data.validation, data.machines)
    out |= states
    (run / "ablations.json").write_text(json.dumps(out, indent=1) + "\n")
    return out


@torch.no_grad()
def judge_states(
    net: WorldModelNet, tasks: list[TaskData], machines: dict[str, Machine]
) -> dict[str, dict[str, float]]:
    """Rank candidates whose real final state is known, by that and by the predicted one.

    Returns
    -------
    dict
        ``top1``, ``top5`` and ``spearman``, means over the tasks that have `ENOUGH` such candidates.
    """
    rows: dict[str, list[dict[str, float]]] = {"predicted final state": [], "real final state": []}
    for task in tasks:
        batch = make_batch([task], machines, 10**9, np.random.default_rng(0))
        if batch.states is None:
            continue
        row, step = batch.state_at[:, 0], batch.state_at[:, 1]
        final = step == batch.mask.sum(1)[row] - 1
        known = row[final]
        if len(known) < ENOUGH:
            continue
        latency = np.exp(-batch.target[known].numpy().astype(np.float64))
        predicted = predict(net, batch)[0][known]
        real = rank(net, net.encoder(*batch.states)[final], batch, known)
        for found, score in zip(rows.values(), (predicted.numpy(), real.numpy()), strict=True):
            found.append(
                {
                    "top1": top_k(score, latency, 1),
                    "top5": top_k(score, latency, 5),
                    "spearman": spearman(score, -latency),
                }
            )
    return {
        f"{name}, {len(found)} tasks": {f: float(np.mean([r[f] for r in found])) for f in found[0]}
        for name, found in rows.items()
        if found
    }
