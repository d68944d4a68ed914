"""Measured schedules on disk (parquet) and as training arrays.

A dataset folder under ``hub_cards/datasets/`` holds

``tasks.parquet``
    One row per task: id, network names and how often each calls it, split, name, shapes, program (TVM JSON).
``spaces.parquet``
    One row per task and design space: the instructions of its trace.
``measured-<machine>.parquet``
    One row per measured candidate: task, space, decisions, latencies, how it was chosen, calibration before
    and after its batch (empty if unknown), day. The file's metadata describes the machine.
``shards/<machine>-<time>-<random>/``
    What was added since: each a folder of these three files, complete in itself, with its own numbers of
    design spaces. It is written under another name and renamed, so any number of writers add shards at once
    and need no lock. `compact` moves them into the three files above.

Of a candidate that one machine measured more than once, the last counts: the last row of its last shard.
"""

from .candidates import Group, TaskData, group_candidates
from .first import FIRST_MACHINE, FIRST_TARGET, read_shared
from .read import Dataset, dataset_files, read_machines, read_parquet, read_tasks
from .write import compact, describe_machine, write_parquet

__all__ = [
    "FIRST_MACHINE",
    "FIRST_TARGET",
    "Dataset",
    "Group",
    "TaskData",
    "compact",
    "dataset_files",
    "describe_machine",
    "group_candidates",
    "read_machines",
    "read_parquet",
    "read_shared",
    "read_tasks",
    "write_parquet",
]
