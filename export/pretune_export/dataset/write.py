"""Write a dataset folder, or add a shard to it, or merge its shards."""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import shutil
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from pretune.hardware import Hardware
from pretune.messages import explain_os_errors
from pretune_export.networks import CorpusTask

from .read import ROWS_AT_ONCE, UNREADABLE, Dataset, check_same, merge_spaces, read_machine, read_tables

TASK = pa.schema(
    {
        "task": pa.string(),
        "networks": pa.list_(pa.string()),
        "weights": pa.list_(pa.int64()),
        "split": pa.string(),
        "name": pa.string(),
        "shapes": pa.string(),
        "flops": pa.float64(),
        "mod": pa.string(),
    }
)
SPACE = pa.schema({"task": pa.string(), "space": pa.int16(), "instructions": pa.string()})
ROW = pa.schema(
    {
        "task": pa.string(),
        "space": pa.int16(),
        "decisions": pa.list_(pa.int32()),
        "widths": pa.list_(pa.int8()),
        "ok": pa.bool_(),
        "latencies": pa.list_(pa.float32()),
        "error_kind": pa.string(),
        "policy": pa.string(),
        "calibration": pa.list_(pa.float32()),
        "time": pa.string(),
    }
)
"""Columns of a measured candidate; its decisions are one list, cut by `widths`."""


def describe_machine(hardware: Hardware, *, name: str, target: str, days: Iterable[str]) -> dict[str, Any]:
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
    *,
    append: bool = False,
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
        Lines of a `collect.Collector`.
    machine : dict
        From `describe_machine`.
    append : bool
        Add a shard, at any time and beside any other writer. Otherwise the rows replace all that the same
        machine measured before, in the folder's own three files; writers of those wait for each other.

    Raises
    ------
    OptionError
        If a machine of that name that is another one has measured before.
    OutputError
        If the operating system refuses.
    """
    used = {row["task"] for row in rows}
    own = {t.id: _task_row(t) for t in tasks if t.id in used}
    own_spaces = {t: [json.dumps(s, separators=(",", ":")) for s in spaces[t]] for t in own}
    name = f"measured-{machine['name']}.parquet"
    with explain_os_errors(folder):
        if append:
            for file in (folder / name, *folder.glob(f"shards/*/{name}")):
                with contextlib.suppress(*UNREADABLE):
                    check_same(read_machine(file), machine)
            now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
            shard = folder / "shards" / f"{machine['name']}-{now}-{secrets.token_hex(4)}"
            partial = shard.with_name(shard.name + ".partial")
            partial.mkdir(parents=True)
            _write_tables(partial, own, own_spaces)
            _write_rows(partial / name, rows, machine)
            partial.rename(shard)
            return
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            shards = [file.parent for file in folder.glob(f"shards/*/{name}")]
            replaced = [shard for shard in shards if shard.suffix != ".partial"]  # others still write those
            known, known_spaces = read_tables(folder) if (folder / "tasks.parquet").is_file() else ({}, {})
            numbers = merge_spaces(known_spaces, own_spaces)
            # What the rows of before need stays until they are gone.
            _write_tables(folder, known | own, known_spaces)
            renumbered = ({**row, "space": numbers[row["task"]][row["space"]]} for row in rows)
            _write_rows(folder / name, renumbered, machine)
            for shard in replaced:
                _remove(shard)
            for file in folder.glob("measured-*.parquet"):
                used.update(pq.read_table(file, columns=["task"])["task"].unique().to_pylist())
            _write_tables(folder, {t: row for t, row in (known | own).items() if t in used}, known_spaces)


def compact(folder: Path, out: Path | None = None) -> dict[str, int]:
    """Merge all shards of a dataset folder into its own three files, each candidate once.

    Others may add shards meanwhile; those stay. Stopped at any point, nothing is lost and nothing counts
    twice.

    Parameters
    ----------
    folder : pathlib.Path
    out : pathlib.Path, optional
        Write the merged dataset there and leave `folder` as it is.

    Returns
    -------
    dict of str to int
        Candidates by machine.

    Raises
    ------
    InputError
        As `Dataset`.
    OutputError
        If the operating system refuses.
    """
    out = out or folder
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock"):
            data = Dataset(folder)
            _write_tables(out, data.tasks, data.spaces)
            counts = {}
            for name, machine in data.machines.items():
                counts[name] = _write_rows(out / f"measured-{name}.parquet", data.rows(name), machine)
            if out == folder:
                # The oldest first, lest a leftover should count as later than what replaced it.
                for shard in data.added:
                    _remove(shard)
    return counts


def _remove(shard: Path) -> None:
    """Remove a shard's folder; no reader ever sees a part of it."""
    gone = shard.rename(shard.with_name(shard.name + ".partial"))
    shutil.rmtree(gone)


def _task_row(task: CorpusTask) -> dict[str, Any]:
    return {
        "task": task.id, "networks": list(task.networks), "weights": list(task.weights), "split": task.split,
        "name": task.name, "shapes": json.dumps(task.shapes), "flops": float(task.flops), "mod": task.mod,
    }  # fmt: skip


def _write_tables(folder: Path, tasks: dict[str, dict[str, Any]], spaces: dict[str, list[str]]) -> None:
    """Write ``tasks.parquet``, and ``spaces.parquet`` for these tasks."""
    names = sorted(tasks)
    _write(folder / "tasks.parquet", TASK, (tasks[name] for name in names))
    rows = (
        {"task": name, "space": k, "instructions": text}
        for name in names
        for k, text in enumerate(spaces[name])
    )
    _write(folder / "spaces.parquet", SPACE, rows)


def _write_rows(path: Path, rows: Iterable[dict[str, Any]], machine: dict[str, Any]) -> int:
    described = ROW.with_metadata({f"pretune.{k}": str(v) for k, v in machine.items()})
    return _write(path, described, (_flatten(row) for row in rows))


def _flatten(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "error_kind": "",
        **row,
        "ok": bool(row["ok"]),
        "decisions": [v for d in row["decisions"] for v in d],
        "widths": [len(d) for d in row["decisions"]],
    }


def _write(path: Path, schema: pa.Schema, rows: Iterable[dict[str, Any]]) -> int:
    """Write rows as they come, and give the file its name when it is complete; how many there were."""
    partial = path.with_name(path.name + ".partial")
    rows, count = iter(rows), 0
    with pq.ParquetWriter(partial, schema, compression="zstd", compression_level=12) as writer:
        while chunk := list(itertools.islice(rows, ROWS_AT_ONCE)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
            count += len(chunk)
    partial.replace(path)
    return count
