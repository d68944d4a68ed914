"""All networks by name, and how they are divided."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from . import other, sequence, vision

_FLOAT32 = {network.name: network for network in (*vision.NETWORKS, *sequence.NETWORKS, *other.NETWORKS)}

# Small networks of many kinds of work. Variants have the family of their network, so the same split.
_LOW_PRECISION = {
    "float16": (
        "squeezenet",
        "mobilenetv3",
        "convnext",
        "dcgan",
        "vit-tiny-patch8",
        "electra",
        "qwen2-decode",
        "whisper",
        "tcn@8",
        "lstm@4",
        "dlrm@128",
        "gat",
    ),
    "bfloat16": (
        "mobilenetv1@4",
        "qwen2-decode",
        "smollm-decode",
        "lstm@4",
        "deepfm@96",
        "autoencoder@64",
    ),
    "int8": (
        "mobilenetv1@4",
        "mobilenetv3",
        "shufflenetv2",
        "squeezenet",
        "tcn@8",
        "electra",
        "whisper",
        "gru@16",
        "dlrm@128",
        "lenet@32",
    ),
}

NETWORKS = MappingProxyType(
    _FLOAT32
    | {
        f"{name}:{dtype}": replace(_FLOAT32[name], name=f"{name}:{dtype}", dtype=dtype)
        for dtype, names in _LOW_PRECISION.items()
        for name in names
    }
)
"""Every network of the corpus by its name."""

# About 15 % of the networks, one or two of each kind of work: mobile and branching convolutions (the two that
# the first data set held out as well), detection, super-resolution, video, transformers of odd lengths,
# speech, point clouds, recommendation.
VALIDATION_FAMILIES = frozenset(
    {
        "mobilenetv3",
        "inception",
        "yolov5",
        "espcn",
        "slowfast",
        "clip",
        "whisper",
        "segformer",
        "pointnet",
        "dlrm",
        "smollm",
    }
)
"""Families that are kept for validation; all others are for training."""

SPLITS = MappingProxyType(
    {
        name: "validation" if network.family in VALIDATION_FAMILIES else "train"
        for name, network in NETWORKS.items()
    }
)
"""``"train"`` or ``"validation"`` by network name. The test networks are the suite's and never here."""
