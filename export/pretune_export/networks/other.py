"""Networks over points, graphs, tables and signals, and random layers with odd sizes."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

from .blocks import Built, Fn, Network, Residual, conv, mlp

Layer = tuple[nn.Module, tuple[tuple[int, ...], ...]]
"""A module and the shapes of its inputs."""


class Many(nn.Module):
    """Independent modules, each with inputs of its own, as one network."""

    def __init__(self, modules: list[nn.Module], arity: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(modules)
        self.arity = arity

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, at = [], 0
        for layer, count in zip(self.layers, self.arity, strict=True):
            outputs.append(layer(*inputs[at : at + count]))
            at += count
        return tuple(outputs)


def many(*layers: Layer) -> Built:
    inputs = tuple(torch.randn(shape) for _, shapes in layers for shape in shapes)
    return Many([module for module, _ in layers], [len(shapes) for _, shapes in layers]), inputs


class TransformNet(nn.Module):
    """PointNet's spatial transformer: a k x k matrix from all points."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.points = nn.Sequential(
            conv(k, 64, 1, dims=1), conv(64, 128, 1, dims=1), conv(128, 1024, 1, dims=1)
        )
        self.matrix = mlp(1024, 512, 256, k * k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix(self.points(x).max(2)[0]).reshape(-1, self.k, self.k)
        return (x.transpose(1, 2) @ matrix).transpose(1, 2)


class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t3, self.t32 = TransformNet(3), TransformNet(32)
        self.local = conv(3, 32, 1, dims=1)
        self.deep = nn.Sequential(conv(32, 128, 1, dims=1), conv(128, 512, 1, a=None, dims=1))
        self.parts = nn.Sequential(conv(544, 256, 1, dims=1), nn.Conv1d(256, 13, 1), nn.LogSoftmax(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.t32(self.local(self.t3(x)))
        everything = self.deep(x).max(2, keepdim=True)[0].expand(-1, -1, x.shape[2])
        return self.parts(torch.cat([x, everything], 1))


def pointnet(batch: int, points: int) -> Built:
    return PointNet(), (torch.randn(batch, 3, points),)


class Dlrm(nn.Module):
    """Dense features, 26 embeddings, their pairwise products, a top MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = mlp(13, 512, 256, 64, last="relu")
        self.top = mlp(27 * 27 + 64, 512, 256, 1, last="sigmoid")

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        dense = self.bottom(dense)
        features = torch.cat([dense[:, None], sparse], 1)
        pairs = features @ features.transpose(1, 2)
        return self.top(torch.cat([dense, pairs.flatten(1)], 1))


def dlrm(batch: int) -> Built:
    return Dlrm(), (torch.randn(batch, 13), torch.randn(batch, 26, 64))


class DeepFm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = mlp(39 * 10, 400, 400, 1)
        self.wide = nn.Linear(39, 1)

    def forward(self, values: torch.Tensor, fields: torch.Tensor) -> torch.Tensor:
        total = fields.sum(1)
        pairs = 0.5 * (total * total - (fields * fields).sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(self.wide(values) + pairs + self.deep(fields.flatten(1)))


def deepfm() -> Built:
    return DeepFm(), (torch.randn(96, 39), torch.randn(96, 39, 10))


class InterestNet(nn.Module):
    """Attention of one candidate item over a user's history, without softmax (DIN)."""

    def __init__(self) -> None:
        super().__init__()
        self.score = mlp(4 * 36, 80, 40, 1, a="sigmoid")
        self.out = mlp(108, 200, 80, 2)

    def forward(self, user: torch.Tensor, item: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        items = item[:, None].expand_as(history)
        weights = self.score(torch.cat([items, history, items - history, items * history], -1))
        return self.out(torch.cat([user, item, (weights * history).sum(1)], -1)).softmax(-1)


def interest() -> Built:
    return InterestNet(), (torch.randn(8, 36), torch.randn(8, 36), torch.randn(8, 50, 36))


class GraphConv(nn.Module):
    """Dense two-layer graph convolution of the size of the Cora data set."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1433, 16, bias=False), nn.Linear(16, 7, bias=False)

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(adjacency @ self.a(x))
        return F.log_softmax(adjacency @ self.b(x), -1)


def gcn() -> Built:
    return GraphConv(), (torch.randn(2708, 2708), torch.randn(2708, 1433))


class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.source, self.sink = nn.Linear(50, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.out = nn.Linear(64, 121)

    def forward(self, mask: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x = self.project(x)
        scores = self.source(x)[:, None] + self.sink(x)[None]
        weights = (F.leaky_relu(scores, 0.2) + mask[..., None]).softmax(1)
        heads = x.reshape(-1, 8, 8)
        y = weights.permute(2, 0, 1) @ heads.permute(1, 0, 2)
        return self.out(F.elu(y.permute(1, 0, 2).flatten(1)))


def gat() -> Built:
    return GraphAttention(), (torch.randn(300, 300), torch.randn(300, 50))


class SchNet(nn.Module):
    """Continuous filters over all pairs of 23 atoms: radial basis, softplus, a sum over neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = mlp(50, 64, 64, a="softplus", last="softplus")
        self.before, self.after = nn.Linear(64, 64), mlp(64, 64, 64, a="softplus")
        self.energy = mlp(64, 32, 1, a="softplus")

    def forward(self, distances: torch.Tensor, atoms: torch.Tensor) -> torch.Tensor:
        centres = torch.linspace(0, 5, 50)
        basis = torch.exp(-10 * (distances[..., None] - centres) ** 2)
        messages = (self.filter(basis) * self.before(atoms)[:, None]).sum(2)
        return self.energy(atoms + self.after(messages)).sum(1)


def schnet() -> Built:
    return SchNet(), (torch.rand(4, 23, 23), torch.randn(4, 23, 64))


class Triangle(nn.Module):
    """Protein folding's pair update: a product over the third residue for every channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.a, self.b, self.gate = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, channels)

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        x = self.norm(pair)
        a, b = (torch.sigmoid(f(x)) * f(x) for f in (self.a, self.b))
        product = (a.permute(2, 0, 1) @ b.permute(2, 1, 0)).permute(1, 2, 0)
        return pair + torch.sigmoid(self.gate(x)) * self.out(product)


def triangle() -> Built:
    return Triangle(64), (torch.randn(57, 57, 64),)


class Nerf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(63, 256, 256, last="relu"), mlp(319, 256, 256, last="relu")
        self.density = nn.Linear(256, 1)
        self.colour = mlp(256 + 27, 128, 3, last="sigmoid")

    def forward(self, points: torch.Tensor, directions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.second(torch.cat([points, self.first(points)], -1))
        return F.relu(self.density(x)), self.colour(torch.cat([x, directions], -1))


def nerf() -> Built:
    return Nerf(), (torch.randn(1000, 63), torch.randn(1000, 27))


def siren() -> Built:
    class Sine(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(30.0 * x)

    layers = [nn.Linear(2, 180), Sine(), nn.Linear(180, 180), Sine(), nn.Linear(180, 3)]
    return nn.Sequential(*layers), (torch.randn(4096, 2),)


def autoencoder() -> Built:
    return nn.Sequential(mlp(784, 300, 100, 20), mlp(20, 100, 300, 784, last="sigmoid")), (
        torch.randn(64, 784),
    )


def actor_critic(batch: int) -> Built:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = mlp(17, 256, 256, 6, a="tanh", last="tanh"), mlp(23, 400, 300, 1)

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return self.critic(torch.cat([state, self.actor(state)], -1))

    return Both(), (torch.randn(batch, 17),)


def nbeats() -> Built:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(120, 512, 512, last="relu")
            self.back, self.ahead = nn.Linear(512, 120), nn.Linear(512, 24)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.body(x)
            return x - self.back(y), self.ahead(y)

    return Block(), (torch.randn(10, 120),)


def tabular_resnet() -> Built:
    def block() -> nn.Module:
        return Residual(nn.Sequential(nn.BatchNorm1d(173), mlp(173, 353, 173)))

    layers = nn.Sequential(nn.Linear(54, 173), block(), nn.BatchNorm1d(173), nn.ReLU(), nn.Linear(173, 7))
    return layers, (torch.randn(128, 54),)


def word_head() -> Built:
    """One word vector against a whole vocabulary."""
    return nn.Sequential(nn.Linear(300, 30522), nn.LogSoftmax(-1)), (torch.randn(1, 300),)


def classifier_heads() -> Built:
    return many(
        (nn.Linear(1024, 21843), ((1, 1024),)),
        (nn.Linear(1536, 1000), ((8, 1536),)),
        (nn.Linear(1, 64), ((512, 1),)),
        (nn.Linear(2, 100), ((333, 2),)),
        (nn.Linear(4096, 10), ((1, 4096),)),
        (nn.Linear(640, 1), ((75, 640),)),
        (nn.Linear(10000, 128), ((2, 10000),)),
    )


class AudioFeatures(nn.Module):
    """Log-mel features: Fourier transform as a strided convolution, power, filter bank, cosine transform."""

    def __init__(self) -> None:
        super().__init__()
        self.fourier = nn.Conv1d(1, 402, 400, 160, bias=False)
        self.mel = nn.Linear(201, 80, bias=False)
        self.cosine = nn.Linear(80, 13, bias=False)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        real, imaginary = self.fourier(wave).chunk(2, 1)
        power = (real * real + imaginary * imaginary).transpose(1, 2)
        return self.cosine(torch.log(self.mel(power).clamp_min(1e-5)))


def audio_features() -> Built:
    return AudioFeatures(), (torch.randn(1, 1, 16000),)


def geometry() -> Built:
    """Distances, kernels, rotations: small inner dimensions and broadcasts before a reduction."""

    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a[:, None] - b[None]) ** 2).sum(-1)

    return many(
        (Fn(distance), ((500, 3), (400, 3))),
        (Fn(lambda a, b: torch.exp(-distance(a, b))), ((128, 12), (200, 12))),
        (Fn(lambda a, b: distance(a, b).argmin(1)), ((1000, 8), (64, 8))),
        (Fn(lambda p, m: p @ m), ((16, 1200, 4), (16, 4, 4))),
        (Fn(lambda p, m: p @ m), ((5000, 2), (2, 2))),
        (Fn(lambda a, b: F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T), ((256, 96), (333, 96))),
        (Fn(lambda x: x @ x.transpose(1, 2) / 10000), ((1, 48, 10000),)),
        (Fn(lambda x: torch.log(torch.exp(x - x.max(1, keepdim=True)[0]).sum(1))), ((64, 300),)),
    )


class Flow(nn.Module):
    """One coupling layer of a normalising flow."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = mlp(31, 128, 32, last="tanh"), mlp(31, 128, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x[:, :31], x[:, 31:]
        scale = self.scale(a)
        return torch.cat([a, b * torch.exp(scale) + self.shift(a)], 1), scale.sum(1)


def flow() -> Built:
    return Flow(), (torch.randn(200, 63),)


class RootMeanSquare(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


# Random layers. Sizes are drawn from what real networks have and from their odd neighbours.

_WIDTHS = (
    1,
    2,
    3,
    5,
    7,
    10,
    16,
    19,
    24,
    31,
    33,
    40,
    48,
    50,
    64,
    77,
    80,
    96,
    100,
    112,
    128,
    144,
    150,
    160,
    192,
    197,
)
_WIDE = (
    *_WIDTHS[8:],
    200,
    240,
    256,
    288,
    300,
    320,
    353,
    384,
    400,
    448,
    480,
    500,
    576,
    600,
    640,
    768,
    896,
    1000,
    1500,
)
_ACTS = (None, None, "relu", "relu", "gelu", "silu", "sigmoid", "tanh", "hardswish", "relu6", "leaky", "elu")


def random_dense(r: random.Random) -> Layer:
    while True:
        m, k, n = (
            r.choice((1, 1, 2, 4, 8, *_WIDTHS)),
            r.choice((*_WIDE, 2, 3, 13)),
            r.choice((*_WIDE, 1, 2, 10)),
        )
        if 1e4 < m * k * n < 2e8:
            layers = [nn.Linear(k, n, bias=r.random() < 0.7), *mlp(1, 1, last=r.choice(_ACTS))[1:]]
            return nn.Sequential(*layers), ((m, k),)


def random_batch_matmul(r: random.Random) -> Layer:
    while True:
        b, m, k, n = r.choice((1, 2, 4, 6, 9, 12)), r.choice(_WIDTHS), r.choice(_WIDTHS), r.choice(_WIDTHS)
        if 1e4 < b * m * k * n < 1e8:
            if r.random() < 0.5:
                return Fn(lambda a, c: a @ c), ((b, m, k), (b, k, n))
            return Fn(lambda a, c, scale=k**-0.5: a @ c.transpose(-1, -2) * scale), (
                (1, b, m, k),
                (1, b, n, k),
            )


def random_conv(r: random.Random, dims: int) -> Layer:
    while True:
        batch = r.choice((1, 1, 1, 2, 4, 8))
        sizes = ((100, 197, 400, 1500), (7, 13, 14, 19, 28, 31, 40, 56, 65, 80), (4, 6, 8, 16))[dims - 1]
        size = tuple(r.choice(sizes) for _ in range(dims))
        k: int | tuple[int, ...] = r.choice((1, 1, 3, 3, 3, 5, 7))
        if r.random() < 0.15 and dims > 1:
            k = r.choice(
                ((1, 7), (7, 1), (1, 3), (3, 1), (5, 1)) if dims == 2 else ((1, 3, 3), (3, 1, 1), (1, 1, 5))
            )
        cin, cout = r.choice((3, *_WIDTHS[5:], 256, 320)), r.choice((*_WIDTHS[5:], 256, 384, 512))
        groups = r.choice((1, 1, 1, 2, 4)) if dims < 3 else 1
        if groups > 1 and (cin % groups or cout % groups):
            continue
        stride, dilation = r.choice((1, 1, 1, 2, 3)), r.choice((1, 1, 1, 1, 2))
        taps = functools.reduce(lambda a, b: a * b, k) if isinstance(k, tuple) else k**dims
        work = (
            batch * cin * cout // groups * taps * functools.reduce(lambda a, b: a * b, size) // stride**dims
        )
        if 1e5 < work < 4e8:
            layer = conv(cin, cout, k, stride, r.choice(_ACTS), dilation=dilation, groups=groups, dims=dims,
                         norm=r.choice(("bn", "bn", None)))  # fmt: skip
            return layer, ((batch, cin, *size),)


def random_depthwise(r: random.Random) -> Layer:
    channels, size = r.choice(_WIDE), (r.choice((7, 13, 14, 20, 28, 33)), r.choice((7, 14, 20, 28, 40)))
    layer = conv(
        channels, channels, r.choice((3, 3, 5, 7)), r.choice((1, 1, 2)), r.choice(_ACTS), groups=channels
    )
    return layer, ((r.choice((1, 1, 2, 4)), channels, *size),)


def random_transposed(r: random.Random) -> Layer:
    cin, cout, stride = (
        r.choice((16, 32, 50, 64, 96, 128)),
        r.choice((1, 3, 12, 32, 48, 64)),
        r.choice((1, 2, 2)),
    )
    layer = nn.ConvTranspose2d(cin, cout, r.choice((2, 3, 4, 5)), stride, r.choice((0, 1)))
    return layer, ((r.choice((1, 2)), cin, r.choice((7, 10, 16, 25)), r.choice((7, 12, 16, 30))),)


def _some_shape(r: random.Random) -> tuple[int, ...]:
    while True:
        shape = tuple(
            r.choice((1, 2, 3, 4, 8, *_WIDTHS, 384, 512, 768, 1500)) for _ in range(r.choice((2, 3, 3, 4)))
        )
        if 4e3 < functools.reduce(lambda a, b: a * b, shape) < 1e6:
            return shape


def random_softmax(r: random.Random) -> Layer:
    while True:
        shape = _some_shape(r)
        axis = r.randrange(len(shape))
        if shape[axis] > 1:
            return (nn.Softmax(axis) if r.random() < 0.75 else nn.LogSoftmax(axis)), (shape,)


def random_norm(r: random.Random) -> Layer:
    shape = (r.choice((1, 1, 2, 4)), r.choice((1, 20, 49, 50, 77, 100, 128, 197, 384)), r.choice(_WIDE))
    kind = r.choice(("layer", "rms", "group", "instance"))
    if kind == "layer":
        return nn.LayerNorm(shape[-1]), (shape,)
    if kind == "rms":
        return RootMeanSquare(shape[-1]), (shape,)
    side, channels = r.choice((7, 12, 14, 20, 32)), r.choice((32, 64, 96, 128, 160))
    norm = (
        nn.GroupNorm(r.choice((4, 8, 16, 32)), channels)
        if kind == "group"
        else nn.InstanceNorm2d(channels, affine=True)
    )
    return nn.Sequential(norm, *mlp(1, 1, last=r.choice(_ACTS))[1:]), ((shape[0], channels, side, side),)


def random_pool(r: random.Random) -> Layer:
    k, stride = r.choice((2, 2, 3, 3, 5, 7)), r.choice((1, 2, 2, 3))
    pool = r.choice((nn.MaxPool2d, nn.AvgPool2d))
    shape = (
        r.choice((1, 1, 2, 4, 8)),
        r.choice(_WIDTHS[6:]),
        r.choice((14, 28, 33, 56)),
        r.choice((14, 28, 40, 56)),
    )
    if r.random() < 0.25:
        return nn.AdaptiveAvgPool2d(r.choice((1, 1, 2, 7))), ((*shape[:2], 14, 14),)
    return pool(k, stride, k // 2), (shape,)


def random_reduction(r: random.Random) -> Layer:
    while True:
        shape = _some_shape(r)
        axis = r.randrange(len(shape))
        if shape[axis] > 1:
            break
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: x.sum(axis),
        lambda x: x.mean(axis, keepdim=True),
        lambda x: x.max(axis)[0],
        lambda x: x.argmax(axis),
        lambda x: (x * x).sum(axis),
        lambda x: x.abs().max(axis)[0],
        lambda x: torch.exp(x).sum(axis),
        lambda x: x.var(axis, correction=0),
        lambda x: (-x).max(axis)[0],
        lambda x: torch.sigmoid(x).mean(axis),
    )
    return Fn(r.choice(functions)), (shape,)


_RANDOM: dict[str, tuple[Callable[[random.Random], Layer], ...]] = {
    "dense": (random_dense,),
    "conv": (functools.partial(random_conv, dims=2),),
    "conv-1d-3d": (functools.partial(random_conv, dims=1), functools.partial(random_conv, dims=3)),
    "depthwise": (random_depthwise, random_transposed),
    "batch-matmul": (random_batch_matmul,),
    "row": (random_softmax, random_norm),
    "reduce": (random_reduction, random_pool),
}


def synthetic(kind: str, seed: int, count: int = 24) -> Built:
    """`count` random layers of a kind, the same for the same seed."""
    r = random.Random(f"{kind}-{seed}")
    makers = _RANDOM[kind]

    def layers() -> Iterator[Layer]:
        for i in range(count):
            yield makers[i % len(makers)](r)

    return many(*layers())


NETWORKS = (
    Network("pointnet", "pointnet", lambda: pointnet(1, 1024)),
    Network("pointnet@4", "pointnet", lambda: pointnet(4, 500)),
    Network("dlrm", "dlrm", lambda: dlrm(1)),
    Network("dlrm@128", "dlrm", lambda: dlrm(128)),
    Network("deepfm@96", "deepfm", deepfm),
    Network("interest@8", "interest", interest),
    Network("gcn", "gcn", gcn),
    Network("gat", "gat", gat),
    Network("schnet@4", "schnet", schnet),
    Network("triangle", "triangle", triangle),
    Network("nerf@1000", "nerf", nerf),
    Network("siren@4096", "siren", siren),
    Network("autoencoder@64", "autoencoder", autoencoder),
    Network("actor-critic", "actor-critic", lambda: actor_critic(1)),
    Network("actor-critic@256", "actor-critic", lambda: actor_critic(256)),
    Network("nbeats@10", "nbeats", nbeats),
    Network("tabular-resnet@128", "tabular-resnet", tabular_resnet),
    Network("word-head", "heads", word_head),
    Network("classifier-heads", "heads", classifier_heads),
    Network("audio-features", "audio-features", audio_features),
    Network("geometry", "geometry", geometry),
    Network("flow@200", "flow", flow),
    *(Network(f"random-{kind}-{seed}", "random", functools.partial(synthetic, kind, seed))
      for kind in _RANDOM for seed in range(2)),
)  # fmt: skip
