"""Cost models of the literature, trained on exactly the data and splits of a world model.

``xgboost-metaschedule``
    MetaSchedule's own cost model, trained once for all tasks: trees score every store statement, the sum is
    the candidate's score.
``xgboost-regression``, ``xgboost-ndcg``
    Trees on the features of all store statements together, for squared error and for ``rank:ndcg``.
``tenset-mlp``
    TenSet's network (Zheng et al., 2021): every store statement through one perceptron, the sum through
    another.
``tlp``
    The idea of TLP (Zhai et al., 2023): attention over the schedule's primitives with their parameters; no
    program is looked at.

All get the machine's hardware vector too, and all are stopped where `quality` on the validation tasks was
best, as the world model is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pretune_export.config import TrainConfig
from pretune_export.dataset import read_machines
from pretune_export.encoded import Data, data_key, load_data, machine_key
from pretune_export.evidence.baselines.config import BaselineConfig
from pretune_export.evidence.baselines.networks import train_tenset, train_tlp
from pretune_export.evidence.baselines.trees import grow
from pretune_export.evidence.ranking import Scorer, judge, rankable
from pretune_export.evidence.stores import Stores, load_stores

BASELINES: dict[str, Callable[[Data, Stores, BaselineConfig], tuple[Scorer, dict[str, Any]]]] = {
    "xgboost-metaschedule": functools.partial(grow, "metaschedule"),
    "xgboost-regression": functools.partial(grow, "regression"),
    "xgboost-ndcg": functools.partial(grow, "ndcg"),
    "tenset-mlp": train_tenset,
    "tlp": train_tlp,
}


def fit_baseline(
    name: str, data: Data, stores: Stores, config: BaselineConfig | None = None
) -> tuple[Scorer, dict[str, Any]]:
    """Train one of `BASELINES`.

    Returns
    -------
    score : Scorer
    chosen : dict
        Where the validation tasks stopped it: ``trees`` or ``epoch``.
    """
    config = config or BaselineConfig()
    torch.manual_seed(config.seed)
    return BASELINES[name](data, stores, config)


def compare(
    config: TrainConfig, run: Path, names: Sequence[str] = tuple(BASELINES), processes: int = 2
) -> dict[str, Any]:
    """Train baselines on the data of a configuration, and judge them as `evaluate` judges weights.

    Writes ``baselines.json`` to `run` after each; those in there of the same data and hyper-parameters are
    kept.

    Returns
    -------
    dict
        ``data``, the `data_key` of what they were trained on; ``config``, their hyper-parameters;
        ``baselines``: by name ``chosen``, ``seconds`` of training, and `judge` of each split.
    """
    data = load_data(config, run / "encoded.pickle", processes)
    folders = [*config.datasets, *config.test_datasets]
    targets = {
        machine_key(folder, name): machine["target"]
        for folder in folders
        for name, machine in read_machines(Path(folder)).items()
    }
    splits = {"test": data.test, "validation": data.validation}
    everything = [*data.train, *data.validation, *data.test]
    stores = load_stores(everything, targets, run / "stores", processes)
    path = run / "baselines.json"
    key = {"data": data_key(config, folders), "config": dataclasses.asdict(BaselineConfig())}
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if {name: found.get(name) for name in key} != key:
        found = {**key, "baselines": {}}
    for name in names:
        if name in found["baselines"]:
            continue
        print(name, file=sys.stderr, flush=True)
        began = time.perf_counter()
        score, chosen = fit_baseline(name, data, stores)
        found["baselines"][name] = {
            "chosen": chosen,
            "seconds": round(time.perf_counter() - began, 1),
            **{split: judge(score, tasks) for split, tasks in splits.items() if rankable(tasks)},
        }
        path.write_text(json.dumps(found) + "\n")
    return found
