"""Read a dataset folder: tasks, design spaces and machines at once, rows as a stream."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pretune.errors import InputError, OptionError
from pretune.messages import notice

ROWS_AT_ONCE = 16384
"""Rows held in memory while a dataset is streamed, and rows of a row group where one is written."""

UNREADABLE = (pa.ArrowInvalid, OSError)
"""What pyarrow raises for a file that is cut off, and for one that is gone."""


@dataclass(frozen=True)
class Shard:
    """A file of rows of one machine.

    Attributes
    ----------
    file : pathlib.Path
    version : tuple of int
        `_version` of the file when `numbers` was read: a compaction replaces both.
    numbers : dict of str to list of int
        By task, the number in the whole dataset of each design space of the shard.
    """

    file: Path
    version: tuple[int, int]
    numbers: dict[str, list[int]]

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows, `ROWS_AT_ONCE` at a time.

        Raises
        ------
        InputError
            If the file is damaged, gone or another one.
        """
        try:
            with pq.ParquetFile(self.file) as file:
                if _version(self.file) != self.version:
                    raise InputError(f"{self.file} was replaced while it was read; run again")
                yield from file.iter_batches(ROWS_AT_ONCE, columns=columns)
        except UNREADABLE as error:
            raise InputError(
                f"{self.file}: cannot be read ({error}); run again if it was compacted meanwhile, "
                "or remove it"
            ) from None


