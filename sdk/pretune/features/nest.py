"""Loop nests with symbolic extents, evaluated for many candidates at once.

A nest is a list of `Component`: a loop, or the part of a fused loop that came from one axis. Its extent is an
expression over decision slots. `summarise` turns a nest into the features `schema.NEST`, for ``n`` candidates
in a few numpy operations per loop and access. The working-set model behind the traffic features is the
classic one of tile footprints against capacity (Wolf and Lam, "A data locality optimizing algorithm", PLDI
1991).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pretune.features.program import OPS, Access, Block, Buffer
from pretune.features.schema import ACCESSES, BLOCK, CAPACITIES, NEST

LINE = 64
"""Bytes of a cache line."""

Value = np.ndarray | float
"""float32 ``[n]``, or a float that holds for all candidates."""


class Env:
    """Decision values of ``n`` candidates: per slot an array ``[n, width]``; caches evaluated extents."""

    def __init__(self, slots: list[np.ndarray], n: int) -> None:
        self.slots = [np.asarray(s, dtype=np.float32) for s in slots]
        self.n = n
        self._cache: dict[Extent, Value] = {}
        self.summaries: dict[Nest, np.ndarray] = {}
        self.unrolled: dict[Nest, np.ndarray] = {}

    def get(self, extent: Extent) -> Value:
        value = self._cache.get(extent)
        if value is None:
            value = self._cache[extent] = extent.evaluate(self)
        return value


@dataclass(eq=False)
class Extent:
    """An extent as a function of the decisions; `slots` are the slots it depends on."""

    evaluate: Callable[[Env], Value]
    slots: frozenset[int] = frozenset()


def const(value: float) -> Extent:
    return Extent(lambda _env: float(value))


def slot_value(slot: int, column: int) -> Extent:
    return Extent(lambda env: env.slots[slot][:, column], frozenset({slot}))


def product(parts: list[Extent]) -> Extent:
    def evaluate(env: Env) -> Value:
        out: Value = 1.0
        for part in parts:
            out = out * env.get(part)
        return out

    return Extent(evaluate, frozenset().union(*(p.slots for p in parts)))


def quotient(whole: Extent, parts: list[Extent]) -> Extent:
    def evaluate(env: Env) -> Value:
        out = env.get(whole)
        for part in parts:
            out = out / env.get(part)
        return np.ceil(out) if isinstance(out, np.ndarray) else float(np.ceil(out))

    return Extent(evaluate, whole.slots.union(*(p.slots for p in parts)))


@dataclass(eq=False)
class Component:
    """A loop, or one axis' share of a fused loop.

    `axis` is -1 where the block's indices do not depend on it.
    """

    axis: int
    extent: Extent
    is_reduce: bool


@dataclass(eq=False)
class NestLoop:
    """A loop around a block, outermost component first."""

    components: list[Component]

    @property
    def extent(self) -> Extent:
        if len(self.components) == 1:
            return self.components[0].extent
        return product([c.extent for c in self.components])

    @property
    def is_reduce(self) -> bool:
        return any(c.is_reduce for c in self.components)


@dataclass(eq=False)
class Nest:
    """A block with the loops around it, outermost first.

    Attributes
    ----------
    axes : list of (Extent, bool)
        Extent of each block axis, and whether it is a reduction.
    accesses : list of Access
        With indices linear in axis numbers.
    inlined, at_root : Extent or None
        1.0 where a compute-location decision inlines the block, or leaves it at the top.
    cuts : list of Extent
        Positions of loops whose body holds another block too: no fusing across them.
    anchor : Nest or None
        The nest under whose loops this one was moved; its cuts hold here as well.
    depth : Extent or None
        Position of the anchor's loop that it was moved under.
    """

    name: str
    axes: list[tuple[Extent, bool]]
    accesses: list[Access]
    ops: list[float]
    loops: list[NestLoop]
    has_init: bool = False
    inlined: Extent | None = None
    at_root: Extent | None = None
    gone: bool = False
    cuts: list[Extent] = field(default_factory=list)
    anchor: Nest | None = None
    depth: Extent | None = None
    rank: list[Access] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rerank()

    def rerank(self) -> None:
        """Choose the accesses that features describe: the first write, then reads, largest first."""
        writes = [a for a in self.accesses if a.is_write]
        written = {id(a.buffer) for a in writes}
        reads = sorted(
            (a for a in self.accesses if not a.is_write and id(a.buffer) not in written),
            key=lambda a: -a.buffer.size,
        )
        self.rank = (writes[:1] + reads)[:ACCESSES]

    @property
    def components(self) -> list[Component]:
        return [c for loop in self.loops for c in loop.components]

    def all_cuts(self) -> list[Extent]:
        return self.cuts + (self.anchor.all_cuts() if self.anchor is not None else [])

    @property
    def written(self) -> Buffer | None:
        return next((a.buffer for a in self.accesses if a.is_write), None)

    @property
    def is_reduce(self) -> bool:
        return any(r for _e, r in self.axes)

    @property
    def cost(self) -> float:
        """Weighted operations per point, as `program.Block.cost`."""
        add, mul, div, mx, select, special, cast, integer = self.ops
        return 1.0 + add + mul + 4 * div + mx + select + 12 * special + cast + 0.5 * integer

    def slots(self) -> frozenset[int]:
        """All decision slots that the nest's shape depends on."""
        out = (
            frozenset().union(*(c.extent.slots for c in self.components)) if self.components else frozenset()
        )
        for extra in (self.inlined, self.at_root, *self.all_cuts()):
            out = out | extra.slots if extra is not None else out
        return out

    def static_points(self) -> float:
        """Points of the iteration space by its axes, before any decision (symbolic axes count 1)."""
        env = Env([], 1)
        return float(np.prod([float(env.get(e)) if not e.slots else 1.0 for e, _r in self.axes]))


