"""What training minimises: ranking per task, and rollouts against the encoder's own states."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from pretune.features.schema import STATE_BLOCK
from pretune_export.batches import Batch
from pretune_export.config import TrainConfig
from pretune_export.distributed import shared
from pretune_export.nets import Sizes, WorldModelNet

TEMPERATURE = 0.2
"""Of the softmax in `choice_loss`, in natural log of latency."""


def choice_loss(score: Tensor, target: Tensor, task: Tensor) -> Tensor:
    """What the first choice of each task is expected to lose: 1 - ``best / latency``, mean over tasks.

    The choice is drawn with the softmax of the scores: the top-1 probabilities of ListNet (Cao et al.,
    "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007).
    """
    groups = int(task.max()) + 1
    peak = torch.full((groups,), -math.inf).scatter_reduce(0, task, score.detach(), "amax")
    weight = ((score - peak[task]) / TEMPERATURE).exp()
    total = torch.zeros(groups).index_add_(0, task, weight)
    gain = torch.zeros(groups).index_add_(0, task, weight * target.exp())
    there = total > 0
    return (1.0 - gain[there] / total[there]).mean()


def ranking_loss(score: Tensor, target: Tensor, task: Tensor, regression: float) -> Tensor:
    """Pairwise logistic loss within each task, a pair weighted by what choosing wrong costs at the good end.

    The weight of a pair is the difference of ``best / latency``, as the gain differences of LambdaRank
    (Burges, "From RankNet to LambdaRank to LambdaMART", 2010). `regression` adds a Huber loss on centred log
    latencies, so that scores keep the scale of log latency, which the search's posterior relies on; infinite,
    it is the whole loss.
    """
    same = task[:, None] == task[None]
    gain = target.exp()
    delta = gain[:, None] - gain[None]
    weight = torch.where(same & (delta > 0), delta, torch.zeros_like(delta)) + 0.05 * (
        same & (target[:, None] > target[None])
    )
    pair = F.softplus(-(score[:, None] - score[None]) * 2.0)
    loss = (weight * pair).sum() / weight.sum().clamp_min(1e-6)
    if regression > 0:
        groups = int(task.max()) + 1
        ones = torch.ones_like(score)
        count = torch.zeros(groups).index_add_(0, task, ones)
        capped = target.clamp_min(-3.0)
        centre_s = torch.zeros(groups).index_add_(0, task, score) / count
        centre_t = torch.zeros(groups).index_add_(0, task, capped) / count
        scale = F.smooth_l1_loss(score - centre_s[task], capped - centre_t[task], beta=0.3)
        loss = scale if math.isinf(regression) else loss + regression * scale
    return loss


class Decoder(torch.nn.Module):
    """Training only: reads the summary of the program's costliest block back from a latent."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(sizes.latent, 128), torch.nn.ReLU(), torch.nn.Linear(128, len(STATE_BLOCK))
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.net(z)


def predict(net: WorldModelNet, batch: Batch, without: str = "") -> tuple[Tensor, Tensor]:
    """Scores ``[n]`` of a batch, and the latents after each step, ``[n, T, latent]``."""

    def rollout(z0: Tensor, types: Tensor, actions: Tensor, mask: Tensor) -> Tensor:
        return torch.stack(net.rollout(z0, types, actions, mask, truncate=without == "rollouts"), dim=1)

    z0 = net.encoder(*batch.initial)[batch.origin]
    zs = shared(rollout, z0, batch.types, batch.actions, batch.mask)
    final = z0 if without == "transition" else zs[:, -1]
    if without == "rollouts":  # The ranking must not teach the transition through many steps either.
        final = final.detach()
    return rank(net, final, batch, without=without), zs


def rank(
    net: WorldModelNet, z: Tensor, batch: Batch, rows: Tensor | slice = slice(None), without: str = ""
) -> Tensor:
    """Scores of final latents; `rows` says which candidates of the batch they are of."""
    summary, hardware = batch.summary[rows], batch.hardware[rows]
    score, _ = net.ranker(
        torch.zeros_like(z) if without == "state" else z,
        torch.zeros_like(summary) if without == "actions" else summary,
        torch.zeros_like(hardware) if without == "hardware" else hardware,
    )
    return score


def losses(net: WorldModelNet, decoder: Decoder, batch: Batch, config: TrainConfig) -> dict[str, Tensor]:
    """All loss terms of a batch, unweighted."""
    regression = math.inf if config.without == "ranking" else config.regression
    score, zs = predict(net, batch, config.without)
    out = {"rank": ranking_loss(score, batch.target, batch.task, regression)}
    if config.choice and not math.isinf(regression):
        out["choice"] = choice_loss(score, batch.target, batch.task)
    if batch.states is not None:
        true = shared(net.encoder, *batch.states)
        row, step = batch.state_at[:, 0], batch.state_at[:, 1]
        predicted = zs[row, step]
        # Both move: the prediction to the encoder's state, and, more slowly, the state to what can be
        # predicted.
        out["align"] = F.mse_loss(predicted, true.detach()) + 0.1 * F.mse_loss(predicted.detach(), true)
        # Other states of the same batch are negatives, those of the same task the hard ones.
        logits = F.normalize(predicted, dim=-1) @ F.normalize(true, dim=-1).T / 0.1
        out["contrast"] = F.cross_entropy(logits, torch.arange(len(logits)))
        blocks = batch.states[0]
        lead = blocks[..., STATE_BLOCK.index("work_share")].argmax(1)
        goal = blocks[torch.arange(len(blocks)), lead]
        out["decode"] = F.smooth_l1_loss(decoder(predicted), goal) + F.smooth_l1_loss(decoder(true), goal)
        final = step == batch.mask.sum(1)[row] - 1
        if int(final.sum()) > 8:
            rows = row[final]
            true_score = rank(net, true[final], batch, rows, config.without)
            out["true_rank"] = ranking_loss(true_score, batch.target[rows], batch.task[rows], regression)
    return out
