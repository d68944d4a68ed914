"""Measured schedules on disk (parquet) and as training arrays.

A dataset folder under ``hub_cards/datasets/`` holds

``tasks.parquet``
    One row per task: id, network names, split, name, shapes, program (TVM JSON).
``spaces.parquet``
    One row per task and design space: the instructions of its trace.
``measured-<machine>.parquet``
    One row per measured candidate: task, space, decisions, latencies, how it was chosen, calibration, day.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tvm

from pretune.features import ActionEncoder, State, encode_state
from pretune.features.program import read_program
from pretune.hardware import Hardware


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
    """

    task: str
    machine: str
    split: str
    space: int
    types: np.ndarray
    actions: list[np.ndarray]
    summary: np.ndarray
    latency: np.ndarray
    policy: np.ndarray
    decisions: list[np.ndarray]
    insts: list[int]
    states: dict[tuple[int, int], State] = field(default_factory=dict)


@dataclass
class TaskData:
    """A task with its initial state and its groups, one per machine and design space."""

    task: str
    split: str
    name: str
    networks: tuple[str, ...]
    initial: State
    groups: list[Group]


def group_candidates(
    task: dict[str, Any], spaces: list[list[Any]], rows: list[dict[str, Any]], machine: str, cores: int
) -> TaskData:
    """Encode all measured candidates of one task.

    Parameters
    ----------
    task : dict
        ``id``, ``name``, ``split``, ``networks``, ``mod``.
    spaces : list
        Instructions of each design space.
    rows : list of dict
        ``space``, ``decisions``, ``latencies``, ``ok``, ``policy``.
    """
    func = tvm.ir.load_json(task["mod"])["main"]
    blocks = read_program(func)
    by_space: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_space[row["space"]].append(row)
    groups = []
    for k, members in sorted(by_space.items()):
        encoder = ActionEncoder(blocks, spaces[k], cores)
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
                np.array([m["policy"] for m in members]),
                decisions,
                [s.inst for s in encoder.steps],
            )
        )
    state = encode_state(func, cores=cores)
    return TaskData(task["id"], task["split"], task["name"], tuple(task.get("networks", ())), state, groups)


def write_parquet(
    folder: Path, tasks: list[dict], spaces: dict[str, list], rows: list[dict], machine: dict
) -> None:
    """Write a dataset folder from collected lines (see `collect.Collector`)."""
    folder.mkdir(parents=True, exist_ok=True)
    used = {row["task"] for row in rows}
    kept = [t for t in tasks if t["id"] in used]
    _write(
        folder / "tasks.parquet",
        {
            "task": [t["id"] for t in kept],
            "networks": [list(t["networks"]) for t in kept],
            "split": [t["split"] for t in kept],
            "name": [t["name"] for t in kept],
            "shapes": [json.dumps(t["shapes"]) for t in kept],
            "flops": [float(t.get("flops", 0)) for t in kept],
            "mod": [t["mod"] for t in kept],
        },
    )
    pairs = [
        (task, k, insts) for task, all_ in spaces.items() if task in used for k, insts in enumerate(all_)
    ]
    _write(
        folder / "spaces.parquet",
        {
            "task": [p[0] for p in pairs],
            "space": pa.array([p[1] for p in pairs], pa.int16()),
            "instructions": [json.dumps(p[2], separators=(",", ":")) for p in pairs],
        },
    )
    _write(
        folder / f"measured-{machine['name']}.parquet",
        {
            "task": [r["task"] for r in rows],
            "space": pa.array([r["space"] for r in rows], pa.int16()),
            "decisions": pa.array(
                [[v for d in r["decisions"] for v in d] for r in rows], pa.list_(pa.int32())
            ),
            "widths": pa.array([[len(d) for d in r["decisions"]] for r in rows], pa.list_(pa.int8())),
            "ok": [bool(r["ok"]) for r in rows],
            "latencies": pa.array([[float(x) for x in r["latencies"]] for r in rows], pa.list_(pa.float32())),
            "error_kind": [r.get("error_kind", "") for r in rows],
            "policy": [r["policy"] for r in rows],
            "calibration": pa.array(
                [[float(x) for x in r["calibration"]] for r in rows], pa.list_(pa.float32())
            ),
            "time": [r["time"] for r in rows],
        },
        {k: str(v) for k, v in machine.items()},
    )


