"""Reading programs to tune: ONNX, torch.export, TVMScript, TVM JSON, and the same as Python objects."""

from __future__ import annotations

from pretune.intake.load import FORMATS, load_program
from pretune.intake.program import Program, TensorSpec, parse_shape_options
from pretune.intake.task import Task, make_task, select_tasks, tasks_of_relax

__all__ = [
    "FORMATS",
    "Program",
    "Task",
    "TensorSpec",
    "load_program",
    "make_task",
    "parse_shape_options",
    "select_tasks",
    "tasks_of_relax",
]
