"""Measured candidates as training arrays."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm

from pretune.features import ActionEncoder, State
from pretune.features.program import Block, read_program
from pretune.features.state import encode_blocks
from pretune.space.packing import initial_program, prefix_length


@dataclass
class Group:
    """Measured candidates of one design space of one task on one machine.

    Attributes
    ----------
    task, machine, split : str
    types : numpy.ndarray
        int64 ``[T]``: kinds of the actions.
    actions : list of numpy.ndarray
        Per step float32 ``[n, features]`` or ``[1, features]``.
    summary : numpy.ndarray
        float32 ``[n, .]``.
    latency : numpy.ndarray
        float64 ``[n]`` seconds; infinite for a candidate that failed.
    decisions : list of numpy.ndarray
        Per sampling instruction int32 ``[n, width]``.
    insts : list of int
        Instruction index of every action, -1 for ``Postproc``.
    instructions : list
        The design space: instructions of its trace, as JSON.
    initial : State
        Of the program that the decisions start from.
    """

    task: str
    machine: str
    split: str
    space: int
    types: np.ndarray
    actions: list[np.ndarray]
    summary: np.ndarray
    latency: np.ndarray
    decisions: list[np.ndarray]
    insts: list[int]
    instructions: list[Any]
    initial: State
    states: dict[tuple[int, int], State] = field(default_factory=dict)


@dataclass
class TaskData:
    """A task on one machine: a group for each of its design spaces.

    Attributes
    ----------
    networks : tuple of str
        Networks that have the task.
    weights : tuple of int
        How often each of them calls it.
    mod : str
        The task's program, as `tvm.ir.save_json` writes it.
    """

    task: str
    split: str
    name: str
    networks: tuple[str, ...]
    weights: tuple[int, ...]
    mod: str
    groups: list[Group]


def group_candidates(
    task: dict[str, Any], spaces: list[list[Any]], rows: list[dict[str, Any]], machine: str, cores: int
) -> TaskData:
    """Encode all measured candidates of one task.

    Parameters
    ----------
    task : dict
        ``id``, ``name``, ``split``, ``networks``, ``weights``, ``mod``.
    spaces : list
        Instructions of each design space.
    rows : list of dict
        ``space``, ``decisions``, ``latencies``, ``ok``.
    """
    mod: Any = tvm.ir.load_json(task["mod"])
    programs: dict[str, tuple[list[Block], State]] = {}  # those that the design spaces start from
    by_space: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_space[row["space"]].append(row)
    groups = []
    for k, members in sorted(by_space.items()):
        first = prefix_length(spaces[k])
        made_by = json.dumps(spaces[k][:first])
        if made_by not in programs:
            blocks = read_program(initial_program(mod, spaces[k])["main"])
            programs[made_by] = blocks, encode_blocks(blocks, cores=cores)
        blocks, initial = programs[made_by]
        encoder = ActionEncoder(blocks, spaces[k], cores, first)
        slots = len(members[0]["decisions"])
        decisions = [np.array([m["decisions"][s] for m in members], dtype=np.int32) for s in range(slots)]
        actions, summary = encoder.encode(decisions)
        latency = np.array([min(m["latencies"]) if m["ok"] else np.inf for m in members])
        groups.append(
            Group(
                task["id"],
                machine,
                task["split"],
                k,
                np.array([s.type_id for s in encoder.steps], dtype=np.int64),
                actions,
                summary,
                latency,
                decisions,
                [s.inst for s in encoder.steps],
                spaces[k],
                initial,
            )
        )
    return TaskData(
        task["id"],
        task["split"],
        task["name"],
        tuple(task["networks"]),
        tuple(task["weights"]),
        task["mod"],
        groups,
    )
