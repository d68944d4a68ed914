"""Trajectories, which need no measurement: a program, the actions of a trace, real states along it."""

from .files import Programs, Trajectories
from .generate import GenerateOptions, generate
from .replay import FINAL, Replayer, choose_steps

__all__ = [
    "FINAL",
    "GenerateOptions",
    "Programs",
    "Replayer",
    "Trajectories",
    "choose_steps",
    "generate",
]
