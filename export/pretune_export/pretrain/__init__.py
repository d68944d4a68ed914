"""Pretrain encoder and transition on unmeasured trajectories.

The transition learns to predict, over many steps, the encoder's own latents of the real programs along a
trace. So that these latents are worth predicting, and do not collapse, the loop nest and MetaSchedule's
per-store features are decoded from them, real and predicted alike. No latency is needed: the ranker comes
later.
"""

from .config import PretrainConfig
from .figures import evaluate
from .loop import load_pretrained, load_shards, pretrain
from .model import Decoder, Pretrainer, build, losses, nest_targets

__all__ = [
    "Decoder",
    "PretrainConfig",
    "Pretrainer",
    "build",
    "evaluate",
    "load_pretrained",
    "load_shards",
    "losses",
    "nest_targets",
    "pretrain",
]