class Dataset:
    """A dataset folder with all its shards. Tasks and design spaces are in memory, rows are streamed.

    A shard that is torn, or that describes its machine as another one, is named on stderr and left out.

    Parameters
    ----------
    folder : pathlib.Path

    Attributes
    ----------
    tasks : dict of str to dict
        Rows of ``tasks.parquet`` by task id.
    spaces : dict of str to list of str
        Instructions of each design space, as JSON, by task id.
    machines : dict of str to dict
        `describe_machine` by name.
    added : list of pathlib.Path
        Folders of the shards beside the folder's own three files, oldest first.

    Raises
    ------
    InputError
        If there is no dataset, or its own three files are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.tasks: dict[str, dict[str, Any]] = {}
        self.spaces: dict[str, list[str]] = {}
        self.machines: dict[str, dict[str, str]] = {}
        self.added: list[Path] = []
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        places = _places(folder)
        for partial in folder.glob("shards/*.partial"):
            notice(f"{partial} is left out: still being written, or left by a writer that was killed")
        if not places:
            raise InputError(f"{folder}: no dataset (tasks.parquet is missing); run: pretune-export dataset")
        for place in places:
            try:
                self._add(place)
            except UNREADABLE as error:
                if place == folder:
                    raise InputError(f"{folder}: damaged ({error}); run: pretune-export dataset") from None
                notice(f"{place} is left out: torn ({error})")
            except OptionError as error:
                notice(f"{place} is left out: {error}")
            else:
                if place != folder:
                    self.added.append(place)

    def _add(self, place: Path) -> None:
        versions = {file: _version(file) for file in place.glob("measured-*.parquet")}
        tasks, spaces = read_tables(place)
        machines = {file: read_machine(file) for file in sorted(versions)}
        for machine in machines.values():
            check_same(self.machines.get(machine["name"], machine), machine)
        self.tasks |= tasks
        numbers = merge_spaces(self.spaces, spaces)
        for file, machine in machines.items():
            known = self.machines.get(machine["name"], machine)
            days = {*json.loads(known["days"]), *json.loads(machine["days"])}
            self.machines[machine["name"]] = {**machine, "days": json.dumps(sorted(days))}
            self._shards[machine["name"]].append(Shard(file, versions[file], numbers))

    def rows(self, machine: str) -> Iterator[dict[str, Any]]:
        """What a machine measured, one candidate after the other, none twice.

        In memory are `ROWS_AT_ONCE` rows, and 9 bytes for each of the machine's rows.

        Raises
        ------
        InputError
            If a file is damaged beyond what opening it shows, or gone.
        """
        shards = self._shards[machine]
        keys = np.fromiter((key for shard in shards for key in _keys(shard)), np.uint64)
        _, last = np.unique(keys[::-1], return_index=True)
        keep = np.zeros(len(keys), bool)
        keep[len(keys) - 1 - last] = True
        start = 0
        for shard in shards:
            for batch in shard.batches():
                kept = batch.filter(pa.array(keep[start : start + len(batch)]))
                start += len(batch)
                for row in kept.to_pylist():
                    yield _unflatten({**row, "space": shard.numbers[row["task"]][row["space"]]})


def _version(file: Path) -> tuple[int, int]:
    """Another one for a file that has replaced this one: they never change in place."""
    found = file.stat()
    return found.st_ino, found.st_mtime_ns


def _places(folder: Path) -> list[Path]:
    """Folders with the three files: that of the dataset itself, then the shards, by name and so by time."""
    shards = sorted(place for place in folder.glob("shards/*") if place.suffix != ".partial")
    return [*([folder] if (folder / "tasks.parquet").is_file() else []), *shards]


def dataset_files(folder: Path) -> list[Path]:
    """All files that a dataset consists of, in the order in which they are read."""
    return [file for place in _places(folder) for file in sorted(place.glob("*.parquet"))]


def read_tasks(place: Path) -> dict[str, dict[str, Any]]:
    """Rows of ``tasks.parquet``, by task."""
    tasks = {t["task"]: t for t in pq.read_table(place / "tasks.parquet").to_pylist()}
    for task in tasks.values():  # Files of the first version have no weights.
        task.setdefault("weights", [1] * len(task["networks"]))
    return tasks


def read_tables(place: Path) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]]]:
    """Rows of ``tasks.parquet`` and texts of design spaces, by task."""
    tasks = read_tasks(place)
    spaces: dict[str, list[str]] = defaultdict(list)
    rows = pq.read_table(place / "spaces.parquet").to_pylist()
    for row in sorted(rows, key=lambda row: (row["task"], row["space"])):
        spaces[row["task"]].append(row["instructions"])
    return tasks, dict(spaces)


def merge_spaces(known: dict[str, list[str]], more: dict[str, list[str]]) -> dict[str, list[int]]:
    """Add design spaces to those that are known, which keep their numbers; the numbers of the others."""
    numbers = {}
    for task, texts in more.items():
        of = known.setdefault(task, list(texts))
        of += [text for text in texts if text not in of]
        numbers[task] = [of.index(text) for text in texts]
    return numbers


def read_machine(file: Path) -> dict[str, str]:
    """What `describe_machine` said of the machine that measured a file."""
    meta = {k.decode(): v.decode() for k, v in (pq.read_schema(file).metadata or {}).items()}
    found = {k.removeprefix("pretune."): v for k, v in meta.items() if k.startswith("pretune.")}
    # Files of the first version do not say kind and architecture.
    return {"kind": "cpu", "arch": "x86_64", **found, "name": file.stem.removeprefix("measured-")}


def check_same(known: dict[str, Any], machine: dict[str, Any]) -> None:
    """Raise OptionError unless two descriptions of a machine agree in all that its measurements depend on."""
    for key in ("target", "cores"):
        if str(known[key]) != str(machine[key]):
            raise OptionError(
                f"machine {machine['name']} has {key} {machine[key]} here, but {known[key]} in an earlier "
                "shard; give it a name of its own with --machine"
            )


def _keys(shard: Shard) -> Iterator[int]:
    """64 bits for each row, the same for the same candidate."""
    for batch in shard.batches(["task", "space", "decisions"]):
        for row in batch.to_pylist():
            space = shard.numbers[row["task"]][row["space"]]
            text = f"{row['task']} {space} {row['decisions']}"
            yield int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def read_machines(folder: Path) -> dict[str, dict[str, str]]:
    """Descriptions (`describe_machine`) of the machines that measured a dataset folder, by name."""
    return Dataset(folder).machines


def read_parquet(
    folder: Path,
) -> tuple[dict[str, dict], dict[str, list], dict[str, list[dict]], dict[str, dict]]:
    """Read all of a dataset folder: tasks and spaces by task id, rows and descriptions by machine name.

    Raises
    ------
    InputError
        As `Dataset`.
    """
    data = Dataset(folder)
    tasks = {name: {**task, "id": name} for name, task in data.tasks.items()}
    spaces = {name: [json.loads(text) for text in texts] for name, texts in data.spaces.items()}
    return tasks, spaces, {name: list(data.rows(name)) for name in data.machines}, data.machines


def _unflatten(row: dict[str, Any]) -> dict[str, Any]:
    values, out = row["decisions"], []
    for width in row.pop("widths"):
        out.append(values[:width])
        values = values[width:]
    return {**row, "decisions": out}