def from_block(block: Block) -> Nest:
    """The nest of a block of an unscheduled program, whose axes are bound to its loops one to one."""
    number = {axis.var: i for i, axis in enumerate(block.axes)}
    loop_axis: dict[object, int] = {}
    for i, axis in enumerate(block.axes):
        for var in axis.binding:
            loop_axis.setdefault(var, i)
    loops = []
    for loop in block.loops:
        i = loop_axis.get(loop.var, -1)
        reduce_ = i >= 0 and block.axes[i].is_reduce
        loops.append(NestLoop([Component(i, const(loop.extent), reduce_)]))
    accesses = [
        Access(a.buffer, a.is_write, [_renumber(form, loop_axis, number) for form in a.index])
        for a in block.accesses
    ]
    axes = [(const(axis.extent), axis.is_reduce) for axis in block.axes]
    return Nest(block.name, axes, accesses, list(block.ops), loops, block.has_init)


def _renumber(form: dict, loop_axis: dict, number: dict) -> dict:
    out: dict = {}
    for var, c in form.items():
        i = loop_axis.get(var, number.get(var))
        if i is not None and abs(c) > abs(out.get(i, 0.0)):
            out[i] = c
    return out


def region(access: Access, tiles: dict[int, Value]) -> list[Value]:
    """Elements touched per dimension when axis ``i`` spans ``tiles[i]`` consecutive points."""
    out: list[Value] = []
    for size, form in zip(access.buffer.shape, access.index, strict=True):
        span: Value = 1.0
        for axis, c in form.items():
            tile = tiles.get(axis)
            if tile is not None:
                span = span + abs(c) * (tile - 1.0)
        out.append(np.minimum(span, float(size)) if isinstance(span, np.ndarray) else min(span, float(size)))
    return out


def footprint(access: Access, tiles: dict[int, Value]) -> Value:
    """Bytes of memory touched, in whole cache lines along the innermost dimension."""
    spans = region(access, tiles)
    if not spans:
        return access.buffer.itemsize
    lines = spans[-1] * (access.buffer.itemsize / LINE)
    out: Value = (np.ceil(lines) if isinstance(lines, np.ndarray) else math.ceil(lines)) * float(LINE)
    for span in spans[:-1]:
        out = out * span
    return out


