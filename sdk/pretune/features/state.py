"""The encoder's input: a TensorIR program, at any stage of scheduling, as rows of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretune.features.nest import (
    Component,
    Env,
    Nest,
    NestLoop,
    const,
    describe_block,
    footprint,
    log2,
    region,
)
from pretune.features.program import PARALLEL, THREAD, VECTORIZED, Access, Block, read_program
from pretune.features.schema import ACCESSES, LOOP, STATE_BLOCK, STATE_LOOP
from pretune.features.summary import UNROLLED, summarise, unroll

MAX_BLOCKS = 20
"""Blocks of a program that are described; the cheapest are left out of longer programs."""

MAX_LOOPS = 24
"""Loops of a block that are described, innermost first."""


@dataclass(frozen=True)
class State:
    """A program as the encoder sees it.

    Attributes
    ----------
    blocks : numpy.ndarray
        float32 ``[B, len(schema.STATE_BLOCK)]``.
    loops : numpy.ndarray
        float32 ``[B, MAX_LOOPS, len(schema.STATE_LOOP)]``, innermost first, zero beyond a block's loops.
    """

    blocks: np.ndarray
    loops: np.ndarray


def encode_state(func: Any, *, cores: int = 1) -> State:
    """Read a PrimFunc into the encoder's rows.

    Parameters
    ----------
    func : tvm.tirx.PrimFunc
    cores : int
        Cores of the target, which decide how well a parallel loop is balanced.
    """
    return encode_blocks(read_program(func), cores=cores)


def encode_blocks(blocks: Sequence[Block], *, cores: int = 1) -> State:
    """As `encode_state`, from what `program.read_program` has read."""
    if len(blocks) > MAX_BLOCKS:
        kept = sorted(range(len(blocks)), key=lambda i: -blocks[i].points * blocks[i].cost)[:MAX_BLOCKS]
        blocks = [blocks[i] for i in sorted(kept)]
    work = [_trips(b) * b.cost for b in blocks]
    total = sum(work) or 1.0
    rows = np.zeros((max(len(blocks), 1), len(STATE_BLOCK)), dtype=np.float32)
    loops = np.zeros((max(len(blocks), 1), MAX_LOOPS, len(STATE_LOOP)), dtype=np.float32)
    held = _held(blocks)
    for i, block in enumerate(blocks):
        nest = _nest_of_state(block, held[i])
        parallel = _extent_of(block, PARALLEL)
        limit = max((loop.unroll for loop in block.loops), default=0)
        summary = summarise(nest, Env([], 1), cores=cores, parallel=parallel)
        summary.features[:, UNROLLED] = unroll(summary, float(limit))
        extra = (
            block.name.endswith("_init"), block.guarded,
            np.log2(limit + 1) * 0.1,
            log2(parallel), log2(_extent_of(block, VECTORIZED)), log2(_extent_of(block, THREAD)),
            i / len(blocks),
        )  # fmt: skip
        rows[i] = np.concatenate(
            [summary.features[0], describe_block(nest, work[i] / total), np.asarray(extra, dtype=np.float32)]
        )
        loops[i] = _loop_rows(block, nest)
    return State(rows, loops)


def _trips(block: Block) -> float:
    out = 1.0
    for loop in block.loops:
        out *= max(loop.extent, 1)
    return out


def _extent_of(block: Block, kind: int) -> float:
    out = 1.0
    for loop in block.loops:
        if loop.kind == kind:
            out *= loop.extent
    return out


def _held(blocks: Sequence[Block]) -> list[int]:
    """Position of each block's innermost loop that holds another block, or is parallel; -1 for none.

    What sets a reduction to zero counts as a part of it.
    """
    holders: dict[int, set[int]] = {}
    for i, block in enumerate(blocks):
        for loop in block.loops:
            holders.setdefault(loop.var, set()).add(i)
    inits = {i for i, block in enumerate(blocks) if block.name.endswith("_init")}
    return [
        max(
            (
                at for at, loop in enumerate(block.loops)
                if loop.kind == PARALLEL or len(holders[loop.var] - inits - {i}) > 0
            ),
            default=-1,
        )
        for i, block in enumerate(blocks)
    ]  # fmt: skip


def _nest_of_state(block: Block, held: int) -> Nest:
    """A nest whose axes are the loops themselves, so that its features are those of the real program."""
    number = {loop.var: i for i, loop in enumerate(block.loops)}
    reduce_vars = {var for axis in block.axes if axis.is_reduce for var in axis.binding}
    accesses = [
        Access(
            a.buffer, a.is_write, [{number[v]: c for v, c in form.items() if v in number} for form in a.index]
        )
        for a in block.accesses
    ]
    axes = [(const(axis.extent), axis.is_reduce) for axis in block.axes]
    loops = [
        NestLoop([Component(i, const(max(loop.extent, 1)), loop.var in reduce_vars)])
        for i, loop in enumerate(block.loops)
    ]
    cuts = [const(held)] if held >= 0 else []
    return Nest(block.name, axes, accesses, list(block.ops), loops, block.has_init, cuts=cuts)


def _loop_rows(block: Block, nest: Nest) -> np.ndarray:
    out = np.zeros((MAX_LOOPS, len(STATE_LOOP)), dtype=np.float32)
    depth = len(block.loops)
    inner = range(depth - 1, max(depth - 1 - MAX_LOOPS, -1), -1)
    if not inner:
        return out
    tiles: dict[int, Any] = {}
    touched = [footprint(a, region(a, tiles)) for a in nest.rank]
    points = 1.0
    extents, kinds, sizes = [], np.zeros((len(inner), 5)), []
    for k, i in enumerate(inner):
        loop = block.loops[i]
        extent = float(max(loop.extent, 1))
        tiles[i] = extent
        points *= extent
        for n, access in enumerate(nest.rank):
            if any(i in form for form in access.index):
                touched[n] = footprint(access, region(access, tiles))
        extents.append(extent)
        kinds[k, min(loop.kind, 4)] = 1.0
        sizes.append((points, sum(touched)))
    reduced = [nest.loops[i].components[0].is_reduce for i in inner]
    rows = out[: len(inner)]
    rows[:, : len(LOOP)] = describe_loops(extents, reduced, inner, depth, nest.rank, inner)
    rows[:, len(LOOP) : -2] = kinds
    rows[:, -2:] = log2(np.array(sizes, dtype=np.float64))
    return out


def describe_loops(
    extents: Sequence[float], is_reduce: Sequence[bool], positions: Sequence[int], depth: int,
    accesses: list[Access], axes: Sequence[int],
) -> np.ndarray:  # fmt: skip
    """Features `schema.LOOP` of loops of one block: float32 ``[loops, len(LOOP)]``."""
    out = np.zeros((len(extents), len(LOOP)), dtype=np.float32)
    position = np.array(positions)
    out[:, 0] = log2(np.array(extents))
    out[:, 2] = is_reduce
    out[:, 1] = 1 - out[:, 2]
    out[:, 3], out[:, 4] = position / 16, (depth - 1 - position) / 16
    for k, access in enumerate(accesses[:ACCESSES]):
        strides = np.array([abs(access.stride(axis)) for axis in axes], dtype=np.float64)
        out[:, 5 + 3 * k] = log2(strides + 1.0)
        out[:, 6 + 3 * k] = strides == 0
        out[:, 7 + 3 * k] = strides == 1
    return out


def describe_loop(
    extent: float, is_reduce: bool, position: int, depth: int, accesses: list[Access], axis: int
) -> np.ndarray:
    """Features `schema.LOOP` of one loop: float32 ``[len(LOOP)]``."""
    return describe_loops([extent], [is_reduce], [position], depth, accesses, [axis])[0]
