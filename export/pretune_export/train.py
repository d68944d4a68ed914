"""Train the world model: multi-step rollouts against the encoder's own states, ranking per task."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from pretune.errors import OptionError
from pretune.model.weights import ISA_LEVELS
from pretune_export.batches import make_batch
from pretune_export.config import TrainConfig
from pretune_export.dataset import Dataset
from pretune_export.distributed import any_of, average_gradients, first_alone, rank, wait_for_all, world_size
from pretune_export.encoded import Data, data_key, load_data
from pretune_export.losses import Decoder, losses
from pretune_export.nets import Sizes, WorldModelNet, load_net
from pretune_export.pretrain import load_pretrained
from pretune_export.quality import merit, validate

RECIPE = 3
"""Raised whenever the same configuration comes to train other weights, if only since a default is another."""

NO_MATTER = ("threads", "datasets", "test_datasets")
"""What of a configuration the weights do not depend on: only the contents of the datasets count."""


def run_key(config: TrainConfig) -> str:
    """Hash of all that the weights of a training run depend on: its data and the other settings."""
    settings = {name: v for name, v in msgspec.to_builtins(config).items() if name not in NO_MATTER}
    if config.pretrained:
        settings["pretrained"] = hashlib.sha256(Path(config.pretrained).read_bytes()).hexdigest()
    if settings.pop("base", ""):
        networks = Path(config.base) / "model.safetensors"
        settings["base"] = hashlib.sha256(networks.read_bytes()).hexdigest()
    text = json.dumps([RECIPE, data_key(config, config.datasets), settings], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def fit_inputs(net: WorldModelNet, data: Data) -> None:
    """Standardise the networks' inputs by the training tasks: actions, initial and real states, summaries."""
    groups = [g for task in data.train for g in task.groups]
    states = [g.initial for g in groups] + [s for g in groups for s in g.states.values()]
    loops = np.concatenate([s.loops.reshape(-1, s.loops.shape[2]) for s in states])
    arrays = (
        np.concatenate([a[:2] for g in groups for a in g.actions]),
        np.concatenate([s.blocks for s in states]),
        loops[(loops != 0).any(1)],
        np.concatenate([g.summary for g in groups]),
    )
    net.fit_inputs(*(torch.from_numpy(a) for a in arrays))


def _say(line: dict[str, Any]) -> None:
    print(line, flush=True)


