"""The world model: encoder, transition and ranker under ONNX Runtime, and the weights they come from."""

from pretune.model.scorer import SpaceScorer, TaskScorer
from pretune.model.trace_scorer import TraceScorer
from pretune.model.weights import Weights, load_weights
from pretune.model.world_model import WorldModel

__all__ = [
    "SpaceScorer",
    "TaskScorer",
    "TraceScorer",
    "Weights",
    "WorldModel",
    "load_weights",
]
