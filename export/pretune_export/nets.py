"""The networks in torch; `pretune.model.WorldModel` runs their ONNX exports."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretune.features.schema import ACTION, ACTION_TYPES, STATE_BLOCK, STATE_LOOP, SUMMARY
from pretune.hardware.hardware import VECTOR_SIZE

DROPOUT = 0.1
"""Of the ranker, in training."""

FEATURE_DROPOUT = 0.2
"""Of the ranker's summary features, in training: the same features for all rows of a batch."""


@dataclass(frozen=True)
class Sizes:
    """Widths of the networks."""

    latent: int = 96
    encoder_hidden: int = 96
    action_hidden: int = 96
    transition_hidden: int = 192
    ranker_hidden: int = 256
    embedding: int = 48

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class Standardize(nn.Module):
    """Features to zero mean and unit spread, as the training data have them; far outliers are cut."""

    LIMIT = 6.0
    FLOOR = 0.01
    """Least standard deviation: a feature that hardly varies in training says little of other values."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def fit(self, x: Tensor) -> None:
        """Take mean and spread from examples ``[n, width]``."""
        self.mean.copy_(x.mean(0))
        self.scale.copy_(1.0 / x.std(0).clamp_min(self.FLOOR))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) * self.scale).clamp(-self.LIMIT, self.LIMIT)


class Encoder(nn.Module):
    """A program's rows -> its latent. Loops are pooled into their block, blocks into the program."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h = sizes.encoder_hidden
        self.loop_input, self.block_input = Standardize(len(STATE_LOOP)), Standardize(len(STATE_BLOCK))
        self.loop = nn.Sequential(nn.Linear(len(STATE_LOOP), h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.block = nn.Sequential(
            nn.Linear(len(STATE_BLOCK) + 2 * h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU()
        )
        self.out = nn.Linear(3 * h, sizes.latent)
        self.norm = nn.LayerNorm(sizes.latent)

    def forward(self, blocks: Tensor, loops: Tensor, mask: Tensor) -> Tensor:
        """``blocks [n, B, .]``, ``loops [n, B, L, .]``, ``mask [n, B]`` -> ``[n, latent]``.

        `mask` is 1 for a real block.
        """
        real = (loops.abs().sum(-1, keepdim=True) > 0).to(loops.dtype)
        x = self.loop(self.loop_input(loops)) * real
        x = torch.cat([self.block_input(blocks), x.sum(2) / 8.0, x.amax(2)], dim=-1)
        m = mask.unsqueeze(-1)
        x = self.block(x) * m
        share = blocks[..., WORK_SHARE : WORK_SHARE + 1] * m
        pooled = torch.cat([x.sum(1) / 4.0, x.amax(1), (x * share).sum(1)], dim=-1)
        return self.norm(self.out(pooled))


WORK_SHARE = STATE_BLOCK.index("work_share")


class Action(nn.Module):
    """What an action brings to the transition, whatever the state: computed once for all that share it."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.kind = nn.Embedding(len(ACTION_TYPES), sizes.action_hidden)
        self.input = Standardize(len(ACTION))
        self.features = nn.Linear(len(ACTION), sizes.action_hidden)
        self.out = nn.Linear(sizes.action_hidden, sizes.transition_hidden)

    def forward(self, type: Tensor, a: Tensor) -> Tensor:
        """``type [1 or n]``, ``a [n, features]`` -> ``[n, transition_hidden]``."""
        return self.out(F.relu(self.features(self.input(a)) + self.kind(type)))


class Transition(nn.Module):
    """One action in latent space: a residual step conditioned on the action."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.state = nn.Linear(sizes.latent, sizes.transition_hidden, bias=False)
        self.out = nn.Linear(sizes.transition_hidden, sizes.latent)
        self.norm = nn.LayerNorm(sizes.latent)

    def forward(self, z: Tensor, action: Tensor) -> Tensor:
        """``z [n, latent]``, ``action [n, transition_hidden]`` from `Action` -> ``[n, latent]``."""
        return self.norm(z + self.out(F.relu(self.state(z) + action)))


class Ranker(nn.Module):
    """Final latent, all actions together and the hardware -> a score that orders candidates of one task."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.latent + len(SUMMARY) + VECTOR_SIZE
        self.input = Standardize(len(SUMMARY))
        self.net = nn.Sequential(
            nn.Linear(width, sizes.ranker_hidden), nn.ReLU(), nn.Dropout(DROPOUT),
            nn.Linear(sizes.ranker_hidden, sizes.ranker_hidden // 2), nn.ReLU(), nn.Dropout(DROPOUT),
            nn.Linear(sizes.ranker_hidden // 2, sizes.embedding), nn.ReLU(),
        )  # fmt: skip
        self.score = nn.Linear(sizes.embedding, 1)

    def forward(self, z: Tensor, summary: Tensor, hardware: Tensor) -> tuple[Tensor, Tensor]:
        """``z [n, latent]``, ``summary [n, .]``, ``hardware [1 or n, 16]`` -> score, embedding.

        The score is ``[n]``, the embedding ``[n, .]``: what the score is linear in.
        """
        # Added rather than expanded, so that one hardware row serves any number of candidates.
        hardware = hardware + torch.zeros_like(z[:, :1])
        summary = self.input(summary)
        if self.training:
            # Many features are alike for all candidates of a task: by them it would learn which task it has.
            summary = summary * F.dropout(torch.ones_like(summary[:1]), FEATURE_DROPOUT)
        e = self.net(torch.cat([z, summary, hardware], dim=-1))
        return self.score(e).squeeze(-1), e


class WorldModelNet(nn.Module):
    """Encoder, transition (with what actions bring to it) and ranker together."""

    def __init__(self, sizes: Sizes | None = None) -> None:
        super().__init__()
        self.sizes = sizes or Sizes()
        self.encoder = Encoder(self.sizes)
        self.action = Action(self.sizes)
        self.transition = Transition(self.sizes)
        self.ranker = Ranker(self.sizes)

    def fit_inputs(
        self, actions: Tensor, blocks: Tensor, loops: Tensor, summary: Tensor | None = None
    ) -> None:
        """Take the spread of all features from training examples, ``[n, features]`` each."""
        self.action.input.fit(actions)
        self.encoder.block_input.fit(blocks)
        self.encoder.loop_input.fit(loops)
        if summary is not None:
            self.ranker.input.fit(summary)

    def rollout(
        self, z0: Tensor, types: Tensor, actions: Tensor, mask: Tensor, *, truncate: bool = False
    ) -> list[Tensor]:
        """Latents after each step.

        Parameters
        ----------
        z0 : ``[n, latent]``
        types : int64 ``[n, T]``
        actions : ``[n, T, features]``
        mask : bool ``[n, T]``, False beyond a candidate's last action, where the latent stays.
        truncate : bool
            Let no gradient flow from a step to the one before it.
        """
        zs, z = [], z0
        for t in range(types.shape[1]):
            z = z.detach() if truncate else z
            action = self.action(types[:, t], actions[:, t])
            z = torch.where(mask[:, t, None], self.transition(z, action), z)
            zs.append(z)
        return zs


def load_net(folder: Path) -> WorldModelNet:
    """The networks of a weights folder."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    net = WorldModelNet(Sizes(**config["sizes"]))
    net.load_state_dict(load_file(folder / "model.safetensors"))
    return net.eval()


@torch.no_grad()
def outputs_of(folder: Path, inputs: dict[str, dict[str, np.ndarray]]) -> dict[str, list[np.ndarray]]:
    """What the networks of a weights folder give in torch, for comparison with their ONNX files.

    Parameters
    ----------
    folder : pathlib.Path
    inputs : dict of str to dict
        Arrays by input name, for each network by its name.
    """
    net = load_net(folder)
    found = {}
    for part, arrays in inputs.items():
        outputs = getattr(net, part)(**{name: torch.from_numpy(array) for name, array in arrays.items()})
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        found[part] = [output.numpy() for output in outputs]
    return found
