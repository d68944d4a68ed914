"""Trajectories, which need no measurement: a program, the actions of a trace, real states along it."""

from .batches import Batch, Group, load_groups, make_batch, pad
from .files import Programs, Trajectories
from .generate import GenerateOptions, generate
from .replay import FINAL, Replayer, choose_steps

__all__ = [
    "FINAL",
    "Batch",
    "GenerateOptions",
    "Group",
    "Programs",
    "Replayer",
    "Trajectories",
    "choose_steps",
    "generate",
    "load_groups",
    "make_batch",
    "pad",
]