def train(
    config: TrainConfig,
    out: Path,
    *,
    cache: Path | None = None,
    deadline: float = float("inf"),
    on_epoch: Callable[[dict[str, Any]], None] = _say,
) -> dict[str, Any]:
    """Train and write ``best.pt`` and ``log.jsonl`` to `out`.

    Continues from ``last.pt`` if that is of the same configuration and data; else `out` starts anew.
    `on_epoch` is called with each line of the log.

    Where torch has a default process group (`distributed`), its processes train together; all must see `out`,
    which the first of them writes to, and which alone calls `on_epoch`.
    """
    lead = rank() == 0
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    with first_alone():
        data = load_data(config, cache)
    if config.base:
        net = load_net(Path(config.base)).train()
    else:
        net = WorldModelNet(Sizes(**config.sizes))
        fit_inputs(net, data)
        if config.pretrained:
            load_pretrained(Path(config.pretrained), net)
    base = load_net(Path(config.base)) if config.base_share else None
    sizes = net.sizes
    decoder = Decoder(sizes)
    parameters = [*net.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    per_epoch = max(1, len(data.train) // config.tasks_per_batch)
    epochs = max(config.epochs, math.ceil(config.least_steps / per_epoch))
    every = config.validate_every * epochs // config.epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=epochs * per_epoch + 1, pct_start=0.1
    )
    average = torch.optim.swa_utils.AveragedModel(net, avg_fn=_moving_average(config.average))
    start, best = 0, {"value": -1.0}
    last, key = out / "last.pt", run_key(config)
    saved = torch.load(last, weights_only=True) if last.exists() else None
    if saved is not None and saved.get("key") != key:
        if lead:
            print(
                f"{out} is of another configuration or other data: training anew; what it held ends in .old",
                file=sys.stderr,
            )
        saved = None
    wait_for_all()  # Nobody removes or writes what another has yet to look at.
    if saved is None and lead:
        for stale in (last, out / "best.pt", out / "log.jsonl"):
            if stale.exists():
                stale.replace(stale.with_name(f"{stale.name}.old"))
    if saved is not None:
        net.load_state_dict(saved["net"])
        average.load_state_dict(saved["average"])
        decoder.load_state_dict(saved["decoder"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        start, best = saved["epoch"], saved["best"]
    count = sum(len(g.latency) for t in data.train for g in t.groups)
    if lead:
        print(
            f"{len(data.train)} training tasks with {count} schedules, {len(data.validation)} validation "
            f"tasks; processes: {world_size()}",
            flush=True,
        )
    for epoch in range(start, epochs):
        rng = np.random.default_rng([config.seed, epoch])
        order = rng.permutation(len(data.train))
        sums: dict[str, float] = defaultdict(float)
        began = time.time()
        for b in range(per_epoch):
            tasks = [
                data.train[i] for i in order[b * config.tasks_per_batch : (b + 1) * config.tasks_per_batch]
            ]
            batch = make_batch(tasks, data.machines, config.candidates_per_task, rng)
            terms = losses(net, decoder, batch, config)
            loss = torch.stack([getattr(config, name, 1.0) * term for name, term in terms.items()]).sum()
            optimizer.zero_grad()
            loss.backward()
            average_gradients(parameters)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            average.update_parameters(net)
            for name, term in terms.items():
                sums[name] += float(term.detach()) / per_epoch
        line: dict[str, Any] = {
            "epoch": epoch + 1,
            "epochs": epochs,
            "seconds": round(time.time() - began, 1),
            **{k: round(v, 4) for k, v in sums.items()},
        }
        done = epoch + 1 == epochs or any_of(time.time() > deadline)
        if (epoch + 1) % every == 0 or done:
            kept = _between(cast(WorldModelNet, average.module), base, config.base_share)
            quality = validate(kept, data.validation, data.machines, config.without)
            line |= {f"validation_{k}": round(v, 4) for k, v in quality.items()}
            value = merit(quality)
            if value > best["value"]:
                best = {"value": value, "epoch": epoch + 1, **quality}
                _save(out / "best.pt", net=kept.state_dict(), sizes=sizes.to_dict(), best=best, key=key)
        if lead:
            with (out / "log.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            on_epoch(line)
        _save(
            last, net=net.state_dict(), average=average.state_dict(), decoder=decoder.state_dict(),
            optimizer=optimizer.state_dict(), schedule=schedule.state_dict(), epoch=epoch + 1, best=best,
            key=key,
        )  # fmt: skip
        if done:
            break
    wait_for_all()  # Whoever returns finds the files.
    return best


def _moving_average(decay: float) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    """Of weights, as `torch.optim.swa_utils.AveragedModel` takes it.

    The decay grows over the first steps: or short runs would keep much of what they started from.
    """

    def update(averaged: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
        warm = (1 + int(count)) / (10 + int(count))
        return averaged.lerp(new, 1 - min(decay, warm))

    return update


@torch.no_grad()
def _between(net: WorldModelNet, base: WorldModelNet | None, share: float) -> WorldModelNet:
    """`net`, moved so much of the way to `base`."""
    if base is None:
        return net
    net = copy.deepcopy(net)
    for weight, start in zip(net.parameters(), base.parameters(), strict=True):
        weight.lerp_(start, share)
    return net


def _save(path: Path, **content: Any) -> None:
    """Write a checkpoint in one step, from the first process."""
    if rank() == 0:
        partial = path.with_name(path.name + ".partial")
        torch.save(content, partial)
        partial.replace(path)


def load_best(run: Path, config: TrainConfig) -> WorldModelNet:
    """The networks of the best epoch of a training run.

    Raises
    ------
    OptionError
        If the run has no such epoch yet, or is of another configuration or other data.
    """
    path = run / "best.pt"
    if not path.is_file():
        raise OptionError(f"{path}: no weights; run: pretune-export train")
    saved = torch.load(path, weights_only=True)
    if saved.get("key") != run_key(config):
        raise OptionError(f"{path} is of another configuration or other data; run: pretune-export train")
    net = WorldModelNet(Sizes(**saved["sizes"]))
    net.load_state_dict(saved["net"])
    return net.eval()


@dataclass
class DataDescription:
    """What the datasets hold.

    Attributes
    ----------
    measured_on : list of dict
        One `pretune.model.weights.MeasuredOn` per machine.
    covers : dict
        `pretune.model.weights.Covers`: the lowest instruction set level among the machines.
    provenance : dict
        Counts for the manifest.
    """

    measured_on: list[dict[str, Any]]
    covers: dict[str, str]
    provenance: dict[str, Any]


def describe_data(config: TrainConfig) -> DataDescription:
    """Describe what a configuration trains on.

    Raises
    ------
    OptionError
        If machines of different kinds or architectures measured it.
    """
    from pretune_export.networks import NETWORKS

    measured_on, named = [], set()
    kinds, levels = set(), set()
    for folder in config.datasets:
        data = Dataset(Path(folder))
        named |= {n for t in data.tasks.values() if t["split"] == "train" for n in t["networks"]}
        for name, machine in data.machines.items():
            schedules, tasks, days = 0, set(), set()
            for row in data.rows(name):
                schedules += 1
                tasks.add(row["task"])
                days.add(row["time"][:10])
            kinds.add((machine["kind"], machine["arch"]))
            levels.add(machine["isa_level"])
            measured_on.append(
                {
                    "cpu": machine["cpu"],
                    "microarch": machine["microarch"],
                    "isa_level": machine["isa_level"],
                    "cores": int(machine["cores"]),
                    "schedules": schedules,
                    "tasks": len(tasks),
                    "days": sorted(days),
                }
            )
    if len(kinds) != 1:
        raise OptionError(
            f"datasets of one weights folder are of one kind of machine, not of {sorted(kinds)}; "
            "give each its own configuration"
        )
    ((kind, arch),) = kinds
    known = ("", *ISA_LEVELS.get(arch, ()))
    level = config.isa_level or min(levels, key=lambda one: known.index(one) if one in known else 0)
    return DataDescription(
        measured_on,
        {"kind": kind, "arch": arch, "isa_level": level},
        {
            # The same network with another batch size or dtype is not another one.
            "train_networks": len({re.split("[@:]", n)[0] for n in named & NETWORKS.keys()}),
            "train_layer_kinds": len(named - NETWORKS.keys()),
            "datasets": config.datasets,
            "test_datasets": config.test_datasets,
        },
    )
