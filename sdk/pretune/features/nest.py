"""Loop nests with symbolic extents, evaluated for many candidates at once.

A nest is a list of `Component`: a loop, or the part of a fused loop that came from one axis. Its extent is an
expression over decision slots, evaluated in an `Env` of ``n`` candidates in one numpy operation or a few.
`pretune.features.summary` turns nests into features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pretune.features.program import OPS, Access, Block, Buffer, Linear
from pretune.features.schema import ACCESSES, BLOCK
from pretune.space.slots import ROOT

if TYPE_CHECKING:
    from pretune.features.summary import Shape, Summary, Walk

LINE = 64
"""Bytes of a cache line."""

Value = np.ndarray | float
"""float32 ``[n]``, or a float that holds for all candidates."""


class Env:
    """Decisions of ``n`` candidates, and what was computed from them so far.

    Parameters
    ----------
    slots : sequence of numpy.ndarray
        Per slot the decision values, ``[n, width]``.
    n : int
    options : numpy.ndarray, optional
        The same decisions as option indices, int ``[n, slots]``: `distinct` needs them.
    """

    def __init__(self, slots: Sequence[np.ndarray], n: int, options: np.ndarray | None = None) -> None:
        self.columns = [np.asarray(s.T, dtype=np.float32, order="C") for s in slots]  # [width, n] each
        self.n = n
        self.walks: dict[Shape, Walk] = {}
        self.summaries: dict[Nest, Summary] = {}
        self.unrolled: dict[Nest, np.ndarray] = {}
        self.whole: tuple[Env, slice] | None = None  # set by `part`
        self._slots, self._options = slots, options
        self._all: tuple[Env, np.ndarray] | None = None  # set by `distinct`: of which it has some, and which
        self._extents: dict[Extent, Value] = {}
        self._distinct: dict[frozenset[int], tuple[Env, np.ndarray | None]] = {}

    def get(self, extent: Extent) -> Value:
        value = self._extents.get(extent)
        if value is None:
            if self.whole is None:
                value = extent.evaluate(self)
            else:
                whole, rows = self.whole
                value = whole.get(extent)
                value = value[rows] if isinstance(value, np.ndarray) else value
            self._extents[extent] = value
        return value

    def part(self, rows: slice) -> Env:
        """Consecutive candidates: what is asked of them is computed for all at once, and looked up here."""
        env = Env([], len(range(self.n)[rows]))
        env.whole = self, rows
        return env

    def distinct(self, slots: frozenset[int]) -> tuple[Env, np.ndarray | None]:
        """One candidate for each combination of decisions in `slots`, and for all candidates which it is.

        Where this would save little: all candidates, and None.
        """
        if slots not in self._distinct:
            self._distinct[slots] = self._find_distinct(slots)
        return self._distinct[slots]

    def _find_distinct(self, slots: frozenset[int]) -> tuple[Env, np.ndarray | None]:
        if self._all is not None:
            every, some = self._all
            env, which = every.distinct(slots)
            return (self, None) if env is self or which is None else (env, which[some])
        if self._options is None:
            return self, None
        key, combinations = np.zeros(self.n, dtype=np.int64), 1
        for slot in sorted(slots):
            option = self._options[:, slot]
            size = int(option.max()) + 1
            key = key * size + option
            combinations *= size
            if combinations > self.n:
                return self, None
        _keys, first, which = np.unique(key, return_index=True, return_inverse=True)
        if len(first) > 0.7 * self.n:
            return self, None
        env = Env([s[first] for s in self._slots], len(first))
        env._all = self, first
        return env, which


@dataclass(eq=False)
class Extent:
    """An extent as a function of the decisions; `slots` are the slots it depends on."""

    evaluate: Callable[[Env], Value]
    slots: frozenset[int] = frozenset()


def const(value: float) -> Extent:
    return Extent(lambda _env: float(value))


def slot_value(slot: int, column: int) -> Extent:
    return Extent(lambda env: env.columns[slot][column], frozenset({slot}))


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

    Attributes
    ----------
    axis : int
        -1 where the block's indices do not depend on it.
    also : int
        Another axis that moves by one as well, as in a block that `rfactor` made; -1 for none.
    step : Extent or None
        By how much the axis moves; None where it goes on from what the loops within it cover.
    serial : bool
        Whether it is the loop of a reduction that the block is computed under.
    """

    axis: int
    extent: Extent
    is_reduce: bool
    also: int = -1
    step: Extent | None = None
    serial: bool = False

    @property
    def slots(self) -> frozenset[int]:
        """Decision slots that it depends on."""
        return self.extent.slots if self.step is None else self.extent.slots | self.step.slots


