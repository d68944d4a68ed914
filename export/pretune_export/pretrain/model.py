"""What is pretrained, on which losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretune.features.schema import STATE_BLOCK
from pretune_export.nets import WorldModelNet
from pretune_export.trajectories import Batch, Group, Programs, make_batch, pad

from .config import PretrainConfig

PIECES = 6
"""Pieces in which the programs of a batch are encoded."""

SAME = 0.01
"""Root mean square difference below which two latents are of the same program."""


def nest_targets(programs: Programs) -> np.ndarray:
    """The loop nest of each program: its costliest block, and the maximum over its blocks.

    Returns
    -------
    numpy.ndarray
        float32 ``[programs, 2 * len(STATE_BLOCK)]``
    """
    start = np.cumsum(programs.block_count, dtype=np.int64) - programs.block_count
    blocks = programs.blocks.astype(np.float32)
    program = np.repeat(np.arange(len(start)), programs.block_count)
    order = np.lexsort((-blocks[:, STATE_BLOCK.index("work_share")], program))
    return np.concatenate([blocks[order[start]], np.maximum.reduceat(blocks, start)], axis=1)


class Decoder(nn.Module):
    """Training only: reads what a program is like back from its latent, in units of standard deviations."""

    mean: Tensor
    scale: Tensor

    def __init__(self, latent: int, mean: np.ndarray, std: np.ndarray) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(latent, 256), nn.ReLU(), nn.Linear(256, len(mean)))
        self.register_buffer("mean", torch.from_numpy(mean))
        # What never varies is not amplified.
        self.register_buffer("scale", torch.from_numpy(np.where(std > 1e-3, std, np.inf).astype(np.float32)))

    def forward(self, z: Tensor) -> Tensor:
        return self.net(z)

    def goal(self, raw: Tensor) -> Tensor:
        """Features in the units of `forward`."""
        return (raw - self.mean) / self.scale


class Pretrainer(nn.Module):
    """Encoder and transition of `net` (its ranker lies idle), and the decoders."""

    def __init__(self, net: WorldModelNet, nest: Decoder, stores: Decoder, valid: nn.Linear) -> None:
        super().__init__()
        self.net, self.nest, self.stores, self.valid = net, nest, stores, valid

    def encode(self, programs: Programs) -> Tensor:
        """Latents of programs, in pieces of programs of like size so that little is padded."""
        order = np.argsort(programs.block_count, kind="stable")
        pieces = [p for p in np.array_split(order, PIECES) if len(p)]
        z = torch.cat([self.net.encoder(*pad(programs.take(piece))) for piece in pieces])
        return z[torch.from_numpy(np.argsort(order))]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Predicted and real latents of the batch's states: each ``[states, latent]``."""
        z0 = self.encode(batch.initial)[batch.group]
        zs = torch.stack(self.net.rollout(z0, batch.types, batch.actions, batch.mask), dim=1)
        predicted = zs[batch.state_at[:, 0], batch.state_at[:, 1]]
        return predicted.flatten(1), self.encode(batch.states).flatten(1)


def build(net: WorldModelNet, groups: list[Group], rng: np.random.Generator) -> Pretrainer:
    """A pretrainer for `net`; its inputs and what its decoders decode are standardised by some `groups`."""
    some = [groups[i] for i in rng.permutation(len(groups))[:400]]
    nest = np.concatenate([nest_targets(g.programs) for g in some])
    stores = np.concatenate([g.stores for g in some]).astype(np.float32)
    batch = make_batch(some, 2, rng)
    net.fit_inputs(
        batch.actions[batch.mask],
        *(
            torch.from_numpy(np.concatenate([getattr(g.programs, rows) for g in some]).astype(np.float32))
            for rows in ("blocks", "loops")
        ),
    )
    with torch.no_grad():
        width = net.encoder(*pad(some[0].initial)).flatten(1).shape[1]
    read_nest, read_stores = (Decoder(width, raw.mean(0), raw.std(0)) for raw in (nest, stores))
    return Pretrainer(net, read_nest, read_stores, nn.Linear(width, 1))


def losses(model: Pretrainer, batch: Batch, config: PretrainConfig) -> dict[str, Tensor]:
    """All loss terms of a batch, unweighted.

    ``align`` and ``contrast`` are the paper's transition loss: the distance to the real latent, and a hinge
    against the nearest latent of another program, whether of the same task or not. ``nest``, ``stores`` and
    ``valid`` decode what is known of the real program.
    """
    predicted, true = model(batch)
    # Both move: the prediction to the real latent, and, more slowly, that to what can be predicted.
    out = {"align": F.mse_loss(predicted, true.detach()) + 0.1 * F.mse_loss(predicted.detach(), true)}
    distance = torch.cdist(predicted, true) / true.shape[1] ** 0.5
    with torch.no_grad():  # Before the first open decision all trajectories of a group are the same program.
        same = torch.cdist(true, true) / true.shape[1] ** 0.5 < SAME
    nearest = distance.masked_fill(same | torch.eye(len(same), dtype=torch.bool), torch.inf).amin(1)
    out["contrast"] = F.relu(distance.diagonal() - nearest + config.margin).mean()
    goal = model.nest.goal(torch.from_numpy(nest_targets(batch.states)))
    out["nest"] = _decoding(model.nest, goal, (predicted, true))
    last = torch.full((len(batch.mask),), -1).index_copy_(
        0, batch.state_at[batch.final, 0], torch.nonzero(batch.final).squeeze(1)
    )
    if len(batch.stores):
        ends = last[batch.stores_at]
        goal = model.stores.goal(batch.stores)
        out["stores"] = _decoding(model.stores, goal, (predicted[ends], true[ends]))
    if batch.judged.any():
        ends = last[batch.judged]
        goal = batch.valid[batch.judged, None].float()
        verdict = F.binary_cross_entropy_with_logits
        out["valid"] = _decoding(model.valid, goal, (predicted[ends], true[ends]), verdict)
    return out


def _decoding(
    decoder: nn.Module, goal: Tensor, latents: Sequence[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor] = F.smooth_l1_loss,
) -> Tensor:  # fmt: skip
    """Losses of decoding predicted and real latents, together."""
    return torch.stack([loss(decoder(z), goal) for z in latents]).sum()
