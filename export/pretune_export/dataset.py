"""Measured schedules on disk (parquet) and as training arrays.

A dataset folder under ``hub_cards/datasets/`` holds

``tasks.parquet``
    One row per task: id, network names and how often each calls it, split, name, shapes, program (TVM JSON).
``spaces.parquet``
    One row per task and design space: the instructions of its trace.
``measured-<machine>.parquet``
    One row per measured candidate: task, space, decisions, latencies, how it was chosen, calibration before
    and after its batch (empty if unknown), day. The file's metadata describes the machine.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tvm

from pretune.errors import InputError, OptionError
from pretune.features import ActionEncoder, State, encode_state
from pretune.features.program import read_program
from pretune.hardware import Hardware
from pretune.intake import make_task
from pretune.space import split_trace
from pretune_export.networks import CorpusTask
from pretune_export.networks.corpus import join


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
    states: dict[tuple[int, int], State] = field(default_factory=dict)


@dataclass
class TaskData:
    """A task on one machine: its initial state, and a group for each of its design spaces.

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
    initial: State
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
                decisions,
                [s.inst for s in encoder.steps],
                spaces[k],
            )
        )
    return TaskData(
        task["id"],
        task["split"],
        task["name"],
        tuple(task["networks"]),
        tuple(task["weights"]),
        task["mod"],
        encode_state(func, cores=cores),
        groups,
    )


def describe_machine(hardware: Hardware, *, name: str, target: str, days: Sequence[str]) -> dict[str, Any]:
    """What is kept about a machine that measured: the metadata of its file."""
    return {
        "name": name, "target": target, "cores": hardware.cores, "cpu": hardware.model_name,
        "microarch": hardware.microarch, "kind": hardware.kind, "arch": hardware.arch,
        "isa_level": hardware.isa_level, "days": json.dumps(sorted(days)),
        "vector": json.dumps([round(float(v), 6) for v in hardware.vector()]),
    }  # fmt: skip


