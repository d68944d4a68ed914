"""Load the trajectories, train, keep the weights."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pretune.errors import InputError, OptionError
from pretune.features.schema import SCHEMA_VERSION
from pretune_export.nets import Sizes, WorldModelNet
from pretune_export.processes import map_in_processes
from pretune_export.trajectories import Group, load_groups, make_batch

from .config import PretrainConfig
from .figures import evaluate
from .model import build, losses


def load_shards(folder: Path, processes: int = 2) -> list[Group]:
    """All groups of a folder of trajectories, in the order of its files.

    Raises
    ------
    InputError
        If there are none.
    """
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise InputError(f"{folder}: no trajectories (*.parquet); run: pretune-export trajectories")
    groups: list[Group] = []
    for n, found in enumerate(map_in_processes(load_groups, files, processes), 1):
        groups += found
        if n % 500 == 0:
            print(f"loaded {n}/{len(files)} files", file=sys.stderr, flush=True)
    return groups


def plan(groups: list[Group], config: PretrainConfig, epoch: int) -> list[np.ndarray]:
    """Batches of an epoch, as places in `groups`: those of a batch have about as many steps."""
    rng = np.random.default_rng([config.seed, epoch])
    length = np.array([len(g.types) for g in groups]) + rng.normal(0, 4, len(groups))
    order = np.argsort(length)
    batches = [order[i : i + config.groups_per_batch] for i in range(0, len(order), config.groups_per_batch)]
    return [batches[i] for i in rng.permutation(len(batches))]


def run_key(config: PretrainConfig, folder: Path) -> str:
    """Hash of all that the weights depend on."""
    settings = {k: v for k, v in msgspec.to_builtins(config).items() if k not in ("threads", "save_every")}
    files = [[file.name, file.stat().st_size] for file in sorted(folder.glob("*.parquet"))]
    return hashlib.sha256(json.dumps([settings, SCHEMA_VERSION, files]).encode()).hexdigest()


def pretrain(
    config: PretrainConfig, folder: Path, out: Path, *, processes: int = 2, deadline: float = float("inf")
) -> dict[str, Any]:
    """Train and write ``pretrained.pt``, ``pretrain.json`` (figures) and ``pretrain.jsonl`` (log) to `out`.

    Continues from ``pretrain-last.pt`` if that is of the same configuration and trajectories.

    Parameters
    ----------
    config : PretrainConfig
    folder : pathlib.Path
        From `trajectories.generate`.
    out : pathlib.Path
    processes : int
        For loading.
    deadline : float
        `time.time` after which training stops with a checkpoint; running again continues.

    Returns
    -------
    dict
        `evaluate` on the validation tasks.
    """
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    groups = load_shards(folder, processes)
    train = [g for g in groups if g.split == "train"]
    held_out = [g for g in groups if g.split == "validation"]
    if not train or not held_out:
        raise OptionError(f"{folder}: trajectories of training and of validation tasks are needed")
    sizes = Sizes(**config.sizes)
    model = build(WorldModelNet(sizes), train, np.random.default_rng(config.seed))
    optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    per_epoch = len(plan(train, config, 0))
    total = config.epochs * per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=total + 1, pct_start=0.1
    )
    last, log, key, start = out / "pretrain-last.pt", out / "pretrain.jsonl", run_key(config, folder), 0
    saved = torch.load(last, weights_only=True) if last.exists() else None
    if saved is not None and saved["key"] == key:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        start = saved["step"]
    elif saved is not None:
        print(f"{out} is of another configuration or other data: training anew", file=sys.stderr, flush=True)
        log.unlink(missing_ok=True)
    print(
        f"{len({g.task for g in train})} training tasks with {sum(map(len, train))} trajectories, "
        f"{len({g.task for g in held_out})} validation tasks; {total} batches",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    sums: dict[str, list[float]] = defaultdict(list)
    batches: list[np.ndarray] = []
    step = start - 1
    began = time.time()
    for step in range(start, total):
        epoch, place = divmod(step, per_epoch)
        if place == 0 or not batches:
            batches = plan(train, config, epoch)
        rng = np.random.default_rng([config.seed, epoch, place])
        batch = make_batch([train[i] for i in batches[place]], config.per_group, rng)
        terms = losses(model, batch, config)
        loss = torch.stack([getattr(config, name) * term for name, term in terms.items()]).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        for name, term in terms.items():
            sums[name].append(float(term.detach()))
        stop = time.time() > deadline
        if place + 1 == per_epoch or (step + 1) % config.save_every == 0 or stop:
            line = {"batch": step + 1, "of": total, "seconds": round(time.time() - began, 1)}
            line |= {name: round(float(np.mean(values)), 4) for name, values in sums.items()}
            if place + 1 == per_epoch and step + 1 < total:
                line |= {"validation": evaluate(model, held_out, config, config.validate_tasks)}
            sums.clear()
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, file=sys.stderr, flush=True)
            _save(
                last, key=key, step=step + 1, model=model.state_dict(), optimizer=optimizer.state_dict(),
                schedule=schedule.state_dict(),
            )  # fmt: skip
        if stop:
            break
    report = {"batches": step + 1, "of": total} | evaluate(model, held_out, config)
    _save(
        out / "pretrained.pt", sizes=sizes.to_dict(), key=key, encoder=model.net.encoder.state_dict(),
        action=model.net.action.state_dict(), transition=model.net.transition.state_dict(),
        nest=model.nest.state_dict(), stores=model.stores.state_dict(), valid=model.valid.state_dict(),
        report=report,
    )  # fmt: skip
    (out / "pretrain.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def _save(path: Path, **content: Any) -> None:
    partial = path.with_name(path.name + ".partial")
    torch.save(content, partial)
    partial.replace(path)


def load_pretrained(path: Path, net: WorldModelNet) -> None:
    """Put pretrained encoder and transition, with its part for actions, into `net`.

    Raises
    ------
    OptionError
        If they are of other sizes.
    """
    saved = torch.load(path, weights_only=True)
    try:
        net.encoder.load_state_dict(saved["encoder"])
        net.action.load_state_dict(saved["action"])
        net.transition.load_state_dict(saved["transition"])
    except RuntimeError:
        raise OptionError(
            f"{path} is of sizes {saved['sizes']}, not {net.sizes.to_dict()}; run: pretune-export pretrain"
        ) from None