class _Lanes:
    """One access across the loops that may become a vector, innermost first.

    RewriteParallelVectorizeUnroll fuses inner loops into a vector as long as no access forbids it: the first
    loop that an access depends on must have stride 1, unless it is the innermost, and each further one must
    go on where the last ended. Loops that it does not depend on are always welcome: an access may still be no
    ramp over the whole vector, and LLVM then gathers it lane by lane.
    """

    def __init__(self, access: Access, where: Callable) -> None:
        self._access, self._where = access, where
        self._next: Value = 0.0  # stride that goes on where the loops so far end; 0 before the first
        self.run: Value = 1.0  # lanes that are consecutive elements
        self.same: Value = 1.0  # lanes that are one element
        self._growing: Value = 1.0
        self._constant: Value = 1.0

    def stride(self, axis: int, step: Value) -> Value:
        """Elements from one iteration to the next, as the postprocessor sees them: along one dimension."""
        for size, form in zip(
            reversed(self._access.buffer.strides), reversed(self._access.index), strict=True
        ):
            if c := form.get(axis, 0.0):
                return abs(c) * size * step
        return 0.0

    def allows(self, extent: Value, stride: Value, innermost: bool) -> Value:
        """1.0 where the access lets a loop join the vector of those within it."""
        used = (stride != 0.0) & (extent > 1.0)
        fits = self._where(self._next == 0.0, (stride == 1.0) | innermost, stride == self._next)
        return self._where(used, fits, True)

    def take(self, taken: Value, extent: Value, stride: Value) -> None:
        """Go on to the next loop; `taken` is 1 where it joins the vector."""
        where = self._where
        taken = (taken > 0) & (extent > 1.0)
        used = taken & (stride != 0.0)
        self._next = where(used, stride * extent, self._next)
        self._growing = where(taken, self._growing * (stride == self.run), self._growing)
        self._constant = where(used, 0.0, self._constant)
        self.run = where(taken & (self._growing > 0), self.run * extent, self.run)
        self.same = where(taken & (self._constant > 0), self.same * extent, self.same)


_N = {name: i for i, name in enumerate(NEST)}


def log2(value: Value | np.floating) -> Value:
    """log2 of a value of at least 1, scaled by 1/8 so that features stay near one."""
    bounded = max(value, 1.0) if isinstance(value, float) else np.maximum(value, 1.0)
    return np.log2(bounded) * 0.125


