"""Trajectories on disk: one parquet file per task and target, one row per trajectory, nothing padded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pretune.errors import InputError
from pretune.features import State
from pretune.features.schema import SCHEMA_VERSION, STATE_BLOCK, STATE_LOOP


@dataclass
class Programs:
    """Programs as the encoder sees them, laid end to end.

    Attributes
    ----------
    blocks : numpy.ndarray
        float16 ``[blocks, len(STATE_BLOCK)]`` of all programs.
    loops : numpy.ndarray
        float16 ``[loops, len(STATE_LOOP)]`` of all blocks, innermost first.
    block_count : numpy.ndarray
        int16 ``[programs]``.
    loop_count : numpy.ndarray
        int8 ``[blocks]``.
    """

    blocks: np.ndarray
    loops: np.ndarray
    block_count: np.ndarray
    loop_count: np.ndarray

    @classmethod
    def of(cls, states: Sequence[State]) -> Programs:
        """Drop the padding of states."""
        blocks, loops = [np.zeros((0, len(STATE_BLOCK)))], [np.zeros((0, len(STATE_LOOP)))]
        loop_count = [np.zeros(0)]
        for state in states:
            real = state.loops.any(-1)
            blocks.append(state.blocks)
            loops.append(state.loops[real])
            loop_count.append(real.sum(-1))
        return cls(
            np.concatenate(blocks).astype(np.float16), np.concatenate(loops).astype(np.float16),
            np.array([len(s.blocks) for s in states], np.int16), np.concatenate(loop_count).astype(np.int8),
        )  # fmt: skip

    def take(self, rows: np.ndarray) -> Programs:
        """Some of the programs, in the order of `rows`."""
        blocks = _ranges(self.block_count, rows)
        loops = _ranges(self.loop_count, blocks)
        return Programs(
            self.blocks[blocks], self.loops[loops], self.block_count[rows], self.loop_count[blocks]
        )

    @classmethod
    def join(cls, parts: Sequence[Programs]) -> Programs:
        """All programs of `parts`."""
        names = ("blocks", "loops", "block_count", "loop_count")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _ranges(count: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Places of the elements of lists `rows`, where all lists, of `count` elements each, lie end to end."""
    start = np.cumsum(count, dtype=np.int64) - count
    mine = count[rows].astype(np.int64)
    return np.repeat(start[rows] - np.cumsum(mine) + mine, mine) + np.arange(mine.sum())


@dataclass
class Trajectories:
    """Trajectories of one task for one target.

    Attributes
    ----------
    task : dict
        ``id``, ``name``, ``split``, ``networks``, ``mod`` of `networks.CorpusTask`.
    target : str
        As TVM writes it.
    kind : str
        ``"cpu"`` or ``"cuda"``.
    cores : int
    spaces : list
        Instructions of each design space, as JSON.
    space : numpy.ndarray
        int16 ``[n]``: design space of each trajectory.
    decisions : list of numpy.ndarray
        Per trajectory its decisions end to end, int32; `widths_of` splits them.
    valid : numpy.ndarray
        bool ``[n]``: whether the final program keeps within the target's limits.
    states_of : numpy.ndarray
        int32 ``[states]``: trajectory of each state; those of a trajectory follow each other.
    step : numpy.ndarray
        int16 ``[states]``: step of the action encoder that leads there, or `replay.FINAL`.
    programs : Programs
        The states.
    stores_of : numpy.ndarray
        int32 ``[m]``: trajectories whose per-store features were read.
    stores : numpy.ndarray
        float16 ``[m, 2 * 164]``: MetaSchedule's per-store features of the final program, maximum and sum.
    """

    task: dict[str, Any]
    target: str
    kind: str
    cores: int
    spaces: list[Any]
    space: np.ndarray
    decisions: list[np.ndarray]
    valid: np.ndarray
    states_of: np.ndarray
    step: np.ndarray
    programs: Programs
    stores_of: np.ndarray
    stores: np.ndarray

    def __len__(self) -> int:
        return len(self.space)

    def write(self, path: Path) -> None:
        """Write the file, at once when complete."""
        n = len(self)
        per_state = np.bincount(self.states_of, minlength=n)
        block_of = np.repeat(self.states_of, self.programs.block_count)
        loop_of = np.repeat(block_of, self.programs.loop_count)
        has_stores = np.isin(np.arange(n), self.stores_of)
        per_block = np.bincount(block_of, minlength=n)
        table = pa.table(
            {
                "space": pa.array(self.space, pa.int16()),
                "decisions": _lists(np.concatenate(self.decisions), [len(d) for d in self.decisions]),
                "valid": pa.array(self.valid),
                "step": _lists(self.step, per_state),
                "block_count": _lists(self.programs.block_count, per_state),
                "loop_count": _lists(self.programs.loop_count, per_block),
                "blocks": _lists(self.programs.blocks, per_block),
                "loops": _lists(self.programs.loops, np.bincount(loop_of, minlength=n)),
                "stores": _lists(self.stores, has_stores.astype(np.int64)),
            }
        ).replace_schema_metadata(
            {
                "pretune.schema": str(SCHEMA_VERSION), "pretune.task": json.dumps(self.task),
                "pretune.target": self.target, "pretune.kind": self.kind, "pretune.cores": str(self.cores),
                "pretune.spaces": json.dumps(self.spaces, separators=(",", ":")),
            }
        )  # fmt: skip
        partial = path.with_name(path.name + ".partial")
        pq.write_table(table, partial, compression="zstd", use_dictionary=False)
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Trajectories:
        """Read a file.

        Raises
        ------
        InputError
            If it is of another version of the features.
        """
        table = pq.read_table(path)
        meta = {k.decode().removeprefix("pretune."): v.decode() for k, v in table.schema.metadata.items()}
        if meta["schema"] != str(SCHEMA_VERSION):
            raise InputError(
                f"{path} holds features of version {meta['schema']}, not {SCHEMA_VERSION}; "
                "delete the folder and run: pretune-export trajectories"
            )

        def flat(name: str) -> np.ndarray:
            return table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)

        def lengths(name: str) -> np.ndarray:
            return np.diff(table[name].combine_chunks().offsets.to_numpy())

        n = len(table)
        ends = np.cumsum(lengths("decisions"))[:-1]
        programs = Programs(
            flat("blocks").reshape(-1, len(STATE_BLOCK)),
            flat("loops").reshape(-1, len(STATE_LOOP)),
            flat("block_count"),
            flat("loop_count"),
        )
        stores_of = np.flatnonzero(lengths("stores")).astype(np.int32)
        stores = flat("stores").reshape(len(stores_of), -1)
        return cls(
            json.loads(meta["task"]), meta["target"], meta["kind"], int(meta["cores"]),
            json.loads(meta["spaces"]), table["space"].to_numpy(), np.split(flat("decisions"), ends),
            table["valid"].to_numpy(), np.repeat(np.arange(n, dtype=np.int32), lengths("step")),
            flat("step"), programs, stores_of, stores,
        )  # fmt: skip


def widths_of(insts: Sequence[Any]) -> list[int]:
    """Numbers in each decision of a design space: one per variable that the instruction makes."""
    return [len(outputs) for name, _inputs, _attrs, outputs in insts if name.startswith("Sample")]


def _lists(values: np.ndarray, rows: Sequence[int] | np.ndarray) -> pa.ListArray:
    """A column of lists; list ``i`` takes the next ``rows[i]`` rows of `values`."""
    width = values.shape[1] if values.ndim > 1 else 1
    offsets = np.concatenate([[0], np.cumsum(np.asarray(rows, np.int64) * width)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values.reshape(-1)))
