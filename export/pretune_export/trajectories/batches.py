"""Trajectories as training arrays: a group per design space, batches of several groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tvm
from torch import Tensor

from pretune.features import ActionEncoder
from pretune.features.program import read_program
from pretune.features.state import encode_blocks

from .files import Programs, Trajectories, widths_of
from .replay import FINAL


@dataclass
class Group:
    """Trajectories of one design space of one task for one target: all take the same kinds of steps.

    Attributes
    ----------
    task : str
        Identity of the task.
    target : str
    split : str
        ``"train"`` or ``"validation"``.
    judged : bool
        Whether `valid` tells candidates apart: on a GPU.
    initial : Programs
        The unscheduled program alone.
    types : numpy.ndarray
        int64 ``[T]``: kinds of the actions.
    actions : list of numpy.ndarray
        Per step float16 ``[n, len(ACTION)]``, or ``[1, len(ACTION)]`` for a step without decisions.
    valid : numpy.ndarray
        bool ``[n]``
    states_of : numpy.ndarray
        int64 ``[states]``: trajectory of each state.
    step : numpy.ndarray
        int64 ``[states]``: the action after which it is the program.
    programs : Programs
        The states.
    stores_of : numpy.ndarray
        int64 ``[m]``: trajectories with per-store features.
    stores : numpy.ndarray
        float16 ``[m, .]``
    """

    task: str
    target: str
    split: str
    judged: bool
    initial: Programs
    types: np.ndarray
    actions: list[np.ndarray]
    valid: np.ndarray
    states_of: np.ndarray
    step: np.ndarray
    programs: Programs
    stores_of: np.ndarray
    stores: np.ndarray

    def __len__(self) -> int:
        return len(self.valid)


def load_groups(path: Path) -> list[Group]:
    """The groups of one file; the features of its actions are computed from the decisions."""
    found = Trajectories.read(path)
    mod: Any = tvm.ir.load_json(found.task["mod"])
    blocks = read_program(mod["main"])
    initial = Programs.of([encode_blocks(blocks, cores=found.cores)])
    out = []
    for k, insts in enumerate(found.spaces):
        mine = np.flatnonzero(found.space == k)
        if not len(mine):
            continue
        encoder = ActionEncoder(blocks, insts, found.cores)
        decisions = np.stack([found.decisions[i] for i in mine])
        actions, _summary = encoder.encode(np.split(decisions, np.cumsum(widths_of(insts))[:-1], axis=1))
        place = np.full(len(found), -1)
        place[mine] = np.arange(len(mine))
        states, stores = (np.flatnonzero(place[of] >= 0) for of in (found.states_of, found.stores_of))
        step = found.step[states].astype(np.int64)
        step[step == FINAL] = len(actions) - 1
        out.append(
            Group(
                found.task["id"], found.target, found.task["split"], found.kind == "cuda", initial,
                np.array([s.type_id for s in encoder.steps], np.int64),
                [a.astype(np.float16) for a in actions], found.valid[mine],
                place[found.states_of[states]], step, found.programs.take(states),
                place[found.stores_of[stores]], found.stores[stores],
            )
        )  # fmt: skip
    return out


@dataclass
class Batch:
    """Trajectories of several groups, padded to the longest.

    Attributes
    ----------
    initial : Programs
        One per group.
    group : Tensor
        int64 ``[n]``
    types, actions, mask : Tensor
        int64 ``[n, T]``, float32 ``[n, T, len(ACTION)]``, bool ``[n, T]``
    states : Programs
    state_at : Tensor
        int64 ``[states, 2]``: trajectory and step of each.
    final : Tensor
        bool ``[states]``: whether it is the trajectory's last.
    stores, stores_at : Tensor
        float32 ``[m, .]``, and int64 ``[m]``: their trajectories.
    valid, judged : Tensor
        bool ``[n]``
    """

    initial: Programs
    group: Tensor
    types: Tensor
    actions: Tensor
    mask: Tensor
    states: Programs
    state_at: Tensor
    final: Tensor
    stores: Tensor
    stores_at: Tensor
    valid: Tensor
    judged: Tensor


def make_batch(groups: Sequence[Group], per_group: int, rng: np.random.Generator) -> Batch:
    """Draw up to `per_group` trajectories of each group."""
    picks = [np.sort(rng.permutation(len(g))[:per_group]) for g in groups]
    n, steps = sum(map(len, picks)), max(len(g.types) for g in groups)
    types = np.zeros((n, steps), np.int64)
    actions = np.zeros((n, steps, groups[0].actions[0].shape[1]), np.float32)
    mask = np.zeros((n, steps), bool)
    programs, at, final, stores, stores_at = [], [], [], [], []
    row = 0
    for g, pick in zip(groups, picks, strict=True):
        end, count = row + len(pick), len(g.types)
        types[row:end, :count], mask[row:end, :count] = g.types, True
        for s, a in enumerate(g.actions):
            actions[row:end, s] = a if len(a) == 1 else a[pick]
        place = np.full(len(g), -1)
        place[pick] = np.arange(row, end)
        chosen = np.flatnonzero(place[g.states_of] >= 0)
        programs.append(g.programs.take(chosen))
        at.append(np.stack([place[g.states_of[chosen]], g.step[chosen]], axis=1))
        final.append(g.step[chosen] == count - 1)
        chosen = np.flatnonzero(place[g.stores_of] >= 0)
        stores.append(g.stores[chosen])
        stores_at.append(place[g.stores_of[chosen]])
        row = end
    sizes = [len(pick) for pick in picks]
    arrays = (
        np.repeat(np.arange(len(groups)), sizes), types, actions, mask, np.concatenate(at),
        np.concatenate(final), np.concatenate(stores).astype(np.float32), np.concatenate(stores_at),
        np.concatenate([g.valid[pick] for g, pick in zip(groups, picks, strict=True)]),
        np.repeat([g.judged for g in groups], sizes),
    )  # fmt: skip
    owner, kinds, features, real, where, last, rows, rows_at, valid, judged = map(torch.from_numpy, arrays)
    return Batch(
        Programs.join([g.initial for g in groups]), owner, kinds, features, real, Programs.join(programs),
        where, last, rows, rows_at, valid, judged,
    )  # fmt: skip


def pad(programs: Programs) -> tuple[Tensor, Tensor, Tensor]:
    """What the encoder takes: blocks ``[n, B, .]``, loops ``[n, B, L, .]``, mask ``[n, B]``."""
    most, depth = int(programs.block_count.max()), int(programs.loop_count.max(initial=1))
    real = np.arange(most) < programs.block_count[:, None]
    blocks = np.zeros((*real.shape, programs.blocks.shape[1]), np.float32)
    blocks[real] = programs.blocks
    count = np.zeros(real.shape, np.int64)
    count[real] = programs.loop_count
    loops = np.zeros((*real.shape, depth, programs.loops.shape[1]), np.float32)
    loops[np.arange(depth) < count[..., None]] = programs.loops
    return torch.from_numpy(blocks), torch.from_numpy(loops), torch.from_numpy(real.astype(np.float32))
