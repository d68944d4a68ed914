"""TenSet's network and TLP's idea, in torch."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pretune.features.schema import ACTION, ACTION_TYPES, ANNOTATION, DECISION
from pretune.hardware.hardware import VECTOR_SIZE
from pretune_export.dataset import Group, TaskData
from pretune_export.encoded import Data, Machine
from pretune_export.evidence.baselines.config import BaselineConfig, quality
from pretune_export.evidence.ranking import Scorer, slowdowns
from pretune_export.evidence.stores import WIDTH, Stores, candidate_keys
from pretune_export.losses import ranking_loss

Inputs = Callable[[Group, np.ndarray], list[np.ndarray]]
"""Rows ``[r, features]`` of each of the chosen candidates (indices) of a group."""


@dataclass(frozen=True)
class _Batch:
    """Candidates of several tasks: rows padded to ``[n, r, features]``, and what `ranking_loss` needs."""

    rows: Tensor
    mask: Tensor
    hardware: Tensor
    target: Tensor
    owner: Tensor


def _batch(
    tasks: Sequence[TaskData],
    machines: dict[str, Machine],
    inputs: Inputs,
    per_task: int,
    rng: np.random.Generator,
) -> _Batch:
    """Up to `per_task` candidates of each task, the best among them, in the order of the groups."""
    rows: list[np.ndarray] = []
    hardware, target, owner = [], [], []
    for t, task in enumerate(tasks):
        goal = -np.log(slowdowns(task))
        chosen = np.union1d(rng.permutation(len(goal))[:per_task], goal.argmax())
        target.append(goal[chosen])
        owner.append(np.full(len(chosen), t))
        offset = 0
        for group in task.groups:
            n = len(group.latency)
            mine = chosen[(chosen >= offset) & (chosen < offset + n)] - offset
            offset += n
            rows += inputs(group, mine)
            hardware.append(np.tile(machines[group.machine].vector, (len(mine), 1)))
    most = max(1, max(len(x) for x in rows))
    padded = np.zeros((len(rows), most, rows[0].shape[1]), np.float32)
    mask = np.zeros((len(rows), most), bool)
    for i, x in enumerate(rows):
        padded[i, : len(x)], mask[i, : len(x)] = x, True
    return _Batch(
        torch.from_numpy(padded),
        torch.from_numpy(mask),
        torch.from_numpy(np.concatenate(hardware).astype(np.float32)),
        torch.from_numpy(np.concatenate(target).astype(np.float32)),
        torch.from_numpy(np.concatenate(owner)),
    )


class TensetMLP(nn.Module):
    """Sum over store statements, then residual layers.

    Parameters
    ----------
    mean, std : Tensor
        Of the features of a store statement, ``[WIDTH]``.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: BaselineConfig, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        h = config.mlp_hidden
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.store = nn.Sequential(nn.Linear(WIDTH, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.join = nn.Sequential(nn.Linear(h + VECTOR_SIZE, h), nn.ReLU())
        self.first = nn.Sequential(nn.Linear(h, h), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(h, h), nn.ReLU())
        self.out = nn.Linear(h, 1)

    def forward(self, rows: Tensor, mask: Tensor, hardware: Tensor) -> Tensor:
        """``rows [n, r, WIDTH]``, ``mask [n, r]``, ``hardware [n, 16]`` -> scores ``[n]``."""
        x = (self.store((rows - self.mean) / self.std) * mask[..., None]).sum(1)
        x = self.join(torch.cat([x, hardware], -1))
        x = self.first(x) + x
        x = self.second(x) + x
        return self.out(x).squeeze(-1)


PRIMITIVE = tuple(
    ACTION.index(name) for name in ("extent", "from_outer", "from_inner", *DECISION, *ANNOTATION)
)
"""What of an action its primitive says: which loop of what extent, the decision, the annotation."""


class TLP(nn.Module):
    """Attention over primitives, a score for each, their sum.

    Parameters
    ----------
    mean, std : Tensor
        Of the numbers that come with a primitive, ``[len(PRIMITIVE)]``.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, config: BaselineConfig, mean: Tensor, std: Tensor) -> None:
        super().__init__()
        h = config.tlp_hidden
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.kind = nn.Embedding(len(ACTION_TYPES), h)
        self.primitive = nn.Sequential(nn.Linear(len(PRIMITIVE) + VECTOR_SIZE, h), nn.ReLU(), nn.Linear(h, h))
        self.place = nn.Embedding(256, h)
        self.attention = nn.TransformerEncoderLayer(
            h, config.tlp_heads, 2 * h, dropout=0.0, batch_first=True, norm_first=True
        )
        self.out = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))

    def forward(self, rows: Tensor, mask: Tensor, hardware: Tensor) -> Tensor:
        """``rows [n, r, 1 + len(PRIMITIVE)]``, the kind first; otherwise as `TensetMLP`."""
        r = rows.shape[1]
        place = torch.arange(r).clamp_max(self.place.num_embeddings - 1)
        numbers = (rows[..., 1:] - self.mean) / self.std
        given = torch.cat([numbers, hardware[:, None].expand(-1, r, -1)], -1)
        x = self.primitive(given) + self.kind(rows[..., 0].long()) + self.place(place)
        x = self.attention(x, src_key_padding_mask=~mask)
        return (self.out(x).squeeze(-1) * mask).sum(1)


def _store_inputs(stores: Stores) -> Inputs:
    def inputs(group: Group, chosen: np.ndarray) -> list[np.ndarray]:
        keys = candidate_keys(group)
        return [stores[keys[i]] for i in chosen]

    return inputs


def primitive_inputs(group: Group, chosen: np.ndarray) -> list[np.ndarray]:
    out = np.zeros((len(chosen), len(group.types), 1 + len(PRIMITIVE)), np.float32)
    out[..., 0] = group.types
    for t, action in enumerate(group.actions):
        out[:, t, 1:] = (action if len(action) == 1 else action[chosen])[:, PRIMITIVE]
    return list(out)


def _train(
    net: nn.Module, inputs: Inputs, data: Data, config: BaselineConfig
) -> tuple[Scorer, dict[str, Any]]:
    """Train `net` with the world model's ranking loss; the epoch with the best `quality` is kept."""
    torch.set_num_threads(config.threads)
    optimizer = torch.optim.AdamW(net.parameters(), config.learning_rate, weight_decay=config.weight_decay)
    size = config.tasks_per_batch
    per_epoch = -(-len(data.train) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.epochs * per_epoch + 1, pct_start=0.1
    )
    slower = [slowdowns(task) for task in data.validation]

    @torch.no_grad()
    def score(task: TaskData) -> np.ndarray:
        batch = _batch([task], data.machines, inputs, 10**9, np.random.default_rng(0))
        return net(batch.rows, batch.mask, batch.hardware).numpy()

    best: tuple[float, int, dict[str, Tensor]] = (-np.inf, 0, {})
    for epoch in range(config.epochs):
        rng = np.random.default_rng([config.seed, epoch])
        order = rng.permutation(len(data.train))
        net.train()
        for start in range(0, len(order), size):
            tasks = [data.train[i] for i in order[start : start + size]]
            batch = _batch(tasks, data.machines, inputs, config.candidates_per_task, rng)
            scores = net(batch.rows, batch.mask, batch.hardware)
            loss = ranking_loss(scores, batch.target, batch.owner, config.regression)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        net.eval()
        value = quality([score(task) for task in data.validation], slower)
        print(f"epoch {epoch + 1}: {value:.3f}", file=sys.stderr, flush=True)
        if value > best[0]:
            best = (value, epoch + 1, copy.deepcopy(net.state_dict()))
    net.load_state_dict(best[2])
    return score, {"epoch": best[1]}


def train_tenset(data: Data, stores: Stores, config: BaselineConfig) -> tuple[Scorer, dict[str, Any]]:
    inputs = _store_inputs(stores)
    return _train(TensetMLP(config, *_scale(data, inputs)), inputs, data, config)


def train_tlp(data: Data, _stores: Stores, config: BaselineConfig) -> tuple[Scorer, dict[str, Any]]:
    mean, std = _scale(data, primitive_inputs)
    return _train(TLP(config, mean[1:], std[1:]), primitive_inputs, data, config)


def _scale(data: Data, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each feature over the rows of the training tasks."""
    groups = (group for task in data.train for group in task.groups)
    rows = np.concatenate([row for group in groups for row in inputs(group, np.arange(len(group.latency)))])
    std = rows.std(0)
    return torch.from_numpy(rows.mean(0)), torch.from_numpy(np.where(std > 1e-6, std, 1).astype(np.float32))