def summarise(
    nest: Nest, env: Env, *, cores: int = 1, parallel_limit: float = 0.0, vector_limit: float = 64.0,
    parallel: float | None = None,
) -> np.ndarray:  # fmt: skip
    """Summary of a nest for each candidate.

    Parameters
    ----------
    nest : Nest
    env : Env
        Decisions of ``n`` candidates.
    cores : int
        Cores of the target.
    parallel_limit : float
        Product of outer loops past which the postprocessor fuses no more into the parallel loop; 0 for none.
    vector_limit : float
        Largest product of innermost loops that it vectorises.
    parallel : float, optional
        Extent of the parallel loop where it is known, as in a scheduled program.

    Returns
    -------
    numpy.ndarray
        float32 ``[n, len(schema.NEST)]``. The columns of `add_unrolling` are zero.
    """
    n = env.n
    out = np.zeros((n, len(NEST)), dtype=np.float32)
    # Where no decision is open, as in a real program, all values are floats, on which numpy is slow.
    alone = not env.slots
    where: Any = _choose if alone else np.where

    def single(value: float) -> Any:
        return value if alone else np.full(n, value, dtype=np.float32)

    accesses = nest.rank
    axes_of = [{axis for form in a.index for axis in form} for a in accesses]
    cuts = [env.get(cut) for cut in nest.all_cuts()]
    placed = [(position, c) for position, loop in enumerate(nest.loops) for c in loop.components]

    points: Value = 1.0
    tiles: dict[int, Value] = {}
    tile = [single(1.0)] * len(CAPACITIES)
    touched = [footprint(a, tiles) for a in accesses]
    held: list[Value] = [sum(touched)] * len(CAPACITIES)
    vector: Value = 1.0
    vector_open: Value = 1.0  # 1 while the run of spatial inner loops goes on
    accumulators: Value = 1.0
    register_bytes: Value = held[0]  # touched by the loops within the innermost reduction
    reduction: Value = 1.0
    stage: Value = 0.0  # 0 before the first non-unit reduction loop, 1 within its run, 2 after
    found: Value = 0.0  # number of non-unit loops met
    inner = [single(0.0) for _ in range(3)]
    strides = [single(-1.0) for _ in accesses]
    inner_reduce = single(0.0)
    nonunit: Value = 0.0
    lanes = [_Lanes(a, where) for a in accesses + [a for a in nest.accesses if a not in accesses]]

    for position, component in reversed(placed):
        extent = env.get(component.extent)
        if cuts and position < len(nest.loops) - 1:
            vector_open = vector_open * _uncut(cuts, position)
        innermost = position == len(nest.loops) - 1
        if not isinstance(extent, np.ndarray) and extent == 1.0:
            continue
        big = float(extent > 1.0) if alone else np.asarray(extent > 1.0, dtype=np.float32)
        points = points * extent
        step = tiles.get(component.axis, 1.0)  # by which the axis moves from one iteration to the next
        if component.axis >= 0:
            tiles[component.axis] = tiles.get(component.axis, 1.0) * extent
        for k, a in enumerate(accesses):
            if component.axis in axes_of[k]:
                touched[k] = footprint(a, tiles)
        total = sum(touched)
        for i, capacity in enumerate(CAPACITIES):
            fits = total <= capacity
            held[i] = where(fits, total, held[i])
            tile[i] = where(fits, points, tile[i])
        for k in range(3):
            inner[k] = where((found == k) & (big > 0), extent, inner[k])
        first = (found == 0) & (big > 0)
        for k, a in enumerate(accesses):
            stride = abs(_axis_stride(a, component.axis))
            strides[k] = where(first, stride, strides[k])
        if component.is_reduce:
            inner_reduce = where(first, 1.0, inner_reduce)
            vector_open = vector_open * (1.0 - big)
            reduction = where(stage <= 1, reduction * extent, reduction)
            stage = where((stage == 0) & (big > 0), 1.0, stage)
        else:
            grown = vector * extent
            open_ = vector_open * (grown <= vector_limit)
            if open_ if alone else np.any(open_):
                strides_now = [one.stride(component.axis, step) for one in lanes]
                for one, stride in zip(lanes, strides_now, strict=True):
                    open_ = open_ * one.allows(extent, stride, innermost)
                for one, stride in zip(lanes, strides_now, strict=True):
                    one.take(open_, extent, stride)
            vector = where(open_ > 0, grown, vector)
            vector_open = open_
            accumulators = where(stage == 0, accumulators * extent, accumulators)
            register_bytes = where(stage == 0, total, register_bytes)
            stage = where((stage == 1) & (big > 0), 2.0, stage)
        found = found + big
        nonunit = nonunit + big

    fused: Value = 1.0 if parallel is None else parallel
    if parallel is None and parallel_limit > 0:
        # As RewriteParallelVectorizeUnroll: fuse from outside until the product passes the limit.
        open_: Value = 1.0
        for position, component in placed:
            extent = env.get(component.extent)
            if component.is_reduce:
                open_ = open_ * np.asarray(extent <= 1.0, dtype=np.float32)
                continue
            fused = np.where(np.asarray(open_) > 0, fused * extent, fused)
            open_ = open_ * np.asarray(fused <= parallel_limit, dtype=np.float32) * _uncut(cuts, position)

    full = 1.0
    for extent, _is_reduce in nest.axes:
        full = full * env.get(extent)

    if alone:  # in the precision that the arrays have
        tile, inner, strides = ([np.float32(v) for v in values] for values in (tile, inner, strides))
        if found:
            held = [np.float64(v) for v in held]
    out[:, _N["points"]] = log2(points)
    out[:, _N["work"]] = log2(points * nest.cost)
    for i in range(len(CAPACITIES)):
        out[:, _N[f"tile_{i}"]] = log2(tile[i])
        out[:, _N[f"traffic_{i}"]] = np.log2(np.maximum(held[i] / tile[i], 2.0**-12)) * 0.125
    out[:, _N["vector"]] = log2(vector)
    out[:, _N["vector_x16"]] = np.asarray(np.mod(vector, 16.0) == 0)
    out[:, _N["vector_x8"]] = np.asarray(np.mod(vector, 8.0) == 0)
    out[:, _N["scalar"]] = np.asarray(vector == 1.0)
    for k in range(len(accesses)):
        out[:, _N[f"inner_stride_{k}"]] = log2(strides[k] + 1.0)
        out[:, _N[f"inner_broadcast_{k}"]] = strides[k] == 0
        out[:, _N[f"inner_contiguous_{k}"]] = strides[k] == 1
        length = np.maximum(lanes[k].run, lanes[k].same)
        out[:, _N[f"vector_run_{k}"]] = log2(length)
        out[:, _N[f"vector_whole_{k}"]] = length == vector
    out[:, _N["accumulators"]] = log2(accumulators)
    out[:, _N["inner_reduction"]] = log2(reduction)
    out[:, _N["parallel"]] = log2(fused)
    out[:, _N["imbalance"]] = np.ceil(fused / cores) * cores / fused - 1.0
    out[:, _N["grain"]] = log2(points / fused)
    out[:, _N["loops"]] = np.asarray(nonunit) * 0.0625
    if nest.inlined is not None:
        out[:, _N["inlined"]] = env.get(nest.inlined)
    if nest.at_root is not None:
        out[:, _N["at_root"]] = env.get(nest.at_root)
    for k in range(3):
        out[:, _N[f"inner_{k}"]] = log2(inner[k])
    item = accesses[0].buffer.itemsize if accesses else 4.0
    out[:, _N["accumulator_bytes"]] = log2(accumulators * item)
    out[:, _N["redundancy"]] = np.log2(np.maximum(points / np.maximum(full, 1.0), 2.0**-8)) * 0.125
    out[:, _N["last_reduce"]] = inner_reduce
    out[:, _N["vector_fill_16"]] = vector / (np.ceil(vector / 16.0) * 16.0)
    out[:, _N["vector_fill_8"]] = vector / (np.ceil(vector / 8.0) * 8.0)
    # Schedules with 24, 40 or 48 lanes measured 2 to 4 times slower, on average, than with 16, 32 or 64.
    out[:, _N["vector_power_of_2"]] = np.log2(vector) % 1.0 == 0.0
    out[:, _N["vectors"]] = log2(accumulators / vector)
    out[:, _N["register_traffic"]] = np.log2(register_bytes / accumulators) * 0.125
    return out


