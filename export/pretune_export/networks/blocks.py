"""Layers that the networks of the corpus share, as terse as a corpus of shapes needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

Built = tuple[nn.Module, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Network:
    """A network whose layers give tuning tasks.

    Attributes
    ----------
    name : str
        Unique name; ``@`` sets off the batch size where one architecture occurs at several, ``:`` a dtype
        other than float32.
    family : str
        What kind of network it is; the split keeps variants of one architecture together.
    build : callable
        Gives the module in evaluation mode, weights random, and its example inputs, in float32.
    dtype : str
        What its tasks are computed in: "float32", "float16", "bfloat16" or "int8" (`precision`).
    """

    name: str
    family: str
    build: Callable[[], Built]
    dtype: str = "float32"


_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky": lambda: nn.LeakyReLU(0.1),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "sigmoid": nn.Sigmoid,
    "hardsigmoid": nn.Hardsigmoid,
    "tanh": nn.Tanh,
    "elu": nn.ELU,
    "softplus": nn.Softplus,
}


def act(name: str | None) -> list[nn.Module]:
    """The activation of that name as a list to splice into a `Sequential`; empty for None."""
    return [_ACTIVATIONS[name]()] if name else []


def conv(
    cin: int,
    cout: int,
    k: int | tuple[int, ...] = 3,
    stride: int | tuple[int, ...] = 1,
    a: str | None = "relu",
    *,
    dilation: int = 1,
    groups: int = 1,
    padding: int | tuple[int, ...] | None = None,
    norm: str | None = "bn",
    dims: int = 2,
) -> nn.Sequential:
    """Convolution, normalisation, activation.

    `norm` is "bn", "gn", "in" or None, which gives the convolution a bias instead.
    """
    if padding is None:  # what keeps the size at stride 1
        sizes = k if isinstance(k, tuple) else (k,) * dims
        padding = tuple(dilation * (size - 1) // 2 for size in sizes)
    layer = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layers: list[nn.Module] = [
        layer(cin, cout, k, stride, padding, dilation, groups, bias=norm is None)  # type: ignore[arg-type]
    ]
    if norm == "bn":
        layers.append((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](cout))
    elif norm == "gn":
        layers.append(nn.GroupNorm(8, cout))
    elif norm == "in":
        layers.append((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1](cout, affine=True))
    return nn.Sequential(*layers, *act(a))


def mlp(*widths: int, a: str | None = "relu", last: str | None = None) -> nn.Sequential:
    """Linear layers of these widths with an activation after each; `last` after the last one."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        layers += [nn.Linear(fan_in, fan_out), *act(a if i < len(widths) - 2 else last)]
    return nn.Sequential(*layers)


class Fn(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, fn: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *xs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.fn(*xs)


class Residual(nn.Module):
    """``after(x + body(x))``, or ``after(shortcut(x) + body(x))``."""

    def __init__(self, body: nn.Module, after: str | None = None, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()
        self.after = nn.Sequential(*act(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.shortcut(x) + self.body(x))


class Concat(nn.Module):
    """Branches of one input, concatenated along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Gather(nn.Module):
    """Apply several modules to one input and return all outputs."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(branch(x) for branch in self.branches)


class SqueezeExcite(nn.Module):
    """Channel attention: mean over the image, two 1x1 convolutions, a gate."""

    def __init__(self, channels: int, squeezed: int, a: str = "relu", gate: str = "sigmoid") -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            conv(channels, squeezed, 1, a=a, norm=None),
            conv(squeezed, channels, 1, a=gate, norm=None),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x)


class InvertedResidual(nn.Module):
    """Mobile block: 1x1 expansion, depthwise, optional channel attention, linear 1x1."""

    def __init__(
        self,
        cin: int,
        hidden: int,
        cout: int,
        k: int,
        stride: int,
        a: str,
        squeezed: int = 0,
        gate: str = "sigmoid",
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(cin, hidden, 1, a=a)] if hidden != cin else []
        layers.append(conv(hidden, hidden, k, stride, a, groups=hidden))
        if squeezed:
            layers.append(SqueezeExcite(hidden, squeezed, "relu" if a == "hardswish" else a, gate))
        layers.append(conv(hidden, cout, 1, a=None))
        self.body = nn.Sequential(*layers)
        self.residual = stride == 1 and cin == cout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return x + y if self.residual else y


class Attention(nn.Module):
    """Self or cross attention, spelled out so that its products and its softmax become tasks."""

    def __init__(self, dim: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(context or dim, dim)
        self.v = nn.Linear(context or dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        context = x if context is None else context
        b, n, dim = x.shape
        split = (b, -1, self.heads, dim // self.heads)
        q, k, v = (
            f(t).reshape(split).transpose(1, 2)
            for f, t in ((self.q, x), (self.k, context), (self.v, context))
        )
        weights = (q @ k.transpose(-1, -2) * (dim // self.heads) ** -0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, dim))


class ChannelNorm(nn.Module):
    """Layer norm over the channels of an image, which is a reduction over a middle axis."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(1, keepdim=True)
        return (
            centred * torch.rsqrt((centred * centred).mean(1, keepdim=True) + 1e-6) * self.weight + self.bias
        )


def head(channels: int, classes: int) -> nn.Sequential:
    """Mean over the image, then a linear classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
