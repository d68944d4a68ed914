"""What each part of the model is worth: the same training run with one part left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pretune.bench.stats import spearman
from pretune_export.dataset import TaskData
from pretune_export.nets import WorldModelNet
from pretune_export.train import (
    ABLATIONS,
    ENOUGH,
    Data,
    Machine,
    TrainConfig,
    load_best,
    load_data,
    make_batch,
    predict,
    rank,
    top_k,
    train,
    validate,
)


def ablate(config: TrainConfig, out: Path, *, epochs: int, cache: Path | None = None) -> dict[str, Any]:
    """Train with each part left out, and judge on the validation split.

    Parameters
    ----------
    config : TrainConfig
    out : pathlib.Path
        A folder per run is made in it, so that a second call continues; ``ablations.json`` is written beside.
    epochs : int
        Of every run, the complete model's included: fewer than those of the published weights.
    cache : pathlib.Path, optional
        See `train.load_data`.

    Returns
    -------
    dict
        By part left out (``"nothing"`` for the complete model): ``top1``, ``top5``, ``spearman``, means over
        validation tasks. ``"true_state"`` compares predicted with real final states: see `judge_states`.
    """
    result: dict[str, Any] = {}
    data = load_data(config, cache)
    for name in ("", *ABLATIONS):
        run = msgspec.structs.replace(config, without=name, epochs=epochs)
        folder = out / (name or "nothing")
        train(run, folder, cache=cache)
        net = load_best(folder, run)
        result[name or "nothing"] = validate(net, data.validation, data.machines, name)
        if not name:
            result["true_state"] = judge_states(net, data)
        (out.parent / "ablations.json").write_text(
            json.dumps({"epochs": epochs, "figures": result}, indent=1) + "\n"
        )
    return result


@torch.no_grad()
def judge_states(net: WorldModelNet, data: Data) -> dict[str, dict[str, float]]:
    """Rank the candidates whose real final state is known by that state, and by the predicted one.

    Returns
    -------
    dict
        ``predicted`` and ``real``, each with ``top1``, ``top5``, ``spearman``: means over the ``tasks`` of
        the validation split that have `ENOUGH` such candidates.
    """
    rows: dict[str, list[tuple[float, float, float]]] = {"predicted": [], "real": []}
    for task in data.validation:
        for name, (score, latency) in _two_scores(net, task, data.machines).items():
            rows[name].append((top_k(score, latency, 1), top_k(score, latency, 5), spearman(score, -latency)))
    return {
        name: dict(zip(("top1", "top5", "spearman"), map(float, np.mean(r, axis=0)), strict=True))
        | {"tasks": float(len(r))}
        for name, r in rows.items()
        if r
    }


def _two_scores(
    net: WorldModelNet, task: TaskData, machines: dict[str, Machine]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    batch = make_batch([task], machines, 10**9, np.random.default_rng(0))
    if batch.states is None:
        return {}
    row, step = batch.state_at[:, 0], batch.state_at[:, 1]
    final = step == batch.mask.sum(1)[row] - 1
    rows = row[final]
    if len(rows) < ENOUGH:
        return {}
    latency = np.exp(-batch.target[rows].numpy().astype(np.float64))
    real = rank(net, net.encoder(*batch.states)[final], batch, rows)
    predicted = predict(net, batch)[0][rows]
    return {"predicted": (predicted.numpy(), latency), "real": (real.numpy(), latency)}