def write_parquet(
    folder: Path,
    tasks: Iterable[CorpusTask],
    spaces: dict[str, list],
    rows: list[dict[str, Any]],
    machine: dict[str, Any],
) -> None:
    """Write what one machine measured to a dataset folder, beside what others have measured there.

    Parameters
    ----------
    folder : pathlib.Path
    tasks : iterable of CorpusTask
        Those without rows are left out.
    spaces : dict of str to list
        Instructions of each design space, by task.
    rows : list of dict
        Lines of a `collect.Collector`. They replace what the same machine measured before.
    machine : dict
        From `describe_machine`.

    Raises
    ------
    OptionError
        If another machine's design spaces of a task are other ones: rows of the two cannot share a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"measured-{machine['name']}.parquet"
    used = {row["task"] for row in rows}
    table = {t.id: _task_row(t) for t in tasks if t.id in used}
    texts = {t: [json.dumps(s, separators=(",", ":")) for s in spaces[t]] for t in table}
    others: set[str] = set()
    for other in folder.glob("measured-*.parquet"):
        if other != file:
            others.update(pq.read_table(other, columns=["task"])["task"].to_pylist())
    if others:
        known_tasks, known_spaces, _machines = _read_tables(folder)
        for task in sorted(others & known_tasks.keys()):
            if texts.setdefault(task, known_spaces[task]) != known_spaces[task]:
                raise OptionError(
                    f"{folder}: design spaces of task {task} differ between {machine['name']} and what "
                    f"measured it before; give another folder, as in --out {folder}-{machine['name']}"
                )
            table.setdefault(task, known_tasks[task])
    kept = [table[task] for task in sorted(table)]
    _write(folder / "tasks.parquet", {name: [t[name] for t in kept] for name in kept[0]})
    pairs = [(task, k, text) for task in sorted(table) for k, text in enumerate(texts[task])]
    _write(
        folder / "spaces.parquet",
        {
            "task": [p[0] for p in pairs],
            "space": pa.array([p[1] for p in pairs], pa.int16()),
            "instructions": [p[2] for p in pairs],
        },
    )
    _write(
        file,
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


def _task_row(task: CorpusTask) -> dict[str, Any]:
    return {
        "task": task.id, "networks": list(task.networks), "weights": list(task.weights), "split": task.split,
        "name": task.name, "shapes": json.dumps(task.shapes), "flops": float(task.flops), "mod": task.mod,
    }  # fmt: skip


def _write(path: Path, columns: dict[str, Any], metadata: dict[str, str] | None = None) -> None:
    table = pa.table(columns)
    if metadata:
        table = table.replace_schema_metadata({f"pretune.{k}": v for k, v in metadata.items()})
    partial = path.with_name(path.name + ".partial")
    pq.write_table(table, partial, compression="zstd", compression_level=12)
    partial.replace(path)


def _read_tables(folder: Path) -> tuple[dict[str, dict], dict[str, list[str]], dict[str, dict[str, str]]]:
    """Rows of ``tasks.parquet`` and texts of design spaces by task, descriptions of machines by name."""
    tasks = {t["task"]: t for t in pq.read_table(folder / "tasks.parquet").to_pylist()}
    for task in tasks.values():  # Files of the first version have no weights.
        task.setdefault("weights", [1] * len(task["networks"]))
    spaces: dict[str, list[str]] = defaultdict(list)
    for s in sorted(
        pq.read_table(folder / "spaces.parquet").to_pylist(), key=lambda s: (s["task"], s["space"])
    ):
        spaces[s["task"]].append(s["instructions"])
    return tasks, dict(spaces), read_machines(folder)


def read_machines(folder: Path) -> dict[str, dict[str, str]]:
    """Descriptions (`describe_machine`) of the machines that measured a dataset folder, by name."""
    machines = {}
    for file in sorted(folder.glob("measured-*.parquet")):
        meta = {k.decode(): v.decode() for k, v in (pq.read_schema(file).metadata or {}).items()}
        # Files of the first version do not say these two.
        machines[file.stem.removeprefix("measured-")] = {"kind": "cpu", "arch": "x86_64"} | {
            k.removeprefix("pretune."): v for k, v in meta.items() if k.startswith("pretune.")
        }
    return machines


def read_parquet(
    folder: Path,
) -> tuple[dict[str, dict], dict[str, list], dict[str, list[dict]], dict[str, dict]]:
    """Read a dataset folder: tasks and spaces by task id, rows and descriptions by machine name.

    Raises
    ------
    InputError
        If there is no dataset.
    """
    if not (folder / "tasks.parquet").is_file():
        raise InputError(f"{folder}: no dataset (tasks.parquet is missing); run: pretune-export dataset")
    tasks, texts, machines = _read_tables(folder)
    tasks = {name: {**t, "id": name} for name, t in tasks.items()}
    spaces = {name: [json.loads(text) for text in each] for name, each in texts.items()}
    rows = {
        name: [_unflatten(r) for r in pq.read_table(folder / f"measured-{name}.parquet").to_pylist()]
        for name in machines
    }
    return tasks, spaces, rows, machines


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


def read_shared(folder: Path) -> tuple[list[CorpusTask], dict[str, list], list[dict[str, Any]]]:
    """Read the first measurements (``tasks.jsonl.gz``, ``measurements.jsonl.gz``) into our rows.

    Their traces carry instructions and decisions together; design spaces are told apart by instructions.
    Tasks get the identities that the corpus would give them. Why a candidate failed and how fast the machine
    was is not known: errors are ``"unknown"``, calibrations empty.
    """

    def lines(name: str) -> list[dict]:
        with gzip.open(folder / name, "rt") as file:
            return [json.loads(line) for line in file]

    tasks: dict[str, CorpusTask] = {}
    ids: dict[str, str] = {}
    for t in lines("tasks.jsonl.gz"):
        mod = tvm.ir.load_json(t["mod"])
        try:
            task = make_task(t["name"], mod["main"])
        except InputError:  # The product would not tune it.
            continue
        ids[t["id"]] = task.task_id
        split = "validation" if t["net"] in FIRST_VALIDATION else "train"
        line = CorpusTask(
            task.task_id, (t["net"],), (1,), split, t["name"], 1, task.args, task.flops, -1, t["mod"]
        )
        tasks[line.id] = join(tasks.get(line.id), line, t["net"], split)
    spaces: dict[str, list] = defaultdict(list)
    keys: dict[str, dict[str, int]] = defaultdict(dict)
    rows = []
    for m in lines("measurements.jsonl.gz"):
        task_id = ids.get(m["task"])
        if task_id is None or not m.get("trace"):
            continue
        try:
            body, decisions = split_trace(*m["trace"])
        except ValueError:
            continue
        # Replayed traces may number their variables alike but carry constants; the text tells spaces apart.
        found = keys[task_id].setdefault(json.dumps(body), len(spaces[task_id]))
        if found == len(spaces[task_id]):
            spaces[task_id].append(body)
        latencies = m.get("res") or []
        ok = bool(m.get("ok")) and bool(latencies)
        rows.append(
            {
                "task": task_id,
                "space": found,
                "decisions": decisions,
                "ok": ok,
                "latencies": latencies,
                "error_kind": "" if ok else "unknown",
                "policy": "random",
                "calibration": [],
                "time": "2026-11-30",
            }
        )
    return list(tasks.values()), dict(spaces), rows
