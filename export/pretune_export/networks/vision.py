"""Image, video and generative networks, from their papers' tables.

Repeated blocks of equal shape occur once or twice: the repeats give no new task. Resolutions are varied on
purpose, so that no network repeats the layer shapes of ResNet-50 or MobileNetV2 at 224 x 224.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from .blocks import (
    Attention,
    Built,
    ChannelNorm,
    Concat,
    Fn,
    Gather,
    InvertedResidual,
    Network,
    Residual,
    SqueezeExcite,
    act,
    conv,
    head,
    mlp,
)


def image(*shape: int) -> tuple[torch.Tensor, ...]:
    """One random input of this shape."""
    return (torch.randn(shape),)


def vgg(plan: str, batch: int, size: int, norm: str | None, hidden: int) -> Built:
    """VGG; `plan` gives the number of convolutions of each stage, such as "11222"."""
    layers: list[nn.Module] = []
    cin = 3
    for convs, cout in zip(plan, (64, 128, 256, 512, 512), strict=True):
        for _ in range(int(convs)):
            layers.append(conv(cin, cout, norm=norm))
            cin = cout
        layers.append(nn.MaxPool2d(2))
    side = size // 32
    layers += [nn.Flatten(), mlp(512 * side * side, hidden, hidden, 1000)]
    return nn.Sequential(*layers), image(batch, 3, size, size)


def alexnet() -> Built:
    layers = nn.Sequential(
        conv(3, 64, 11, 4, padding=2, norm=None),
        nn.MaxPool2d(3, 2),
        conv(64, 192, 5, norm=None),
        nn.MaxPool2d(3, 2),
        conv(192, 384, norm=None),
        conv(384, 256, norm=None),
        conv(256, 256, norm=None),
        nn.MaxPool2d(3, 2),
        nn.Flatten(),
        mlp(256 * 6 * 6, 2048, 4096, 1000),
    )
    return layers, image(4, 3, 224, 224)


def lenet() -> Built:
    layers = nn.Sequential(
        conv(1, 6, 5, a="tanh", norm=None, padding=2),
        nn.AvgPool2d(2),
        conv(6, 16, 5, a="tanh", norm=None, padding=0),
        nn.AvgPool2d(2),
        conv(16, 120, 5, a="tanh", norm=None, padding=0),
        nn.Flatten(),
        mlp(120, 84, 10, a="tanh"),
        nn.Softmax(-1),
    )
    return layers, image(32, 1, 28, 28)


class DenseLayer(nn.Module):
    def __init__(self, cin: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(cin),
            nn.ReLU(),
            conv(cin, 4 * growth, 1),
            conv(4 * growth, growth, a=None, norm=None),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet121() -> Built:
    channels, growth = 64, 32
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for stage, depth in enumerate((6, 12, 24, 16)):
        for i in range(depth):
            # Every layer has a width of its own: the first ones and every fourth show them all.
            if i < 2 or i % 4 == 3:
                layers.append(DenseLayer(channels, growth))
            else:
                layers.append(Fn(lambda x, grown=growth: torch.cat([x, x[:, :grown]], 1)))
            channels += growth
        if stage < 3:
            channels //= 2
            layers += [nn.BatchNorm2d(2 * channels), nn.ReLU()]
            layers += [conv(2 * channels, channels, 1, a=None, norm=None), nn.AvgPool2d(2)]
    layers += [nn.BatchNorm2d(channels), nn.ReLU(), head(channels, 1000)]
    return nn.Sequential(*layers), image(1, 3, 240, 240)


def squeezenet() -> Built:
    def fire(cin: int, squeezed: int, expanded: int) -> nn.Module:
        return nn.Sequential(
            conv(cin, squeezed, 1, norm=None),
            Concat(conv(squeezed, expanded, 1, norm=None), conv(squeezed, expanded, 3, norm=None)),
        )

    layers = nn.Sequential(
        conv(3, 64, 3, 2, norm=None, padding=0),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(64, 16, 64),
        fire(128, 16, 64),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(128, 32, 128),
        fire(256, 32, 128),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        fire(256, 48, 192),
        fire(384, 64, 256),
        conv(512, 1000, 1, norm=None),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return layers, image(1, 3, 224, 224)


class ShuffleUnit(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        half = cout // 2
        self.stride = stride
        inside = half if stride == 1 else cin
        self.left = nn.Sequential(conv(cin, cin, 3, stride, None, groups=cin), conv(cin, half, 1))
        self.right = nn.Sequential(
            conv(inside, half, 1), conv(half, half, 3, stride, None, groups=half), conv(half, half, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride == 1:
            left, right = x.chunk(2, 1)
        else:
            left, right = self.left(x), x
        y = torch.cat([left, self.right(right)], 1)
        b, c, h, w = y.shape
        return y.reshape(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


def shufflenetv2(batch: int) -> Built:
    layers: list[nn.Module] = [conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    cin = 24
    for cout in (116, 232, 464):
        layers += [ShuffleUnit(cin, cout, 2), ShuffleUnit(cout, cout, 1)]
        cin = cout
    return nn.Sequential(*layers, conv(464, 1024, 1), head(1024, 1000)), image(batch, 3, 224, 224)


def inceptionv3() -> Built:
    def pool() -> nn.Module:
        return nn.AvgPool2d(3, 1, 1)

    def c(*plan: tuple) -> nn.Module:
        return nn.Sequential(*(conv(*layer) for layer in plan))

    def low(cin: int, pooled: int) -> nn.Module:
        return Concat(
            conv(cin, 64, 1),
            c((cin, 48, 1), (48, 64, 5)),
            c((cin, 64, 1), (64, 96, 3), (96, 96, 3)),
            nn.Sequential(pool(), conv(cin, pooled, 1)),
        )

    def middle(w: int) -> nn.Module:
        row, column = (1, 7), (7, 1)
        return Concat(
            conv(768, 192, 1),
            c((768, w, 1), (w, w, row), (w, 192, column)),
            c((768, w, 1), (w, w, column), (w, w, row), (w, w, column), (w, 192, row)),
            nn.Sequential(pool(), conv(768, 192, 1)),
        )

    def high(cin: int) -> nn.Module:
        def both() -> nn.Module:
            return Concat(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))

        return Concat(
            conv(cin, 320, 1),
            nn.Sequential(conv(cin, 384, 1), both()),
            nn.Sequential(conv(cin, 448, 1), conv(448, 384), both()),
            nn.Sequential(pool(), conv(cin, 192, 1)),
        )

    layers = nn.Sequential(
        conv(3, 32, 3, 2, padding=0),
        conv(32, 32, 3, padding=0),
        conv(32, 64),
        nn.MaxPool2d(3, 2),
        conv(64, 80, 1),
        conv(80, 192, 3, padding=0),
        nn.MaxPool2d(3, 2),
        low(192, 32),
        low(256, 64),
        low(288, 64),
        Concat(
            conv(288, 384, 3, 2, padding=0),
            nn.Sequential(conv(288, 64, 1), conv(64, 96), conv(96, 96, 3, 2, padding=0)),
            nn.MaxPool2d(3, 2),
        ),
        middle(128),
        middle(160),
        middle(192),
        Concat(
            nn.Sequential(conv(768, 192, 1), conv(192, 320, 3, 2, padding=0)),
            nn.Sequential(
                conv(768, 192, 1),
                conv(192, 192, (1, 7)),
                conv(192, 192, (7, 1)),
                conv(192, 192, 3, 2, padding=0),
            ),
            nn.MaxPool2d(3, 2),
        ),
        high(1280),
        high(2048),
        head(2048, 1001),
    )
    return layers, image(1, 3, 299, 299)


def googlenet() -> Built:
    def inception(cin: int, a: int, b: tuple[int, int], c: tuple[int, int], pooled: int) -> nn.Module:
        return Concat(
            conv(cin, a, 1),
            nn.Sequential(conv(cin, b[0], 1), conv(b[0], b[1])),
            nn.Sequential(conv(cin, c[0], 1), conv(c[0], c[1], 5)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(cin, pooled, 1)),
        )

    layers = nn.Sequential(
        conv(3, 64, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        conv(64, 64, 1),
        conv(64, 192),
        nn.MaxPool2d(3, 2, 1),
        inception(192, 64, (96, 128), (16, 32), 32),
        inception(256, 128, (128, 192), (32, 96), 64),
        nn.MaxPool2d(3, 2, 1),
        inception(480, 192, (96, 208), (16, 48), 64),
        inception(512, 112, (144, 288), (32, 64), 64),
        inception(528, 256, (160, 320), (32, 128), 128),
        nn.MaxPool2d(3, 2, 1),
        inception(832, 384, (192, 384), (48, 128), 128),
        head(1024, 365),
    )
    return layers, image(2, 3, 192, 192)


def mobilenetv1() -> Built:
    layers: list[nn.Module] = [conv(3, 24, 3, 2)]
    cin = 24
    for cout, stride in (
        (48, 1),
        (96, 2),
        (96, 1),
        (192, 2),
        (192, 1),
        (384, 2),
        (384, 1),
        (768, 2),
        (768, 1),
    ):
        layers += [conv(cin, cin, 3, stride, groups=cin), conv(cin, cout, 1)]
        cin = cout
    return nn.Sequential(*layers, head(768, 1001)), image(4, 3, 192, 192)


def mobile(
    stem: int, blocks: tuple[tuple, ...], last: int, classes: int, stem_act: str, shape: tuple[int, ...]
) -> Built:
    """Stem, inverted residuals (their arguments without the input channels), 1x1 convolution, classifier."""
    layers: list[nn.Module] = [conv(3, stem, 3, 2, stem_act)]
    cin = stem
    for hidden, cout, *rest in blocks:
        layers.append(InvertedResidual(cin, hidden, cout, *rest))
        cin = cout
    return nn.Sequential(*layers, conv(cin, last, 1, a=stem_act), head(last, classes)), image(*shape)


def mobilenetv3(batch: int) -> Built:
    hs, gate = "hardswish", "hardsigmoid"
    blocks = (
        (16, 16, 3, 1, "relu"),
        (64, 24, 3, 2, "relu"),
        (72, 24, 3, 1, "relu"),
        (72, 40, 5, 2, "relu", 24, gate),
        (120, 40, 5, 1, "relu", 32, gate),
        (240, 80, 3, 2, hs),
        (200, 80, 3, 1, hs),
        (480, 112, 3, 1, hs, 120, gate),
        (672, 112, 3, 1, hs, 168, gate),
        (672, 160, 5, 2, hs, 168, gate),
        (960, 160, 5, 1, hs, 240, gate),
    )
    return mobile(16, blocks, 960, 1000, hs, (batch, 3, 256, 256))


def efficientnet(width: tuple[int, ...], last: int, size: int) -> Built:
    """EfficientNet with its eight channel counts (stem and seven stages)."""
    layers: list[tuple] = []
    cin = width[0]
    for i, (cout, k, stride) in enumerate(
        zip(width[1:], (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1), strict=True)
    ):
        for s in (stride, 1):
            hidden = cin * (1 if i == 0 else 6)
            layers.append((hidden, cout, k, s, "silu", max(1, cin // 4)))
            cin = cout
    return mobile(width[0], tuple(layers), last, 1000, "silu", (1, 3, size, size))


def mnasnet() -> Built:
    blocks = (
        (32, 16, 3, 1, "relu"),
        (48, 24, 3, 2, "relu"),
        (72, 24, 3, 1, "relu"),
        (72, 40, 5, 2, "relu", 18),
        (120, 40, 5, 1, "relu", 30),
        (240, 80, 5, 2, "relu"),
        (480, 80, 5, 1, "relu"),
        (480, 96, 3, 1, "relu"),
        (576, 192, 5, 2, "relu", 48),
        (1152, 320, 3, 1, "relu"),
    )
    return mobile(32, blocks, 1280, 1000, "relu", (4, 3, 128, 128))


class Ghost(nn.Module):
    def __init__(self, cin: int, cout: int, a: str | None) -> None:
        super().__init__()
        self.primary = conv(cin, cout // 2, 1, a=a)
        self.cheap = conv(cout // 2, cout // 2, 3, a=a, groups=cout // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.primary(x)
        return torch.cat([y, self.cheap(y)], 1)


def ghostnet() -> Built:
    layers: list[nn.Module] = [conv(3, 16, 3, 2)]
    cin = 16
    for k, hidden, cout, squeezed, stride in (
        (3, 48, 24, 0, 2),
        (3, 72, 24, 0, 1),
        (5, 72, 40, 20, 2),
        (5, 120, 40, 32, 1),
        (3, 240, 80, 0, 2),
        (3, 184, 80, 0, 1),
        (3, 480, 112, 120, 1),
        (5, 672, 160, 168, 2),
    ):
        layers.append(Ghost(cin, hidden, "relu"))
        if stride > 1:
            layers.append(conv(hidden, hidden, k, stride, None, groups=hidden))
        if squeezed:
            layers.append(SqueezeExcite(hidden, squeezed, gate="hardsigmoid"))
        layers.append(Ghost(hidden, cout, None))
        cin = cout
    return nn.Sequential(*layers, conv(160, 960, 1), head(960, 1000)), image(2, 3, 160, 160)


class Pyramid(nn.Module):
    """Encoder and decoder with skips; `up` makes the step from the deeper level to the next."""

    def __init__(self, widths: tuple[int, ...], out: int, norm: str | None, transposed: bool) -> None:
        super().__init__()
        ins = (3, *widths)
        self.down = nn.ModuleList(
            nn.Sequential(conv(a, b, norm=norm), conv(b, b, norm=norm))
            for a, b in zip(ins, widths, strict=False)
        )
        self.up = nn.ModuleList()
        self.merge = nn.ModuleList()
        for low, high in pairwise(widths):
            self.up.append(
                nn.ConvTranspose2d(high, low, 2, 2)
                if transposed
                else nn.Sequential(nn.Upsample(scale_factor=2), conv(high, low, norm=norm))
            )
            self.merge.append(conv(2 * low, low, norm=norm))
        self.out = nn.Conv2d(widths[0], out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for i, level in enumerate(self.down):
            x = level(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        for i in reversed(range(len(self.up))):
            x = self.merge[i](torch.cat([skips[i], self.up[i](x)], 1))
        return self.out(x)


def unet() -> Built:
    net = Pyramid((32, 64, 128, 256, 512), 21, "bn", True)
    return nn.Sequential(net, nn.Softmax(1)), image(1, 3, 160, 240)


def unet_argmax() -> Built:
    net = Pyramid((24, 40, 80, 176), 19, "gn", False)
    return nn.Sequential(net, Fn(lambda y: y.argmax(1))), image(2, 3, 96, 96)


def yolo_tiny() -> Built:
    layers: list[nn.Module] = []
    cin = 3
    for i, cout in enumerate((16, 32, 64, 128, 256, 512)):
        layers.append(conv(cin, cout, a="leaky"))
        layers.append(
            nn.MaxPool2d(2) if i < 5 else nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(2, 1))
        )
        cin = cout
    layers += [conv(512, 1024, a="leaky"), conv(1024, 256, 1, a="leaky"), conv(256, 512, a="leaky")]
    layers += [conv(512, 255, 1, a=None, norm=None)]
    return nn.Sequential(*layers), image(1, 3, 416, 416)


class Csp(nn.Module):
    def __init__(self, cin: int, cout: int) -> None:
        super().__init__()
        half = cout // 2
        self.a, self.b = conv(cin, half, 1, a="silu"), conv(cin, half, 1, a="silu")
        self.body = Residual(nn.Sequential(conv(half, half, 1, a="silu"), conv(half, half, 3, a="silu")))
        self.out = conv(cout, cout, 1, a="silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.body(self.a(x)), self.b(x)], 1))


class Sppf(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = conv(channels, channels // 2, 1, a="silu")
        self.out = conv(2 * channels, channels, 1, a="silu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        xs = [self.squeeze(x)]
        for _ in range(3):
            xs.append(F.max_pool2d(xs[-1], 5, 1, 2))
        return self.out(torch.cat(xs, 1))


def yolov5n(batch: int, size: int) -> Built:
    layers: list[nn.Module] = [conv(3, 16, 6, 2, "silu", padding=2)]
    for cin in (16, 32, 64, 128):
        layers += [conv(cin, 2 * cin, 3, 2, "silu"), Csp(2 * cin, 2 * cin)]
    layers += [Sppf(256), conv(256, 128, 1, a="silu"), nn.Upsample(scale_factor=2), Csp(128, 128)]
    layers += [conv(128, 255, 1, a="sigmoid", norm=None)]
    return nn.Sequential(*layers), image(batch, 3, size, size)


def regnety() -> Built:
    widths, group = (48, 104, 208, 440), 8

    def block(cin: int, cout: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            conv(cin, cout, 1),
            conv(cout, cout, 3, stride, groups=cout // group),
            SqueezeExcite(cout, cin // 4),
            conv(cout, cout, 1, a=None),
        )
        return Residual(
            body, "relu", None if cin == cout and stride == 1 else conv(cin, cout, 1, stride, None)
        )

    layers: list[nn.Module] = [conv(3, 32, 3, 2)]
    cin = 32
    for width in widths:
        layers += [block(cin, width, 2), block(width, width, 1)]
        cin = width
    return nn.Sequential(*layers, head(440, 1000)), image(1, 3, 224, 224)


def resnext() -> Built:
    def block(cin: int, inside: int, cout: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            conv(cin, inside, 1), conv(inside, inside, 3, stride, groups=32), conv(inside, cout, 1, a=None)
        )
        return Residual(body, "relu", None if cin == cout else conv(cin, cout, 1, stride, None))

    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    cin = 64
    for i, inside in enumerate((128, 256, 512, 1024)):
        layers += [block(cin, inside, 2 * inside, 2 if i else 1), block(2 * inside, inside, 2 * inside, 1)]
        cin = 2 * inside
    return nn.Sequential(*layers, head(2048, 200)), image(1, 3, 160, 160)


def wide_resnet(batch: int) -> Built:
    def block(cin: int, cout: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            nn.BatchNorm2d(cin), nn.ReLU(), conv(cin, cout, 3, stride), conv(cout, cout, a=None, norm=None)
        )
        same = cin == cout and stride == 1
        return Residual(body, None, None if same else nn.Conv2d(cin, cout, 1, stride, bias=False))

    layers: list[nn.Module] = [conv(3, 16, norm=None, a=None)]
    cin = 16
    for i, cout in enumerate((80, 160, 320)):
        layers += [block(cin, cout, 2 if i else 1), block(cout, cout, 1)]
        cin = cout
    return nn.Sequential(*layers, nn.BatchNorm2d(320), nn.ReLU(), head(320, 100)), image(batch, 3, 32, 32)


class ConvNextBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(dim, dim, 7, 1, 3, groups=dim)
        self.body = nn.Sequential(nn.LayerNorm(dim), mlp(dim, 4 * dim, dim, a="gelu"))
        self.scale = nn.Parameter(torch.full((dim,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self.depthwise(x).permute(0, 2, 3, 1)) * self.scale
        return x + y.permute(0, 3, 1, 2)


def convnext() -> Built:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96), ConvNextBlock(96)]
    for dim in (96, 192, 384):
        layers += [ChannelNorm(dim), nn.Conv2d(dim, 2 * dim, 2, 2), ConvNextBlock(2 * dim)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(768, 1000)), image(
        1, 3, 224, 224
    )


def dcgan(batch: int) -> Built:
    layers: list[nn.Module] = [
        nn.ConvTranspose2d(100, 512, 4, 1, 0, bias=False),
        nn.BatchNorm2d(512),
        nn.ReLU(),
    ]
    for width in (512, 256, 128):
        layers += [
            nn.ConvTranspose2d(width, width // 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
        ]
    layers += [nn.ConvTranspose2d(64, 3, 4, 2, 1), nn.Tanh()]
    return nn.Sequential(*layers), image(batch, 100, 1, 1)


def discriminator() -> Built:
    layers: list[nn.Module] = [conv(3, 64, 4, 2, "leaky", padding=1, norm=None)]
    for width in (64, 128, 256):
        layers.append(conv(width, 2 * width, 4, 2 if width < 256 else 1, "leaky", padding=1, norm="in"))
    return nn.Sequential(*layers, conv(512, 1, 4, 1, None, padding=1, norm=None)), image(1, 3, 128, 128)


def c3d() -> Built:
    layers: list[nn.Module] = []
    cin = 3
    for i, cout in enumerate((32, 64, 96, 192)):
        layers += [conv(cin, cout, dims=3, norm=None), nn.MaxPool3d((1, 2, 2) if i == 0 else 2)]
        cin = cout
    layers += [nn.Flatten(), mlp(192 * 1 * 5 * 5, 1024, 101)]
    return nn.Sequential(*layers), image(1, 3, 8, 80, 80)


def r2plus1d() -> Built:
    def factored(cin: int, inside: int, cout: int, stride: int) -> nn.Module:
        return nn.Sequential(
            conv(cin, inside, (1, 3, 3), (1, stride, stride), dims=3),
            conv(inside, cout, (3, 1, 1), (stride, 1, 1), dims=3),
        )

    layers = nn.Sequential(
        conv(3, 45, (1, 7, 7), (1, 2, 2), dims=3),
        conv(45, 48, (3, 1, 1), dims=3),
        Residual(factored(48, 108, 48, 1), "relu"),
        factored(48, 128, 96, 2),
        Residual(factored(96, 216, 96, 1), "relu"),
        factored(96, 256, 192, 2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(192, 400),
    )
    return layers, image(1, 3, 8, 88, 88)


def slowfast() -> Built:
    """The fast path of SlowFast, thin and long, with 5x1x1 kernels."""

    def bottleneck(cin: int, inside: int, cout: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            conv(cin, inside, (3, 1, 1), dims=3),
            conv(inside, inside, (1, 3, 3), (1, stride, stride), dims=3),
            conv(inside, cout, 1, a=None, dims=3),
        )
        return Residual(body, "relu", conv(cin, cout, 1, (1, stride, stride), None, dims=3))

    layers = nn.Sequential(
        conv(3, 8, (5, 7, 7), (1, 2, 2), dims=3),
        nn.MaxPool3d((1, 3, 3), (1, 2, 2), (0, 1, 1)),
        bottleneck(8, 8, 32, 1),
        bottleneck(32, 16, 64, 2),
        bottleneck(64, 32, 128, 2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
    )
    return layers, image(1, 3, 16, 96, 96)


def unet3d() -> Built:
    """The volume segmenter's levels: group norm, 1x1x1 head, softmax over the classes."""
    layers = nn.Sequential(
        conv(1, 16, dims=3, norm="gn"),
        conv(16, 32, dims=3, norm="gn"),
        nn.MaxPool3d(2),
        conv(32, 64, dims=3, norm="gn"),
        nn.AvgPool3d(2),
        conv(64, 64, dims=3, norm="gn", a="elu"),
        conv(64, 4, 1, a=None, norm=None, dims=3),
        nn.Softmax(1),
    )
    return layers, image(1, 1, 24, 40, 40)


