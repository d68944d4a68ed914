"""The networks as they are exported: the same functions as `nets`, in fewer operations.

What a constant could be folded into is part of the weights here: mean and scale of the inputs, the kind of an
action. ONNX Runtime then runs each first layer as one Gemm with its bias and activation.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pretune.features.schema import SUMMARY
from pretune.hardware.hardware import VECTOR_SIZE
from pretune_export.nets import Action, Ranker, Standardize, Transition, WorldModelNet


def folded(net: WorldModelNet) -> dict[str, nn.Module]:
    """The networks that run once for each candidate or more often, by their names in `net`."""
    parts = {
        "action": FoldedAction(net.action),
        "transition": FoldedTransition(net.transition),
        "ranker": FoldedRanker(net.ranker),
    }
    return {name: part.eval() for name, part in parts.items()}


class Cut(nn.Module):
    """What is left of `Standardize` when the layer after it has taken over mean and scale."""

    low: Tensor
    high: Tensor

    def __init__(self, inputs: Standardize) -> None:
        super().__init__()
        limit = Standardize.LIMIT / inputs.scale
        self.register_buffer("low", inputs.mean - limit)
        self.register_buffer("high", inputs.mean + limit)

    def forward(self, x: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(x, self.low), self.high)


@torch.no_grad()
def take_over(inputs: Standardize, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of a linear layer for inputs that are cut, but not standardised.

    Parameters
    ----------
    inputs : Standardize
    weight, bias : torch.Tensor
        For standardised inputs, ``[out, in]`` and ``[out]``.
    """
    # In float64: a column of little spread adds much to the bias, and the inputs take most of it away again.
    scaled = weight.double() * inputs.scale
    return scaled.float(), (bias - scaled @ inputs.mean.double()).float()


class FoldedAction(nn.Module):
    """`Action`."""

    weight: Tensor
    bias: Tensor

    def __init__(self, net: Action) -> None:
        super().__init__()
        self.input, self.out = Cut(net.input), net.out
        weight, bias = take_over(net.input, net.features.weight, net.features.bias)
        self.register_buffer("weight", weight.T.contiguous())
        self.register_buffer("bias", net.kind.weight.detach() + bias)

    def forward(self, type: Tensor, a: Tensor) -> Tensor:
        return self.out(F.relu(torch.addmm(self.bias[type], self.input(a), self.weight)))


class FoldedTransition(nn.Module):
    """`Transition`."""

    weight: Tensor

    def __init__(self, net: Transition) -> None:
        super().__init__()
        self.out, self.norm = net.out, net.norm
        self.register_buffer("weight", net.state.weight.detach().T.contiguous())

    def forward(self, z: Tensor, action: Tensor) -> Tensor:
        return self.norm(z + self.out(F.relu(torch.addmm(action, z, self.weight))))


class FoldedRanker(nn.Module):
    """`Ranker`, for one row of hardware."""

    z: Tensor
    summary: Tensor
    hardware: Tensor
    bias: Tensor

    def __init__(self, net: Ranker) -> None:
        super().__init__()
        self.input, self.rest, self.score = Cut(net.input), net.net[1:], net.score
        first = net.net[0]
        widths = [len(SUMMARY), VECTOR_SIZE]
        z, summary, hardware = first.weight.detach().split([first.in_features - sum(widths), *widths], dim=1)
        summary, bias = take_over(net.input, summary, first.bias)
        for name, weight in (("z", z), ("summary", summary), ("hardware", hardware)):
            self.register_buffer(name, weight.T.contiguous())
        self.register_buffer("bias", bias)

    def forward(self, z: Tensor, summary: Tensor, hardware: Tensor) -> tuple[Tensor, Tensor]:
        # Added up rather than joined: a Gemm takes what it is added to, a Concat would be a copy.
        first = torch.addmm(self.bias, hardware, self.hardware)
        first = torch.addmm(first, self.input(summary), self.summary)
        e = self.rest(torch.addmm(first, z, self.z))
        return self.score(e).squeeze(-1), e
