"""How good weights are: everything that was measured, in one JSON and one page of plots.

The ranking of held-out tasks is judged here. Baselines, ablations, scaling and search take hours; they are
made one by one (``pretune-export baselines``, ``pretune-export scaling``, ``pretune bench search``), left in
the folder of the training run, and put together here.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretune.errors import OptionError
from pretune_export.batches import make_batch
from pretune_export.config import TrainConfig
from pretune_export.dataset import TaskData
from pretune_export.encoded import Machine, data_key, load_data
from pretune_export.evidence.fidelity import FIGURES, fidelity, set_apart
from pretune_export.evidence.plots import draw
from pretune_export.evidence.ranking import figures, judge, rankable
from pretune_export.evidence.scaling import count
from pretune_export.evidence.search import curves, summarise
from pretune_export.nets import WorldModelNet
from pretune_export.quality import ENOUGH, score_task
from pretune_export.train import load_best


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
            net.rollout(net.encoder(*batch.initial)[batch.origin], batch.types, batch.actions, batch.mask), 1
        )
        real = net.encoder(*batch.states)
        row, step = batch.state_at[:, 0], batch.state_at[:, 1]
        error = (zs[row, step] - real).square().mean(-1)
        scale = (real - real[torch.randperm(len(real))]).square().mean().clamp_min(1e-6)
        for s, e in zip(step.tolist(), (error / scale).tolist(), strict=True):
            out[s + 1].append(e)
    return {s: float(np.median(e)) for s, e in sorted(out.items())}


def evaluate(config: TrainConfig, run: Path, out: Path) -> dict[str, Any]:
    """Judge the weights of a training run on the test split and the validation split, which chose the epoch.

    Writes ``evaluation.json`` and ``evaluation.png`` to `out`.

    Parameters
    ----------
    config : TrainConfig
    run : pathlib.Path
        Training run. ``baselines.json``, ``ablations.json`` (figures by name), ``scaling.json`` and every
        ``search*.json`` (of ``pretune bench search``) in it become part of the result.
    out : pathlib.Path

    Returns
    -------
    dict
        ``test`` and ``validation`` as `judge` gives them, with ``rollout_error``, each only if the datasets
        have it, and without the tasks of ``fidelity`` where there are others; ``main``, which of the two the
        figures to quote come from (the test split where there is one); ``mean`` of that; ``fidelity`` if
        tasks of `main` have many schedules; ``baselines``, with the ``gain`` over each in top-1;
        ``ablations``, ``scaling``, ``search`` and ``curves`` as far as they were made.

    Raises
    ------
    OptionError
        If neither split has a task with enough candidates, or the baselines were trained on other data.
    """
    net = load_best(run, config).eval()
    data = load_data(config, run / "encoded.pickle")

    def score(task: TaskData) -> np.ndarray:
        return score_task(net, task, data.machines)[0]

    ranked, many = set_apart(data)
    splits: dict[str, Any] = {}
    for split, tasks in ranked.items():
        if rankable(tasks):
            error = rollout_error(net, tasks, data.machines)
            splits[split] = {**judge(score, tasks), "rollout_error": error}
    if not splits:
        raise OptionError(
            f"no task for test or validation has {ENOUGH} measured schedules; run: pretune-export collect"
        )
    main = next(iter(splits))
    result: dict[str, Any] = {"main": main, "mean": splits[main]["mean"], **splits}
    if baselines := _part(run, "baselines"):
        if baselines["data"] != data_key(config, [*config.datasets, *config.test_datasets]):
            raise OptionError(
                f"{run / 'baselines.json'} is of other data; run: pretune-export baselines CONFIG {run}"
            )
        result["baselines"] = {
            name: {split: figures(_rows(found[split], ranked[split])) for split in splits}
            | {"gain": _gain(splits[main]["rows"], _rows(found[main], ranked[main]))}
            for name, found in baselines["baselines"].items()
        }
    if many:
        result["fidelity"] = fidelity(score, many)
        if baselines:
            means = {name: figures(_rows(b[main], many)) for name, b in baselines["baselines"].items()}
            result["fidelity"]["baselines"] = {n: {f: mean[f] for f in FIGURES} for n, mean in means.items()}
    if ablations := _part(run, "ablations"):
        result["ablations"] = ablations
    if scaling := _part(run, "scaling"):
        result["scaling"] = [
            *scaling,
            *({"varied": v, **count(data.train), **result["mean"]} for v in ("tasks", "schedules")),
        ]
    if searches := _searches(run):
        result["search"], result["curves"] = summarise(searches), curves(searches)
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, out / "evaluation.png")
    return result


def _part(run: Path, name: str) -> Any:
    path = run / f"{name}.json"
    if path.exists():
        return json.loads(path.read_text())
    print(f"{path}: not there, so left out", file=sys.stderr)
    return None


def _searches(run: Path) -> list[Any]:
    """What ``pretune bench search --json`` printed into ``search*.json``."""
    found = []
    for file in sorted(run.glob("search*.json")):
        found.append(json.loads(file.read_text()))
        if "summary" not in found[-1]:
            raise OptionError(f"{file} is of an earlier version; run: pretune bench search --json > {file}")
    return found


def _gain(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Mean difference in top-1 over tasks, and its 95 % interval by a bootstrap over tasks."""
    from scipy.stats import bootstrap

    difference = [a["top1"] - b["top1"] for a, b in zip(ours, theirs, strict=True)]
    found = bootstrap((difference,), np.mean, method="percentile", rng=np.random.default_rng(0))
    low, high = found.confidence_interval
    return {"mean": float(np.mean(difference)), "low": float(low), "high": float(high)}


def _rows(found: dict[str, Any], tasks: list[TaskData]) -> list[dict[str, Any]]:
    """The rows of a `judge` that are of `tasks`."""
    keys = {(task.task, task.groups[0].machine) for task in tasks}
    return [row for row in found["rows"] if (row["id"], row["machine"]) in keys]
