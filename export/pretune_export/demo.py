"""Train the network that ``pretune tune --demo`` tunes, and write it to ``sdk/pretune/demo/digits.onnx``.

Handwritten digits: the 1797 images of 8x8 that scikit-learn ships (UCI "Optical Recognition of Handwritten
Digits" by Alpaydin and Kaynak, CC BY 4.0), enlarged to 32x32. Run once, from the repository, in half
a minute on two cores (scikit-learn is needed only here)::

    pip install scikit-learn
    PYTHONPATH=sdk:export python -m pretune_export.demo
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F

OUTPUT = Path(__file__).parents[2] / "sdk" / "pretune" / "demo" / "digits.onnx"
SIZE = 32
LEAST_ACCURACY = 0.97


def conv_norm(cin: int, cout: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution and batch norm."""
    conv = nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(cout))


class Digits(nn.Module):
    """Stem, residual block, depthwise-separable block, average pool, linear layer.

    Takes images [n, 1, 32, 32] in 0..1 and returns logits [n, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(1, 24, 3)
        self.shortcut = conv_norm(24, 48, 1, stride=2)
        self.first = conv_norm(24, 48, 3, stride=2)
        self.second = conv_norm(48, 48, 3)
        self.depthwise = conv_norm(48, 48, 3, stride=2, groups=48)
        self.pointwise = conv_norm(48, 96, 1)
        self.head = nn.Linear(96, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(image))
        x = F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))
        x = F.relu(self.pointwise(F.relu(self.depthwise(x))))
        return self.head(x.mean((2, 3)))


class Classifier(nn.Module):
    """What is shipped: probabilities in the place of logits."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.body(image), dim=-1)


def load_digits(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images [n, 1, 32, 32] and labels [n] of the training part (three quarters) and of the test part."""
    from sklearn.datasets import load_digits as sklearn_digits

    data = sklearn_digits()
    images = torch.from_numpy(data.images.astype(np.float32))[:, None] / 16
    images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(data.target.astype(np.int64))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(labels)))
    test, train = order[: len(labels) // 4], order[len(labels) // 4 :]
    return images[train], labels[train], images[test], labels[test]


def train(epochs: int, seed: int) -> tuple[Digits, float]:
    """Train the network; returns it in evaluation mode, with its accuracy on the test part (0 to 1)."""
    torch.manual_seed(seed)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    images, labels, test_images, test_labels = load_digits(seed)
    network, batch = Digits(), 32
    steps = epochs * (len(labels) // batch)
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels))[: steps // epochs * batch].split(batch):
            # A few pixels to any side, as another hand would have put the digit.
            shift = [int(s) for s in torch.randint(-3, 4, (2,))]
            loss = F.cross_entropy(network(images[chosen].roll(shift, (2, 3))), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    network.eval()
    with torch.no_grad():
        accuracy = (network(test_images).argmax(1) == test_labels).float().mean().item()
    return network, accuracy


def export(network: Digits, path: Path) -> None:
    """Write the network for one image, weights inside the file, without traces of where it was made."""
    example = torch.zeros(1, 1, SIZE, SIZE)
    program = torch.onnx.export(
        Classifier(network).eval(),
        (example,),
        input_names=["image"],
        output_names=["probabilities"],
        opset_version=18,
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    assert program is not None
    model = program.model_proto
    for part in (model, model.graph, *model.graph.node, *model.graph.input, *model.graph.output):
        part.ClearField("doc_string")
        part.ClearField("metadata_props")
    for value in model.graph.value_info:
        value.ClearField("metadata_props")
    model.graph.name = "digits"
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(path))


def main() -> None:
    """Train, check the accuracy, write the file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=OUTPUT)
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    network, accuracy = train(args.epochs, args.seed)
    print(f"test accuracy {accuracy:.2%}")
    if accuracy < LEAST_ACCURACY:
        raise SystemExit(f"accuracy is below {LEAST_ACCURACY:.0%}; nothing written")
    export(network, args.out)
    print(f"{args.out}: {args.out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
