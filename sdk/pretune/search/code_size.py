"""How much work a candidate is for LLVM, told from its loops alone: some would build for minutes."""

from __future__ import annotations

import math
from typing import Any

from pretune.features.program import SERIAL, UNROLLED, VECTORIZED, Block, Loop, read_program

FAR = 4
"""A vector whose neighbours lie this many elements apart, or more, is put together element by element."""

LANE_COST = 16.0
"""Such an element of a buffer that the program has written itself counts as so many operations: LLVM tries to
keep the buffer in registers, and to find for each element the store that it comes from."""

MOST_CODE = 12_000.0


def code_size(func: Any) -> float:
    """Weighted operations that LLVM sees in scalar code, and in far-apart vectors, once loops are unrolled.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A candidate with its loops annotated, as postprocessors leave it.
    """
    blocks = read_program(func)
    written = {id(access.buffer) for block in blocks for access in block.accesses if access.is_write}
    return sum(_size(block, written) for block in blocks)


def _size(block: Block, written: set[int]) -> float:
    vectors = [loop for loop in block.loops if loop.kind == VECTORIZED]
    steps = _steps(block.loops)
    if not vectors:
        return steps * block.cost
    far = any(
        abs(access.stride(loop.var)) >= FAR
        for loop in vectors
        for access in block.accesses
        if not access.is_write and id(access.buffer) in written
    )
    return LANE_COST * steps * math.prod(loop.extent for loop in vectors) if far else 0.0


def _steps(loops: list[Loop]) -> int:
    """How often the body is written down: TVM unrolls from the inside as long as the limit allows."""
    steps = 1
    for loop in reversed(loops):
        if loop.kind == VECTORIZED:
            continue
        if loop.kind != UNROLLED and (loop.kind != SERIAL or steps * loop.extent > loop.unroll):
            break
        steps *= loop.extent
    return steps
