"""Reading programs to tune: ONNX, torch.export, TVMScript, TVM JSON, and the same as Python objects."""

from __future__ import annotations

from pretune.intake.program import Program, TensorSpec, parse_shape_options, program_from_exported
from pretune.intake.task import Task, select_tasks, tasks_of_relax

__all__ = [
    "Program",
    "Task",
    "TensorSpec",
    "parse_shape_options",
    "program_from_exported",
    "select_tasks",
    "tasks_of_relax",
]