def _write(path: Path, columns: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    table = pa.table(columns)
    if metadata:
        table = table.replace_schema_metadata({f"pretune.{k}": v for k, v in metadata.items()})
    pq.write_table(table, path, compression="zstd", compression_level=12)


def read_parquet(
    folder: Path,
) -> tuple[dict[str, dict], dict[str, list], dict[str, list[dict]], dict[str, dict]]:
    """Read a dataset folder: tasks and spaces by task id, rows and descriptions by machine name."""
    tasks = {}
    for t in pq.read_table(folder / "tasks.parquet").to_pylist():
        tasks[t["task"]] = {**t, "id": t["task"]}
    spaces: dict[str, list] = defaultdict(list)
    for s in sorted(
        pq.read_table(folder / "spaces.parquet").to_pylist(), key=lambda s: (s["task"], s["space"])
    ):
        spaces[s["task"]].append(json.loads(s["instructions"]))
    rows, machines = {}, {}
    for file in sorted(folder.glob("measured-*.parquet")):
        table = pq.read_table(file)
        name = file.stem.removeprefix("measured-")
        meta = {k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()}
        machines[name] = {k.removeprefix("pretune."): v for k, v in meta.items() if k.startswith("pretune.")}
        rows[name] = [_unflatten(r) for r in table.to_pylist()]
    return tasks, dict(spaces), rows, machines


def _unflatten(row: dict[str, Any]) -> dict[str, Any]:
    values, out = row["decisions"], []
    for width in row.pop("widths"):
        out.append(values[:width])
        values = values[width:]
    return {**row, "decisions": out}


FIRST_TARGET = {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}
"""Target of the first measurements, by their README."""

FIRST_MACHINE = Hardware(
    vendor="amd", model_name="AMD EPYC, family 25 model 17", microarch="znver4", arch="x86_64",
    isa=("avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512vnni", "fma"),
    isa_level="x86-64-v4", vector_bits=512, cores=2, l1d_bytes=32 << 10, l2_bytes=1 << 20, l3_bytes=32 << 20,
    clock_ghz=2.6, memory_bytes=24 << 30,
)  # fmt: skip
"""The machine of the first measurements, by their README, with Zen 4's caches; its clock is a guess."""


FIRST_VALIDATION = ("mbv3", "inception")
"""Their families that the corpus keeps for validation."""


def read_shared(folder: Path) -> tuple[list[dict], dict[str, list], list[dict]]:
    """Read the first measurements (``tasks.jsonl.gz``, ``measurements.jsonl.gz``) into our rows.

    Their traces carry instructions and decisions together; design spaces are told apart by instructions.
    """

    def lines(name: str) -> list[dict]:
        with gzip.open(folder / name, "rt") as file:
            return [json.loads(line) for line in file]

    tasks = []
    for t in lines("tasks.jsonl.gz"):
        split = "validation" if t["net"] in FIRST_VALIDATION else "train"
        tasks.append({**t, "split": split, "networks": [t["net"]], "flops": 0.0})
    known = {t["id"] for t in tasks}
    spaces: dict[str, list] = defaultdict(list)
    keys: dict[str, dict[str, int]] = defaultdict(dict)
    rows = []
    for m in lines("measurements.jsonl.gz"):
        if m["task"] not in known or not m.get("trace"):
            continue
        insts, decisions = m["trace"]
        end = next((i for i, inst in enumerate(insts) if inst[0] == "EnterPostproc"), len(insts))
        body = insts[:end]
        # Replayed traces may number their variables alike but carry constants; the text tells spaces apart.
        key = json.dumps(body)
        found = keys[m["task"]].get(key)
        if found is None:
            found = keys[m["task"]][key] = len(spaces[m["task"]])
            spaces[m["task"]].append(body)
        sampling = [i for i, inst in enumerate(body) if inst[0].startswith("Sample")]
        by_inst = {i: d for i, d in decisions if i < end}
        if any(i not in by_inst for i in sampling):
            continue
        taken = [d if isinstance(d, list) else [d] for d in (by_inst[i] for i in sampling)]
        latencies = m.get("res") or []
        rows.append(
            {
                "task": m["task"],
                "space": found,
                "decisions": taken,
                "ok": bool(m.get("ok")) and bool(latencies),
                "latencies": latencies,
                "error_kind": "" if m.get("ok") else "build",
                "policy": "random",
                "calibration": [m.get("cal") or 0.0] * 2,
                "time": "2026-11-30",
            }
        )
    return tasks, dict(spaces), rows