class DeepLab(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Sequential(
            conv(3, 32, 3, 2), conv(32, 64), conv(64, 128, 3, 2), conv(128, 128, 3, groups=128)
        )
        self.deep = nn.Sequential(
            conv(128, 256, 3, 2), conv(256, 256, dilation=2), conv(256, 320, dilation=4)
        )
        self.aspp = Concat(conv(320, 128, 1), *(conv(320, 128, dilation=rate) for rate in (6, 12, 18)))
        self.project = conv(512, 128, 1)
        self.out = nn.Sequential(conv(256, 128, 3), nn.Conv2d(128, 21, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x)
        deep = self.project(self.aspp(self.deep(low)))
        deep = F.interpolate(deep, size=low.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(torch.cat([low, deep], 1)).softmax(1)


def deeplab() -> Built:
    return DeepLab(), image(1, 3, 257, 257)


def espcn() -> Built:
    layers = nn.Sequential(
        conv(1, 64, 5, a="tanh", norm=None),
        conv(64, 32, a="tanh", norm=None),
        conv(32, 9, a=None, norm=None),
        nn.PixelShuffle(3),
    )
    return layers, image(1, 1, 120, 160)


def srcnn() -> Built:
    layers = nn.Sequential(
        conv(3, 64, 9, norm=None), conv(64, 32, 1, norm=None), conv(32, 3, 5, a=None, norm=None)
    )
    return layers, image(1, 3, 150, 150)


def edsr() -> Built:
    block = Residual(nn.Sequential(conv(48, 48, norm=None), conv(48, 48, a=None, norm=None)))
    layers = nn.Sequential(
        conv(3, 48, a=None, norm=None),
        block,
        conv(48, 192, a=None, norm=None),
        nn.PixelShuffle(2),
        conv(48, 3, norm=None),
    )
    return layers, image(4, 3, 72, 96)


def fsrcnn() -> Built:
    layers = nn.Sequential(
        conv(1, 56, 5, norm=None),
        conv(56, 12, 1, norm=None),
        conv(12, 12, norm=None),
        conv(12, 56, 1, norm=None),
        nn.ConvTranspose2d(56, 1, 9, 2, 4, 1),
    )
    return layers, image(2, 1, 90, 120)


def style() -> Built:
    """Fast style transfer: 9x9 ends, instance norm, upsampling."""
    layers = nn.Sequential(
        conv(3, 32, 9, norm="in"),
        conv(32, 64, 3, 2, norm="in"),
        conv(64, 128, 3, 2, norm="in"),
        Residual(nn.Sequential(conv(128, 128, norm="in"), conv(128, 128, a=None, norm="in"))),
        nn.Upsample(scale_factor=2),
        conv(128, 64, norm="in"),
        nn.Upsample(scale_factor=2),
        conv(64, 32, norm="in"),
        conv(32, 3, 9, a="sigmoid", norm=None),
    )
    return layers, image(1, 3, 128, 128)


def crnn() -> Built:
    """Text recogniser: pooling along the height only, then a wide vocabulary per column."""
    layers = nn.Sequential(
        conv(1, 64, norm=None),
        nn.MaxPool2d(2),
        conv(64, 128, norm=None),
        nn.MaxPool2d(2),
        conv(128, 256),
        nn.MaxPool2d((2, 1)),
        conv(256, 384),
        nn.MaxPool2d((2, 1)),
        conv(384, 384, 2, padding=0),
        Fn(lambda x: x.squeeze(2).transpose(1, 2)),
        nn.Linear(384, 96),
        nn.Linear(96, 6625),
        nn.Softmax(-1),
    )
    return layers, image(1, 1, 32, 100)


def blazeface() -> Built:
    def blaze(cin: int, cout: int, stride: int) -> nn.Module:
        body = nn.Sequential(
            conv(cin, cin, 5, stride, None, groups=cin, norm=None), conv(cin, cout, 1, a=None, norm=None)
        )
        if cin == cout and stride == 1:
            return Residual(body, "relu")
        return nn.Sequential(body, nn.ReLU())

    layers = nn.Sequential(
        conv(3, 24, 5, 2, norm=None),
        blaze(24, 24, 1),
        blaze(24, 48, 2),
        blaze(48, 48, 1),
        blaze(48, 88, 2),
        blaze(88, 96, 2),
        blaze(96, 96, 1),
        Gather(nn.Conv2d(96, 6, 1), nn.Conv2d(96, 96, 1)),
    )
    return layers, image(1, 3, 128, 128)


def dqn(batch: int) -> Built:
    layers = nn.Sequential(
        conv(4, 32, 8, 4, padding=0, norm=None),
        conv(32, 64, 4, 2, padding=0, norm=None),
        conv(64, 64, 3, 1, padding=0, norm=None),
        nn.Flatten(),
        mlp(3136, 512, 18),
        Fn(lambda q: q.argmax(-1)),
    )
    return layers, image(batch, 4, 84, 84)


class Mixer(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.tokens = mlp(tokens, dim // 2, tokens, a="gelu")
        self.channels = mlp(dim, 4 * dim, dim, a="gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


def mixer() -> Built:
    layers = nn.Sequential(
        nn.Conv2d(3, 512, 16, 16),
        Fn(lambda x: x.flatten(2).transpose(1, 2)),
        Mixer(196, 512),
        nn.LayerNorm(512),
        Fn(lambda x: x.mean(1)),
        nn.Linear(512, 1000),
    )
    return layers, image(1, 3, 224, 224)


class DiffusionBlock(nn.Module):
    """Latent diffusion: group norm, silu, time embedding, cross-attention to 77 tokens of text."""

    def __init__(self, cin: int, dim: int, stride: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.GroupNorm(8, cin), nn.SiLU(), nn.Conv2d(cin, dim, 3, 1, 1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(512, dim))
        self.leave = nn.Sequential(nn.GroupNorm(8, dim), nn.SiLU(), nn.Conv2d(dim, dim, 3, 1, 1))
        self.norm = nn.LayerNorm(dim)
        self.cross = Attention(dim, 8, 512)
        self.down = nn.Conv2d(dim, dim, 3, stride, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.leave(self.enter(x) + self.time(time)[:, :, None, None])
        b, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.cross(self.norm(tokens), text)
        return self.down(tokens.transpose(1, 2).reshape(b, c, h, w))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(128, 512), nn.SiLU(), nn.Linear(512, 512))
        self.stem = nn.Conv2d(4, 128, 3, 1, 1)
        self.blocks = nn.ModuleList((DiffusionBlock(128, 128, 2), DiffusionBlock(128, 256, 2)))
        self.out = nn.Sequential(nn.GroupNorm(8, 256), nn.SiLU(), nn.Conv2d(256, 4, 3, 1, 1))

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        time = self.time(time)
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, time, text)
        return self.out(x)


def diffusion() -> Built:
    return Diffusion(), (torch.randn(1, 4, 32, 32), torch.randn(1, 128), torch.randn(1, 77, 512))


def vae_decoder() -> Built:
    def block(channels: int) -> nn.Module:
        return Residual(
            nn.Sequential(
                nn.GroupNorm(32, channels),
                nn.SiLU(),
                nn.Conv2d(channels, channels, 3, 1, 1),
                nn.GroupNorm(32, channels),
                nn.SiLU(),
                nn.Conv2d(channels, channels, 3, 1, 1),
            )
        )

    layers = nn.Sequential(
        nn.Conv2d(4, 256, 3, 1, 1),
        block(256),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(256, 128, 3, 1, 1),
        block(128),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(128, 64, 3, 1, 1),
        block(64),
        nn.GroupNorm(32, 64),
        nn.SiLU(),
        nn.Conv2d(64, 3, 3, 1, 1),
    )
    return layers, image(1, 4, 28, 28)


class BiFpn(nn.Module):
    """Weighted sums of feature maps, depthwise separable convolutions, two prediction heads."""

    def __init__(self, channels: int = 64) -> None:
        super().__init__()
        self.mix = nn.ModuleList(
            nn.Sequential(
                *act("silu"),
                conv(channels, channels, a=None, groups=channels),
                conv(channels, channels, 1, a=None),
            )
            for _ in range(3)
        )
        self.classes = conv(channels, 810, 1, a="sigmoid", norm=None)
        self.boxes = conv(channels, 36, 3, a=None, norm=None)

    def forward(self, p3: torch.Tensor, p4: torch.Tensor, p5: torch.Tensor) -> tuple[torch.Tensor, ...]:
        top = self.mix[0](0.6 * p4 + 0.4 * F.interpolate(p5, scale_factor=2.0))
        out = self.mix[1](0.5 * p3 + 0.5 * F.interpolate(top, scale_factor=2.0))
        back = self.mix[2](0.3 * p4 + 0.3 * top + 0.4 * F.max_pool2d(out, 3, 2, 1))
        return self.classes(out), self.boxes(out), self.classes(back)


def bifpn() -> Built:
    return BiFpn(), (torch.randn(1, 64, 64, 64), torch.randn(1, 64, 32, 32), torch.randn(1, 64, 16, 16))


class Hourglass(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        half = width // 2

        def bottleneck() -> nn.Module:
            return Residual(
                nn.Sequential(conv(width, half, 1), conv(half, half), conv(half, width, 1, a=None)), "relu"
            )

        self.skip, self.enter, self.leave = bottleneck(), bottleneck(), bottleneck()
        self.inner = Hourglass(depth - 1, width) if depth > 1 else bottleneck()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.leave(self.inner(self.enter(F.max_pool2d(x, 2))))
        return self.skip(x) + F.interpolate(y, scale_factor=2.0)


def hourglass() -> Built:
    layers = nn.Sequential(
        conv(3, 48, 7, 2),
        conv(48, 136, 1),
        nn.MaxPool2d(2),
        Hourglass(3, 136),
        conv(136, 17, 1, a=None, norm=None),
    )
    return layers, image(1, 3, 192, 160)


class MaxFeature(nn.Module):
    """Max over two halves of the channels (LightCNN)."""

    def __init__(self, cin: int, cout: int, k: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, 2 * cout, k, 1, k // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.conv(x).chunk(2, 1)
        return torch.maximum(a, b)


def lightcnn() -> Built:
    layers: list[nn.Module] = [MaxFeature(1, 48, 5), nn.MaxPool2d(2)]
    for cin, cout in ((48, 96), (96, 192), (192, 128)):
        layers += [MaxFeature(cin, cin, 1), MaxFeature(cin, cout, 3), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(128 * 7 * 7, 256), Fn(lambda x: x / x.norm(dim=-1, keepdim=True))]
    return nn.Sequential(*layers), image(2, 1, 112, 112)


def nin() -> Built:
    layers: list[nn.Module] = []
    cin = 3
    for cout, k in ((192, 5), (160, 1), (96, 1)):
        layers.append(conv(cin, cout, k, norm=None))
        cin = cout
    layers += [nn.MaxPool2d(3, 2, 1), conv(96, 192, 5, norm=None), conv(192, 192, 1, norm=None)]
    layers += [nn.AvgPool2d(3, 2, 1), conv(192, 192, 3, norm=None), conv(192, 10, 1, norm=None)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LogSoftmax(-1)), image(
        16, 3, 32, 32
    )


NETWORKS = (
    Network("vgg11", "vgg", lambda: vgg("11222", 1, 224, None, 1024)),
    Network("vgg16-bn@4", "vgg", lambda: vgg("22333", 4, 96, "bn", 512)),
    Network("alexnet@4", "alexnet", alexnet),
    Network("lenet@32", "lenet", lenet),
    Network("densenet121", "densenet", densenet121),
    Network("squeezenet", "squeezenet", squeezenet),
    Network("shufflenetv2", "shufflenet", lambda: shufflenetv2(1)),
    Network("shufflenetv2@8", "shufflenet", lambda: shufflenetv2(8)),
    Network("inceptionv3", "inception", inceptionv3),
    Network("googlenet@2", "googlenet", googlenet),
    Network("mobilenetv1@4", "mobilenetv1", mobilenetv1),
    Network("mobilenetv3", "mobilenetv3", lambda: mobilenetv3(1)),
    Network(
        "efficientnet-b0",
        "efficientnet",
        lambda: efficientnet((32, 16, 24, 40, 80, 112, 192, 320), 1280, 240),
    ),
    Network(
        "efficientnet-b2",
        "efficientnet",
        lambda: efficientnet((32, 16, 24, 48, 88, 120, 208, 352), 1408, 260),
    ),
    Network("mnasnet@4", "mnasnet", mnasnet),
    Network("ghostnet@2", "ghostnet", ghostnet),
    Network("unet", "unet", unet),
    Network("unet-gn@2", "unet", unet_argmax),
    Network("yolo-tiny", "darknet", yolo_tiny),
    Network("yolov5n", "yolov5", lambda: yolov5n(1, 320)),
    Network("yolov5n@4", "yolov5", lambda: yolov5n(4, 192)),
    Network("regnety", "regnet", regnety),
    Network("resnext", "resnext", resnext),
    Network("wide-resnet", "wide-resnet", lambda: wide_resnet(1)),
    Network("wide-resnet@8", "wide-resnet", lambda: wide_resnet(8)),
    Network("convnext", "convnext", convnext),
    Network("dcgan", "dcgan", lambda: dcgan(1)),
    Network("dcgan@8", "dcgan", lambda: dcgan(8)),
    Network("patchgan", "patchgan", discriminator),
    Network("c3d", "c3d", c3d),
    Network("r2plus1d", "r2plus1d", r2plus1d),
    Network("slowfast", "slowfast", slowfast),
    Network("unet3d", "unet3d", unet3d),
    Network("deeplab", "deeplab", deeplab),
    Network("espcn", "espcn", espcn),
    Network("srcnn", "srcnn", srcnn),
    Network("edsr@4", "edsr", edsr),
    Network("fsrcnn@2", "fsrcnn", fsrcnn),
    Network("style", "style", style),
    Network("crnn", "crnn", crnn),
    Network("blazeface", "blazeface", blazeface),
    Network("dqn", "dqn", lambda: dqn(1)),
    Network("dqn@32", "dqn", lambda: dqn(32)),
    Network("mixer", "mixer", mixer),
    Network("diffusion", "diffusion", diffusion),
    Network("vae-decoder", "vae", vae_decoder),
    Network("bifpn", "efficientdet", bifpn),
    Network("hourglass", "hourglass", hourglass),
    Network("lightcnn@2", "lightcnn", lightcnn),
    Network("nin@16", "nin", nin),
)