@dataclass(eq=False)
class NestLoop:
    """A loop around a block, outermost component first.

    `present` tells whether there is such a loop, where decisions do: if not, its extent is 1.
    """

    components: list[Component]
    present: Extent | None = None

    @property
    def extent(self) -> Extent:
        if len(self.components) == 1:
            return self.components[0].extent
        return product([c.extent for c in self.components])

    @property
    def is_reduce(self) -> bool:
        return any(c.is_reduce for c in self.components)


def positions(loops: Sequence[NestLoop]) -> list[Extent]:
    """Number of loops around each of `loops`, outermost first; one more tells how many there are.

    What is not present stands between two.
    """
    found: list[Extent] = []
    count = const(0)
    for loop in loops:
        found.append(count if loop.present is None else _between(count, loop.present))
        count = _more(count, loop.present)
    return [*found, count]


def _between(count: Extent, present: Extent) -> Extent:
    def evaluate(env: Env) -> Value:
        return env.get(count) - 0.5 * np.logical_not(env.get(present))

    return Extent(evaluate, count.slots | present.slots)


def _more(count: Extent, present: Extent | None) -> Extent:
    if present is None:
        return Extent(lambda env: env.get(count) + 1.0, count.slots)
    return Extent(lambda env: env.get(count) + env.get(present), count.slots | present.slots)


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
    parts : dict of int to (int, Extent or None)
        Axes that are one part of another, or what remains of it: that axis, and by how much it moves.
    alone : Extent or None
        Whether none of its loops holds another block; of a nest that is complete.
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
    parts: dict[int, tuple[int, Extent | None]] = field(default_factory=dict)
    alone: Extent | None = None
    rank: list[Access] = field(default_factory=list)
    _of_anchor: dict[Extent, Extent] = field(default_factory=dict)

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

    @cached_property
    def shape(self) -> Shape:
        """What its sizes depend on; asked for when the nest changes no more."""
        from pretune.features.summary import Shape

        return Shape(self)

    @property
    def components(self) -> list[Component]:
        return [c for loop in self.loops for c in loop.components]

    def loop_over(self, i: int, extent: Extent) -> NestLoop:
        """A loop over axis number `i`."""
        axis, step = self.parts.get(i, (i, None))
        return NestLoop([Component(axis, extent, self.axes[i][1], i if axis != i else -1, step)])

    def all_cuts(self) -> list[Extent]:
        if self.anchor is None or self.depth is None:
            return list(self.cuts)
        inherited = []
        for cut in self.anchor.all_cuts():  # where they lie within the loops that are shared
            if cut not in self._of_anchor:
                self._of_anchor[cut] = shared(cut, self.depth)
            inherited.append(self._of_anchor[cut])
        return self.cuts + inherited

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
        out = frozenset().union(*(c.slots for c in self.components))
        present = [loop.present for loop in self.loops]
        for extra in (*present, self.inlined, self.at_root, self.alone, *self.all_cuts()):
            out = out | extra.slots if extra is not None else out
        return out

    def static_points(self) -> float:
        """Points of the iteration space by its axes, before any decision (symbolic axes count 1)."""
        env = Env([], 1)
        return float(np.prod([float(env.get(e)) if not e.slots else 1.0 for e, _r in self.axes]))


def shared(cut: Extent, depth: Extent) -> Extent:
    """`cut` where it lies within the loops shared with the outer nest, otherwise no position."""

    def evaluate(env: Env) -> Value:
        a, b = env.get(cut), env.get(depth)
        return np.where(a <= b, a, float(ROOT))

    return Extent(evaluate, cut.slots | depth.slots)


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


def span(size: float, form: Linear, tiles: dict[int, Value]) -> Value:
    """Elements touched along a dimension of `size`, when axis ``i`` spans ``tiles[i]`` consecutive points."""
    out: Value = 1.0
    for axis, c in form.items():
        tile = tiles.get(axis)
        if tile is not None:
            out = out + abs(c) * (tile - 1.0)
    return np.minimum(out, float(size)) if isinstance(out, np.ndarray) else min(out, float(size))


def region(access: Access, tiles: dict[int, Value]) -> list[Value]:
    """The spans of all dimensions of an access."""
    return [span(size, form, tiles) for size, form in zip(access.buffer.shape, access.index, strict=True)]


def footprint(access: Access, spans: Sequence[Value]) -> Value:
    """Bytes of memory touched, in whole cache lines along the innermost dimension."""
    if not spans:
        return access.buffer.itemsize
    lines = spans[-1] * (access.buffer.itemsize / LINE)
    out: Value = (np.ceil(lines) if isinstance(lines, np.ndarray) else math.ceil(lines)) * float(LINE)
    for one in spans[:-1]:
        out = out * one
    return out


def log2(value: Value | np.floating) -> Value:
    """log2 of a value of at least 1, scaled by 1/8 so that features stay near one."""
    bounded = max(value, 1.0) if isinstance(value, float) else np.maximum(value, 1.0)
    return np.log2(bounded) * 0.125


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
