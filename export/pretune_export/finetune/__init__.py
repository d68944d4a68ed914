"""Fine-tuning on one machine: weights of one's own, with evidence that they are better.

`loop.run` is ``pretune finetune``: `plan` chooses base weights and tasks, `measure` chooses schedules and
measures them, `pretune_export.train` trains, `judge` compares before and after, and `register` makes the
result usable.
"""

from .loop import run

__all__ = ["run"]
