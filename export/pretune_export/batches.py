"""Measured candidates drawn for a training step, as padded tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pretune.features import State
from pretune_export.dataset import Group, TaskData
from pretune_export.encoded import Machine
from pretune_export.trajectories import FINAL


@dataclass
class Batch:
    """Candidates of several tasks, padded to the longest trajectory."""

    initial: tuple[Tensor, Tensor, Tensor]
    origin: Tensor  # which initial state each candidate has
    task: Tensor  # its ranking group
    types: Tensor
    actions: Tensor
    mask: Tensor
    summary: Tensor
    hardware: Tensor
    target: Tensor  # negative log latency, minus the task's best; failures far below
    states: tuple[Tensor, Tensor, Tensor] | None
    state_at: Tensor  # [s, 2]: candidate, step


def pack_states(states: list[State]) -> tuple[Tensor, Tensor, Tensor]:
    """Pad programs to the same number of blocks: blocks, loops, mask."""
    most = max(len(s.blocks) for s in states)
    blocks = np.zeros((len(states), most, states[0].blocks.shape[1]), np.float32)
    depth = max(int((s.loops != 0).any(-1).any(0).sum()) for s in states) or 1
    loops = np.zeros((len(states), most, depth, states[0].loops.shape[2]), np.float32)
    mask = np.zeros((len(states), most), np.float32)
    for i, s in enumerate(states):
        n = len(s.blocks)
        blocks[i, :n], loops[i, :n], mask[i, :n] = s.blocks, s.loops[:, :depth], 1.0
    return torch.from_numpy(blocks), torch.from_numpy(loops), torch.from_numpy(mask)


FAILED = 6.0
"""A failed candidate is this far (natural log of latency) below the task's best."""


def make_batch(
    tasks: list[TaskData],
    machines: dict[str, Machine],
    per_task: int,
    rng: np.random.Generator,
    states: bool = True,
) -> Batch:
    """Draw up to `per_task` candidates of each task; the best is always among them."""
    parts: list[tuple[int, Group, np.ndarray, float]] = []
    for t, task in enumerate(tasks):
        sizes = [len(g.latency) for g in task.groups]
        latency = np.concatenate([g.latency for g in task.groups])
        best = float(latency.min())
        chosen = rng.permutation(len(latency))[:per_task]
        chosen = np.unique(np.append(chosen, latency.argmin()))
        offset = 0
        for g, size in zip(task.groups, sizes, strict=True):
            mine = chosen[(chosen >= offset) & (chosen < offset + size)] - offset
            offset += size
            if len(mine):
                parts.append((t, g, mine, best))
    n = sum(len(mine) for _t, _g, mine, _b in parts)
    steps = max(len(g.types) for _t, g, _m, _b in parts)
    width = parts[0][1].actions[0].shape[1]
    types = np.zeros((n, steps), np.int64)
    actions = np.zeros((n, steps, width), np.float32)
    mask = np.zeros((n, steps), bool)
    target = np.zeros(n, np.float32)
    owner, origin = np.zeros(n, np.int64), np.zeros(n, np.int64)
    initial: list[State] = []
    numbers: dict[int, int] = {}  # of the states in `initial`, by address: design spaces share them
    hardware = np.zeros((n, 16), np.float32)
    summary = np.concatenate([g.summary[mine] for _t, g, mine, _b in parts])
    found: list[State] = []
    at: list[tuple[int, int]] = []
    row = 0
    for t, g, mine, best in parts:
        end, count = row + len(mine), len(g.types)
        types[row:end, :count], mask[row:end, :count], owner[row:end] = g.types, True, t
        if id(g.initial) not in numbers:
            numbers[id(g.initial)] = len(initial)
            initial.append(g.initial)
        origin[row:end] = numbers[id(g.initial)]
        for s, a in enumerate(g.actions):
            actions[row:end, s] = a if len(a) == 1 else a[mine]
        with np.errstate(divide="ignore"):
            target[row:end] = np.maximum(np.log(best / g.latency[mine]), -FAILED)
        hardware[row:end] = machines[g.machine].vector
        if states and g.states:
            where = {int(i): row + k for k, i in enumerate(mine)}
            for (i, step), state in g.states.items():
                if i in where:
                    found.append(state)
                    at.append((where[i], count - 1 if step == FINAL else step))
        row = end
    return Batch(
        pack_states(initial), torch.from_numpy(origin), torch.from_numpy(owner), torch.from_numpy(types),
        torch.from_numpy(actions), torch.from_numpy(mask), torch.from_numpy(summary),
        torch.from_numpy(hardware), torch.from_numpy(target), pack_states(found) if found else None,
        torch.tensor(at, dtype=torch.int64).reshape(-1, 2),
    )  # fmt: skip
