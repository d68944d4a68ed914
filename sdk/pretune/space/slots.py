"""Decision slots: one sampling instruction of a design space, and the options it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

MAX_OPTIONS = 16384
"""Longest table of options kept for one slot; a longer one is thinned evenly."""

INLINE, ROOT = -2, -1
"""Compute locations that are not loops: inlined into the consumer, or left at the top."""


@lru_cache(maxsize=4096)
def factorisations(extent: int, parts: int, max_innermost: int) -> np.ndarray:
    """All ordered ways to write `extent` as a product of `parts` factors.

    Parameters
    ----------
    extent : int
        The product.
    parts : int
        Number of factors.
    max_innermost : int
        Largest value of the last factor; 0 or less for no limit.

    Returns
    -------
    numpy.ndarray
        int32 ``[options, parts]``, read-only, at most `MAX_OPTIONS` rows.
    """
    if extent < 1 or parts < 1:
        raise ValueError(f"cannot factor {extent} into {parts} parts")
    divisors = [d for d in range(1, math.isqrt(extent) + 1) if extent % d == 0]
    divisors = sorted({*divisors, *(extent // d for d in divisors)})
    # Rows are built from the innermost factor outwards, as prefixes of (rest, factors...).
    rest = np.array([extent], dtype=np.int64)
    rows = np.zeros((1, 0), dtype=np.int64)
    for part in range(parts - 1):
        allowed = [d for d in divisors if part > 0 or max_innermost <= 0 or d <= max_innermost]
        d = np.array(allowed, dtype=np.int64)
        ok = rest[:, None] % d[None, :] == 0
        i, j = np.nonzero(ok)
        rows = np.concatenate([d[j][:, None], rows[i]], axis=1)
        rest = rest[i] // d[j]
        if len(rest) > 64 * MAX_OPTIONS:
            keep = np.linspace(0, len(rest) - 1, 16 * MAX_OPTIONS).astype(np.int64)
            rows, rest = rows[keep], rest[keep]
    rows = np.concatenate([rest[:, None], rows], axis=1)
    if parts == 1 and 0 < max_innermost < extent:
        rows = rows[:0]
    if len(rows) > MAX_OPTIONS:
        rows = rows[np.linspace(0, len(rows) - 1, MAX_OPTIONS).astype(np.int64)]
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    rows.setflags(write=False)
    return rows


@dataclass(frozen=True)
class Slot:
    """One sampling instruction.

    Attributes
    ----------
    index : int
        Position of the instruction in the trace.
    kind : str
        Instruction name, such as ``"SamplePerfectTile"``.
    options : numpy.ndarray
        int32 ``[options, width]``; a row is one decision: tile factors, the index of a category, or a
        compute location (`INLINE`, `ROOT`, or the position of a loop around the consumer).
    """

    index: int
    kind: str
    options: np.ndarray

    @property
    def width(self) -> int:
        """Numbers in one decision."""
        return self.options.shape[1]

    def find(self, decision: np.ndarray) -> int:
        """Row of `decision` in `options`, or -1."""
        hit = np.flatnonzero((self.options == decision).all(axis=1))
        return int(hit[0]) if len(hit) else -1

    def to_tvm(self, row: np.ndarray) -> int | list[int]:
        """A decision as the value that a TVM trace holds."""
        return [int(v) for v in row] if self.kind in _LIST_DECISIONS else int(row[0])


_LIST_DECISIONS = ("SamplePerfectTile", "SamplePartitionedTile")
