"""How much work a candidate is for LLVM, told from its loops alone: some would build for minutes."""

from __future__ import annotations

import math
from typing import Any

from pretune.features.program import SERIAL, UNROLLED, VECTORIZED, Block, Loop, read_program

VECTOR_COST = 1 / 24
"""Weight of an operation on one element of a vector."""

FAR, FAR_COST = 4, 16.0
"""Weight of each element of a vector whose neighbours lie that far apart, or farther, in a buffer that the
program itself has written: LLVM looks for the store that each of them comes from."""

MOST_CODE = 12_000.0
"""Of the first 14 645 candidates of ``hub_cards/datasets/cpu-x86-64-v4`` 31 took longer than 8 s to build: 22
of them are larger, and so is one of the 1 063 within 10 % of the best of their task. It was fitted on these.
Of 8 on other tasks that took longer than 6 s, 3 are larger, and so is one of 431 good ones."""


def builds_for_minutes(mod: Any, target: Any) -> bool:
    """Whether LLVM may take minutes for a candidate: those are never proposed, nor measured to train on.

    Parameters
    ----------
    mod : tvm.IRModule
        As materialised.
    target : tvm.target.Target
    """
    kind: Any = target.kind  # TVM annotates it as a string
    return kind.name == "llvm" and code_size(mod["main"]) > MOST_CODE


def code_size(func: Any) -> float:
    """Weighted number of operations that LLVM sees, once loops are unrolled.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
        A candidate with its loops annotated, as postprocessors leave it.
    """
    blocks = read_program(func)
    written = {id(access.buffer) for block in blocks for access in block.accesses if access.is_write}
    return sum(_steps(block.loops) * _step_size(block, written) for block in blocks)


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


def _step_size(block: Block, written: set[int]) -> float:
    vectors = [loop for loop in block.loops if loop.kind == VECTORIZED]
    if not vectors:
        return block.cost
    elements = math.prod(loop.extent for loop in vectors)
    far = any(
        abs(access.stride(loop.var)) >= FAR
        for loop in vectors
        for access in block.accesses
        if not access.is_write and id(access.buffer) in written
    )
    return elements * (VECTOR_COST * block.cost + (FAR_COST if far else 0.0))