def _choose(condition: bool, value: Value, other: Value) -> Value:
    """`numpy.where` for floats."""
    return value if condition else other


def add_unrolling(out: np.ndarray, nest: Nest, env: Env, limit: Value) -> None:
    """Add to a summary what UnrollLoop will make of the nest.

    It unrolls from inside, as long as the body then holds no more than `limit` stores (TVM's
    ``pragma_auto_unroll_max_step``). A loop that became lanes of a vector is no loop any more. Where
    everything within the innermost reduction is unrolled, LLVM can keep the accumulators in registers.

    Parameters
    ----------
    out : numpy.ndarray
        From `summarise`, changed in place.
    nest : Nest
    env : Env
    limit : float or numpy.ndarray
        ``[n]`` where it depends on a decision.
    """
    alone = not env.slots
    where: Any = _choose if alone else np.where
    vector: Value = np.exp2(out[:, _N["vector"]] * 8.0) + 0.5
    if alone:
        vector = float(vector[0])
    lanes: Value = 1.0
    unrolled: Value = 1.0
    goes_on: Value = 1.0
    in_registers: Value = 1.0
    within: Value = 1.0  # 1 until the innermost reduction
    for component in reversed(nest.components):
        extent = env.get(component.extent)
        if not isinstance(extent, np.ndarray) and extent == 1.0:
            continue
        loop = extent > 1.0
        if component.is_reduce:
            within = within * (1.0 - loop)
            lanes = where(loop, np.inf, lanes)
        else:
            lanes = lanes * extent
            loop = loop & (lanes > vector)
        body = unrolled * extent
        fits = goes_on * (body <= limit)
        unrolled = where(loop & (fits > 0), body, unrolled)
        goes_on = where(loop, fits, goes_on)
        in_registers = where(loop & (within > 0), in_registers * fits, in_registers)
    out[:, _N["unrolled"]] = log2(unrolled)
    out[:, _N["in_registers"]] = in_registers


def _uncut(cuts: list[Value], position: int) -> Value:
    """1.0 where no other block hangs under the loop at `position`."""
    out: Value = 1.0
    for cut in cuts:
        out = out * (np.asarray(cut != position, dtype=np.float32))
    return out


def _axis_stride(access: Access, axis: int) -> float:
    if axis < 0:
        return 0.0
    return sum(s * form.get(axis, 0.0) for s, form in zip(access.buffer.strides, access.index, strict=True))


def describe_block(nest: Nest, work_share: float) -> np.ndarray:
    """Features `schema.BLOCK` of a block, the same for all candidates: float32 ``[len(BLOCK)]``."""
    out = np.zeros(len(BLOCK), dtype=np.float32)
    out[0] = nest.is_reduce
    out[1 : 1 + len(OPS)] = np.log2(np.array(nest.ops) + 1.0) * 0.5
    reads = sum(a.buffer.size * a.buffer.itemsize for a in nest.accesses if not a.is_write)
    writes = sum(a.buffer.size * a.buffer.itemsize for a in nest.accesses if a.is_write)
    out[1 + len(OPS) :] = (
        len(nest.accesses) * 0.25,
        np.log2(max(writes, 1)) * 0.0625,
        np.log2(max(reads, 1)) * 0.0625,
        np.log2(nest.rank[0].buffer.itemsize * 8) * 0.2 if nest.rank else 1.0,
        work_share,
    )
    return out
