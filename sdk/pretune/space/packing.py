"""Programs that copy an operand into the order in which it is read: more design spaces for convolutions.

TVM vectorises a convolution in NCHW over the width of its output. Where the input is read with a stride
there, every vector is gathered, and where the width is 7, 14 or 28, hardly any vector is full, whatever the
schedule. Both go away once the input is copied so that the output's height and width are one contiguous
dimension (im2col: Chellapilla et al., "High Performance Convolutional Neural Networks for Document
Processing", 2006).
The copy is made by the trace itself, with stock instructions, so that stock TVM replays what was found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pretune.features.program import COMMUTATIVE_REDUCE, OPS, Access, Axis, Block, read_program

if TYPE_CHECKING:
    import tvm
    from tvm.s_tir import Schedule

LEAST_REUSE = 8
"""An element of the copy is read at least so often, or copying costs as much as it saves."""

MOST_BYTES = 256 << 20
"""No copy is larger."""

_PREFIX = ("GetSBlock", "ReindexCacheRead", "TransformBlockLayout", "ComputeInline", "TransformLayout")
"""What the instructions of `pack` are called in a trace."""


@dataclass(frozen=True)
class Packing:
    """An operand to copy: the read of a block, the axes of the copy that lead, and those that become one.

    `producer` is the block that makes the operand, such as its padding, and is made part of the copy.
    `epilogue` are the blocks that follow element by element, to the output: all but the last are inlined,
    and the last has the same axes become one, so that it can follow each tile. Empty where there are none.
    """

    block: str
    buffer: str
    leading: tuple[int, ...]
    fused: tuple[int, ...]
    producer: str | None = None
    epilogue: tuple[str, ...] = ()

    @property
    def plain(self) -> Packing:
        """The same copy, and nothing beside it."""
        return replace(self, producer=None, epilogue=())


def find_packing(mod: tvm.IRModule, lanes: int) -> Packing | None:
    """The operand of a program that is worth a copy.

    Parameters
    ----------
    mod : tvm.IRModule
        A task's program: one PrimFunc called ``main``.
    lanes : int
        Elements of the widest vector.
    """
    from pretune.intake.task import parameter_buffers  # imports TVM

    every = read_program(mod["main"])
    parameters = {str(buffer.name) for buffer in parameter_buffers(mod["main"]) if buffer is not None}
    block = max((b for b in every if b.is_reduce), key=lambda b: b.points * b.cost, default=None)
    if block is None:
        return None
    (write,) = [a for a in block.accesses if a.is_write][:1]
    reads = [a for a in block.accesses if not a.is_write and a.buffer.name != write.buffer.name]
    for read in reads:
        others = [a for a in reads if a is not read]
        if len(others) == 1 and others[0].buffer.name != read.buffer.name:
            found = _packing_of(block, write, read, others[0], lanes)
            if found is not None:
                epilogue = _epilogue(every, block, parameters) if len(found.fused) > 1 else ()
                return replace(found, producer=_producer(every, block, read, parameters), epilogue=epilogue)
    return None


def _producer(blocks: Sequence[Block], block: Block, read: Access, kept: Set[str]) -> str | None:
    """Name of the block that makes what `block` reads there, if it may be made part of the copy.

    That is what pads, or is as cheap: each element is copied for every place of the kernel. `kept` are names
    of the function's own buffers.
    """
    reads = [b for b in blocks if any(a.buffer is read.buffer and not a.is_write for a in b.accesses)]
    writes = [b for b in blocks if any(a.buffer is read.buffer and a.is_write for a in b.accesses)]
    if len(writes) != 1 or reads != [block] or read.buffer.name in kept or writes[0].is_reduce:
        return None
    costly = any(writes[0].ops[OPS.index(name)] for name in ("div", "special"))
    alone = sum(a.is_write for a in writes[0].accesses) == 1
    return writes[0].name if alone and not costly else None


def _epilogue(blocks: Sequence[Block], block: Block, kept: Set[str]) -> tuple[str, ...]:
    """Names of the blocks that read what `block` writes, one after the other, each at the same place.

    `kept` are names of the function's own buffers: of what the blocks write, only the last may be one.
    """
    found: list[str] = []
    shape = [axis.extent for axis in block.axes if not axis.is_reduce]
    while True:
        write = next(a for a in block.accesses if a.is_write)
        readers = [b for b in blocks if any(a.buffer is write.buffer and not a.is_write for a in b.accesses)]
        readers = [b for b in readers if b is not block]
        if not readers:
            return tuple(found)
        if write.buffer.name in kept:
            return ()
        block, *others = readers
        plain = [{_loop(axis): 1.0} for axis in block.axes]
        if others or block.is_reduce or [axis.extent for axis in block.axes] != shape:
            return ()
        same = [a for a in block.accesses if a.is_write or a.buffer is write.buffer]
        if any([{v: c for v, c in form.items() if c} for form in a.index] != plain for a in same):
            return ()
        found.append(block.name)


def _packing_of(block: Block, write: Access, read: Access, other: Access, lanes: int) -> Packing | None:
    axes = block.axes
    spatial = [i for i, axis in enumerate(axes) if not axis.is_reduce]
    plain = [{_loop(axes[i]): 1.0} for i in spatial]
    if [{v: c for v, c in form.items() if c} for form in write.index] != plain:
        return None  # Fused axes would not be contiguous in the output.
    mine = [i for i in range(len(axes)) if _uses(read, axes[i])]
    fused: list[int] = []
    for i in reversed(spatial):
        if i not in mine or _uses(other, axes[i]):
            break
        fused.insert(0, i)
    if not fused:
        return None
    # TVM does not see that [x // 784, x % 784 // 28, x % 28] is contiguous: it would store lane by lane.
    fused = fused[-2:]
    last = axes[fused[-1]]
    stride = read.index[-1].get(_loop(last), 0.0)
    width = math.prod(axes[i].extent for i in fused)
    if stride == 0 or width < lanes or (stride == 1 and 2 * math.gcd(last.extent, lanes) >= lanes):
        return None
    if stride == 1 and len(fused) == 1:
        return None  # It is contiguous as it is.
    reuse = math.prod(axes[i].extent for i in spatial if i not in mine)
    size = math.prod(axes[i].extent for i in mine) * read.buffer.itemsize
    if reuse < LEAST_REUSE or size > MOST_BYTES:
        return None
    leading = tuple(i for i in mine if i not in fused)
    return Packing(block.name, read.buffer.name, leading, tuple(fused))


def _uses(access: Access, axis: Axis) -> bool:
    return any(form.get(_loop(axis)) for form in access.index)


def _loop(axis: Axis) -> int:
    """The loop that an axis stands for, in a program that nothing was done to."""
    return next(iter(axis.binding), 0)


def pack(schedule: Schedule, packing: Packing) -> None:
    """Copy the operand, in the order of `packing`, and make one axis of those that are fused there."""
    from tvm.s_tir.schedule.schedule import IndexMap  # its home moves from one TVM to the next

    block = schedule.get_sblock(packing.block)
    stmt: Any = schedule.get(block)
    extents = [int(v.dom.extent) for v in stmt.iter_vars]
    spatial = [i for i, v in enumerate(stmt.iter_vars) if int(v.iter_type) != COMMUTATIVE_REDUCE]
    names = [r.source if hasattr(r, "source") else r.buffer for r in stmt.reads]  # the first since TVM 0.27
    read = [str(buffer.name) for buffer in names].index(packing.buffer)

    extent = stmt.iter_vars[0].dom.extent
    dtype = str(extent.ty if hasattr(extent, "ty") else extent.dtype)  # the first since TVM 0.27

    def index_map(function: Any, ndim: int) -> IndexMap:
        return IndexMap.from_func(function, ndim=ndim, index_dtype=dtype)

    def fuse(axes: Any, which: Sequence[int]) -> Any:
        index = axes[which[0]]
        for i in which[1:]:
            index = index * extents[i] + axes[i]
        return index

    def packed(*axes: Any) -> list[Any]:
        return [*(axes[i] for i in packing.leading), fuse(axes, packing.fused)]

    # Axes of one element come first: the innermost loop is the one that TVM vectorises most readily.
    rest = sorted((i for i in range(len(extents)) if i not in packing.fused), key=lambda i: extents[i] > 1)
    before = [i for i in rest if extents[i] == 1 or i < packing.fused[0]]

    def joined(*axes: Any) -> list[Any]:
        return [
            *(axes[i] for i in before), fuse(axes, packing.fused),
            *(axes[i] for i in rest if i not in before),
        ]  # fmt: skip

    def in_order(*axes: Any) -> list[Any]:  # of the copy's axes, which stand in the order of the block's
        mine = sorted(packing.leading + packing.fused)
        return [axes[mine.index(i)] for i in packing.leading + packing.fused]

    copy = schedule.reindex_cache_read(block, read, "global", index_map(packed, len(extents)))
    if packing.producer:
        schedule.compute_inline(schedule.get_sblock(packing.producer))
    schedule.transform_block_layout(copy, index_map(in_order, len(packing.leading + packing.fused)))
    schedule.transform_block_layout(block, index_map(joined, len(extents)))
    if not packing.epilogue:
        return
    # Where an axis of the output is two of the epilogue's, TVM cannot tell which part of it a tile makes.

    def flat(*axes: Any) -> list[Any]:
        index = fuse(dict(zip(spatial, axes, strict=True)), packing.fused)
        return [*axes[: -len(packing.fused)], index]

    for name in packing.epilogue[:-1]:
        schedule.compute_inline(schedule.get_sblock(name))
    last = schedule.get_sblock(packing.epilogue[-1])
    schedule.transform_layout(block, ("write", 0), index_map(flat, len(spatial)))
    schedule.transform_block_layout(last, index_map(flat, len(spatial)))


def with_epilogue(schedule: Schedule, packing: Packing) -> list[Schedule]:
    """The design spaces that one of MetaSchedule's gives, by where the epilogue follows the tiles.

    MetaSchedule moves an epilogue under either tile only if it writes at the indices it reads. After `pack`
    it does not, so MetaSchedule caches the output instead, which only adds a copy. Those spaces are dropped,
    and the epilogue is moved here.

    Parameters
    ----------
    schedule : Schedule
        Of a program that was packed, with the trace of a design space.
    packing : Packing

    Returns
    -------
    list of Schedule
    """
    if not packing.epilogue:
        return [schedule]
    trace: Any = schedule.trace  # TVM annotates it as optional: a traced schedule has one
    if any(inst.kind.name == "CacheWrite" for inst in trace.insts):
        return []
    block = schedule.get_sblock(packing.block)
    loops = schedule.get_loops(block)
    stmt: Any = schedule.get(block)
    spatial = sum(int(v.iter_type) != COMMUTATIVE_REDUCE for v in stmt.iter_vars)
    if len(loops) != 4 * spatial + 2 * (len(stmt.iter_vars) - spatial):
        return [schedule]  # not tiled as SSRSRS
    out = [schedule]
    for tiles in (1, 2):
        moved = schedule.copy()
        block, last = moved.get_sblock(packing.block), moved.get_sblock(packing.epilogue[-1])
        loop = moved.get_loops(block)[tiles * spatial - 1]
        try:
            moved.reverse_compute_at(last, loop, preserve_unit_loops=True)
        except RuntimeError:  # It also reads what another block makes.
            continue
        out.append(moved)
    return out


def prefix_length(insts: Sequence[Any]) -> int:
    """How many of a trace's first instructions are those of `pack`."""
    last = max((i for i, inst in enumerate(insts) if inst[0] == "TransformBlockLayout"), default=-1)
    leads = all(inst[0] in _PREFIX for inst in insts[: last + 1])
    return last + 1 if leads and any(inst[0] == "ReindexCacheRead" for inst in insts[: last + 1]) else 0


def initial_program(mod: tvm.IRModule, insts: Sequence[Any]) -> tvm.IRModule:
    """The program that the decisions of a trace start from: `mod`, or what `pack` made of it.

    Parameters
    ----------
    mod : tvm.IRModule
    insts : sequence
        The trace's instructions as TVM's JSON.
    """
    count = prefix_length(insts)
    if not count:
        return mod
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(mod, error_render_level="none")
    Trace.apply_json_to_schedule([list(insts[:count]), []], schedule)
    return schedule.mod
