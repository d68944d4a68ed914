"""Design spaces: what MetaSchedule lets be decided for a task, as tables of options."""

from pretune.space.slots import Slot, factorisations
from pretune.space.space import Candidate, DesignSpace, TaskSpace
from pretune.space.trace import sampling_indices, serial, split_trace, trace_to_json

__all__ = [
    "Candidate",
    "DesignSpace",
    "Slot",
    "TaskSpace",
    "factorisations",
    "sampling_indices",
    "serial",
    "split_trace",
    "trace_to_json",
]
