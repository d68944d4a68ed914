"""All networks by name, and how they are divided."""

from __future__ import annotations

from types import MappingProxyType

from . import other, sequence, vision

NETWORKS = MappingProxyType(
    {network.name: network for network in (*vision.NETWORKS, *sequence.NETWORKS, *other.NETWORKS)}
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
