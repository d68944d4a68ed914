"""Loop nests as numbers: the features `schema.NEST`, for many candidates at once.

A nest is walked from its innermost loop outwards. The points iterated and the bytes touched only grow on the
way, so that whatever holds up to some loop (a tile that fits a cache, lanes that are consecutive, a body that
is unrolled) is a number of loops, counted from inside, and its size is looked up by that number. The
working-set model behind the traffic features is the classic one of tile footprints against capacity (Wolf and
Lam, "A data locality optimizing algorithm", PLDI 1991).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretune.features.nest import Env, Nest, Value, footprint, log2, positions, span
from pretune.features.program import Access, Linear
from pretune.features.schema import ACCESSES, CAPACITIES, NEST

_N = {name: i for i, name in enumerate(NEST)}
_CAPACITIES = np.array(CAPACITIES, dtype=np.float32)


def _each(first: str, count: int, step: int) -> slice:
    """Columns of a feature that there are `count` of, from its first on."""
    return slice(_N[first], _N[first] + count * step, step)


_TILES, _TRAFFIC = (_each(name, len(CAPACITIES), 2) for name in ("tile_0", "traffic_0"))
_INNER = _each("inner_0", 3, 1)
UNROLLED = slice(_N["unrolled"], _N[f"rolled_contiguous_{ACCESSES - 1}"] + 1)
"""Columns that `unroll` gives."""

LLVM_UNROLLS = 32
"""Vector operations up to which LLVM unrolls an innermost loop by itself: its threshold is 300 instructions,
and a product that is accumulated takes about six with its loads and the store (LoopUnrollPass). Loops of 32
came out unrolled, nests of 80 did not."""

REGISTER_LANES = 16
"""Floats of a register of AVX-512, whatever the target: features do not depend on it."""

# Numbers that a walk or a summary first writes as they are, and whose logarithm is taken at once.
_WALK_LOGS = [
    i for name, i in _N.items()
    if name.startswith(("points", "work", "tile_", "accumulator", "inner_reduction", "inner_stride_"))
] + list(range(_N["inner_0"], _N["inner_2"] + 1))  # fmt: skip
_LOGS = [_N[name] for name in ("vector", "vectors", "parallel", "grain")]
_LOGS += [_N[f"vector_run_{k}"] for k in range(ACCESSES)]


class Shape:
    """What the sizes of a nest depend on, whatever else hangs under its loops.

    Attributes
    ----------
    levels : list of (Extent, Component)
        Components of the loops with the position of their loop, innermost first.
    count : Extent
        How many loops there are.
    rank, others : list of Access
        Accesses that features describe, and the rest.
    strides : numpy.ndarray
        float32 ``[len(rank), len(levels)]``, elements by which each access moves along each loop.
    """

    def __init__(self, nest: Nest) -> None:
        *where, self.count = positions(nest.loops)
        levels = [(at, c) for at, loop in zip(where, nest.loops, strict=True) for c in loop.components]
        self.levels = levels[::-1]
        self.rank = nest.rank
        self.others = [a for a in nest.accesses if a not in nest.rank]
        self.axes, self.cost = nest.axes, nest.cost
        strides = [[abs(a.stride(c.axis) or a.stride(c.also)) for _at, c in self.levels] for a in self.rank]
        self.strides = np.array(strides, dtype=np.float32).reshape(len(self.rank), len(self.levels))
        # Accesses often share dimensions: each is followed once.
        self.dims: list[tuple[int, Linear]] = []
        self.dims_of: list[list[int]] = []
        for access in self.rank:
            dims = list(zip(access.buffer.shape, access.index, strict=True))
            self.dims += [dim for i, dim in enumerate(dims) if dim not in self.dims + dims[:i]]
            self.dims_of.append([self.dims.index(dim) for dim in dims])
        # What changes with the tile of an axis: dimensions, and the accesses that have one of them.
        self.moves: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for axes in {(c.axis, c.also) for _at, c in self.levels}:
            moved = [d for d, (_size, form) in enumerate(self.dims) if not form.keys().isdisjoint(axes)]
            seen = [k for k, dims in enumerate(self.dims_of) if not set(moved).isdisjoint(dims)]
            self.moves[axes] = moved, seen


class Walk:
    """The loops of a shape for ``n`` candidates, without those that are one iteration for all of them.

    Attributes
    ----------
    levels : list of (Extent, Component)
        The ``L`` loops, innermost first.
    positions : list of Value
        Of these loops.
    last : Value
        Position of the innermost one.
    steps, also_steps : list of Value
        For each, by how much its axis, and the other that moves with it, move from one iteration to the next.
    extents : numpy.ndarray
        float32 ``[L + 1, n]``, zero in the last row: no loop.
    fresh : list of numpy.ndarray
        For each ranked access bool ``[L + 1, n]``, whether the axis that moves it goes on by one, as where no
        loop within has covered some of it.
    open, single : numpy.ndarray
        bool ``[L, n]``, where the extent is not 1, and where it is.
    points, bytes : numpy.ndarray
        float32 ``[L + 1, n]``: of the loops within each level, and of the whole nest.
    spatial : numpy.ndarray
        float32 ``[L + 1, n]``: points as `points` has them, without loops of reductions.
    is_reduce : numpy.ndarray
        bool ``[L + 1]``, of the levels; False in the last row.
    strides : numpy.ndarray
        float32 ``[len(rank), L + 1]``, elements by which each access moves as the axis of a level moves by
        one; -1 in the last column.
    accumulators : numpy.ndarray
        float32 ``[n]``, points of the loops within the innermost reduction.
    rows : numpy.ndarray
        float32 ``[len(NEST), n]``: all features but those of `unroll`; those of `summarise` are of the nest
        of this shape that it was last called with.
    """

    def __init__(self, shape: Shape, env: Env) -> None:
        every = [env.get(component.extent) for _position, component in shape.levels]
        kept = [i for i, extent in enumerate(every) if isinstance(extent, np.ndarray) or extent != 1.0]
        extents = [every[i] for i in kept]
        self.levels = [shape.levels[i] for i in kept]
        self.positions = [env.get(position) for position, _component in self.levels]
        self.strides = np.full((len(shape.rank), len(kept) + 1), -1.0, dtype=np.float32)
        self.strides[:, :-1] = shape.strides[:, kept]
        self.last = env.get(shape.count) - 1.0
        self._lanes = [_Lanes(access, env.n) for access in (*shape.rank, *shape.others)]
        self._ranked = self._lanes[: len(shape.rank)]
        self._joined: list[tuple[np.ndarray | bool, list[np.ndarray]]] = []
        self.steps: list[Value] = []
        self.also_steps: list[Value] = []
        self.extents = np.zeros((len(kept) + 1, env.n), dtype=np.float32)
        self.points, self.spatial = np.ones_like(self.extents), np.ones_like(self.extents)
        self.bytes = np.empty_like(self.extents)
        self.is_reduce = np.array([*(c.is_reduce for _position, c in self.levels), False])
        for i, extent in enumerate(extents):
            self.extents[i] = extent
            np.multiply(self.points[i], extent, out=self.points[i + 1])
            np.multiply(self.spatial[i], 1.0 if self.is_reduce[i] else extent, out=self.spatial[i + 1])
        self.open = self.extents[:-1] > 1.0
        self.single = ~self.open
        self._follow_accesses(shape, env, extents)
        self.fresh = self._fresh(shape)
        self.rows = self._rows(shape, env)

    def _follow_accesses(self, shape: Shape, env: Env, extents: list[Value]) -> None:
        tiles: dict[int, Value] = {}
        spans: list[Value] = [span(size, form, tiles) for size, form in shape.dims]
        self._spans = [spans.copy()]
        self._dims_of = shape.dims_of

        def touched_by(k: int) -> Value:
            return footprint(shape.rank[k], [spans[d] for d in shape.dims_of[k]])

        touched = [touched_by(k) for k in range(len(shape.rank))]
        self.bytes[0] = sum(touched)
        for i, ((_position, component), extent) in enumerate(zip(self.levels, extents, strict=True)):
            axis, also = component.axis, component.also
            tile = tiles.get(axis, 1.0)
            step = tile if component.step is None else env.get(component.step)
            self.steps.append(step)
            self.also_steps.append(tiles.get(also, 1.0))
            if axis >= 0:
                tiles[axis] = tile * extent if component.step is None else tile + step * (extent - 1.0)
            if also >= 0:
                tiles[also] = self.also_steps[-1] * extent
            moved, seen = shape.moves[axis, also]
            for d in moved:
                spans[d] = span(*shape.dims[d], tiles)
            for k in seen:
                touched[k] = touched_by(k)
            self.bytes[i + 1] = sum(touched) if moved else self.bytes[i]
            self._spans.append(spans.copy())

    def _fresh(self, shape: Shape) -> list[np.ndarray]:
        by_axis, by_also = np.zeros((2, *self.extents.shape), dtype=bool)
        for i in range(len(self.levels)):
            by_axis[i], by_also[i] = np.equal(self.steps[i], 1.0), np.equal(self.also_steps[i], 1.0)
        if all(component.also < 0 for _position, component in self.levels):
            return [by_axis] * len(shape.rank)
        moves = [[not a.stride(c.axis) for _position, c in self.levels] + [False] for a in shape.rank]
        return [np.where(np.array(also)[:, None], by_also, by_axis) for also in moves]

    def elements(self, levels: slice) -> np.ndarray:
        """Different elements that each access touches within so many of the innermost loops.

        Returns
        -------
        numpy.ndarray
            float32 ``[len(rank), levels, n]``
        """
        every = self._spans[levels]
        out = np.ones((len(self._dims_of), len(every), self.points.shape[1]), dtype=np.float32)
        for k, dims in enumerate(self._dims_of):
            for level, spans in enumerate(every):
                for d in dims:
                    out[k, level] *= spans[d]
        return out

    def _rows(self, shape: Shape, env: Env) -> np.ndarray:
        points, found = self.points, np.zeros(self.points.shape, dtype=np.uint8)  # loops met so far
        stage = found.copy()  # 0 before the first reduction, 1 within its run of loops, 2 after
        for i, ((_position, component), big) in enumerate(zip(self.levels, self.open, strict=True)):
            np.add(found[i], big, out=found[i + 1])
            stage[i + 1] = np.maximum(stage[i], big) if component.is_reduce else stage[i] + (stage[i] & big)

        fitting = count(self.bytes[1:, None] <= _CAPACITIES[:, None])
        within, run = count(stage[1:, None] <= np.array([[0], [1]]))
        sizes = pick(points, np.stack([*fitting, within, run]))
        touched = pick(self.bytes, np.stack([*fitting, within]))
        self.accumulators = sizes[-2]

        # An odd number of cache lines apart: of rows a power of two apart, few fit the cache at once.
        rows = np.zeros((len(NEST), (env.n // 32 * 2 + 3) * 16), dtype=np.float32)[:, : env.n]
        rows[_N["points"]] = points[-1]
        rows[_N["work"]] = points[-1] * shape.cost
        rows[_TILES] = sizes[:-2]
        rows[_TRAFFIC] = np.log2(np.maximum(touched[:-1] / sizes[:-2], 2.0**-12)) * 0.125
        rows[_N["accumulators"]] = self.accumulators
        rows[_N["accumulator_bytes"]] = self.accumulators * (
            shape.rank[0].buffer.itemsize if shape.rank else 4.0
        )
        rows[_N["register_traffic"]] = np.log2(touched[-1] / self.accumulators) * 0.125
        rows[_N["inner_reduction"]] = sizes[-1] / self.accumulators

        rows[_N["loops"]] = found[-1] * np.float32(0.0625)
        before = count(found[1:, None] <= np.arange(3)[:, None])  # loops before the k-th that is met
        rows[_INNER] = pick(self.extents, before)
        if shape.rank:
            stride = self.strides.take(before[0], axis=1)
            if any(component.step is not None for _position, component in self.levels):
                steps = np.ones_like(points)
                for i, (_position, component) in enumerate(self.levels):
                    steps[i] = self.steps[i] if component.step is not None else 1.0
                stride = np.where(stride > 0, stride * pick(steps, before[0]), stride)
            rows[_each("inner_stride_0", len(stride), 3)] = stride + 1.0
            rows[_each("inner_broadcast_0", len(stride), 3)] = stride == 0
            rows[_each("inner_contiguous_0", len(stride), 3)] = stride == 1
        rows[_N["last_reduce"]] = self.is_reduce[before[0]]

        full: Value = 1.0
        for extent, _is_reduce in shape.axes:
            full = full * env.get(extent)
        rows[_N["redundancy"]] = np.log2(np.maximum(points[-1] / np.maximum(full, 1.0), 2.0**-8)) * 0.125
        rows[_WALK_LOGS] = log2(rows[_WALK_LOGS])
        return rows

    def join(self, i: int) -> tuple[np.ndarray | bool, list[np.ndarray]]:
        """Whether the accesses let the loop of level `i` join those within it in a vector.

        Returns
        -------
        allowed : numpy.ndarray or bool
            bool ``[n]``
        ramps : list of numpy.ndarray
            bool ``[n]`` for each ranked access: whether its lanes are consecutive elements, or one element.
        """
        # Nests that differ in their cuts only ask again.
        while len(self._joined) <= i:
            level = len(self._joined)
            allowed: np.ndarray | bool = self.single[level]
            if not self.levels[level][1].is_reduce:
                allowed = True
                innermost = np.equal(self.positions[level], self.last)
                for lanes in self._lanes:
                    allowed = allowed & lanes.join(self, level, innermost)
            self._joined.append((allowed, [lanes.ramp for lanes in self._ranked]))
        return self._joined[i]


def count(holds: np.ndarray) -> np.ndarray:
    """In how many of ``L`` levels it holds: bool ``[L, ..., n]`` -> uint8 ``[..., n]``."""
    return np.add.reduce(holds.view(np.uint8), axis=0, dtype=np.uint8)


def pick(table: np.ndarray, row: np.ndarray) -> np.ndarray:
    """For each candidate, its value in the given row of a table ``[rows, n]``; `row` is ``[..., n]``."""
    n = table.shape[1]
    return table.ravel().take(row.astype(np.intp) * n + np.arange(n))


@dataclass
class Summary:
    """A nest's features, and what `unroll` needs besides.

    Attributes
    ----------
    features : numpy.ndarray
        float32 ``[n, len(schema.NEST)]``; the columns of `unroll` are zero.
    walk : Walk
    vector : numpy.ndarray
        float32 ``[n]``
    whole : numpy.ndarray
        bool ``[n]``, where all loops become a parallel one and the vector.
    inside : numpy.ndarray
        uint8 ``[n]``, how many of the innermost levels lie within every loop that holds another block or is
        parallel.
    which : numpy.ndarray
        Which of the walk's candidates they are: int ``[n]``.
    """

    features: np.ndarray
    walk: Walk
    vector: np.ndarray
    whole: np.ndarray
    inside: np.ndarray
    which: np.ndarray

    def take(self, which: np.ndarray | slice) -> Summary:
        """Of other candidates, by the number of the one here that they agree with."""
        return Summary(
            self.features[which], self.walk, self.vector[which], self.whole[which], self.inside[which],
            self.which[which],
        )  # fmt: skip


def summarise(
    nest: Nest, env: Env, *, cores: int = 1, parallel_limit: float = 0.0, vector_limit: float = 64.0,
    parallel: float | None = None,
) -> Summary:  # fmt: skip
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
    """
    walk = env.walks.get(nest.shape)
    if walk is None:
        walk = env.walks[nest.shape] = Walk(nest.shape, env)
    points, rows = walk.points, walk.rows
    cuts = [env.get(cut) for cut in nest.all_cuts()]
    held: Value = functools.reduce(np.maximum, cuts, -1.0)  # the innermost loop that holds another block

    depth, lengths, first = _vector(nest, walk, held, vector_limit)
    vector, *runs = pick(points, np.stack([depth, *lengths]))
    fused: Value = 1.0 if parallel is None else parallel
    # Nothing is unrolled across a loop that holds another block, nor across a parallel one.
    bound = held
    whole: np.ndarray | None = None
    if parallel is None and parallel_limit > 0:
        fused, last = _fused(nest, env, cuts, first, parallel_limit)
        bound = np.maximum(bound, last)
        if vector_limit > 1:
            whole = _whole(nest, walk, held)
    if whole is not None:
        fused = np.where(whole, np.ceil(points[-1] / vector_limit), fused)
        vector = np.where(whole, np.float32(vector_limit), vector)
        ramps = walk.join(len(walk.levels) - 1)[1]
        runs = [np.where(whole & ramp, vector, run) for ramp, run in zip(ramps, runs, strict=True)]
    rows[_N["vector"]] = vector
    for lanes in (16, 8, 4):
        rows[_N[f"vector_fill_{lanes}"]] = vector / (np.ceil(vector / lanes) * lanes)
    for lanes in (16, 8):
        rows[_N[f"vector_x{lanes}"]] = rows[_N[f"vector_fill_{lanes}"]] == 1.0
    rows[_N["scalar"]] = vector == 1.0
    # Schedules with 24, 40 or 48 lanes measured 2 to 4 times slower, on average, than with 16, 32 or 64.
    exponent = np.log2(vector)
    rows[_N["vector_power_of_2"]] = exponent == np.floor(exponent)
    rows[_N["vectors"]] = walk.accumulators / vector
    for k, run in enumerate(runs):
        rows[_N[f"vector_run_{k}"]] = run
        rows[_N[f"vector_whole_{k}"]] = run == vector

    rows[_N["parallel"]] = fused
    rows[_N["imbalance"]] = np.ceil(fused / cores) * cores / fused - 1.0
    rows[_N["grain"]] = points[-1] / fused
    rows[_LOGS] = log2(rows[_LOGS])
    rows[_N["inlined"]] = env.get(nest.inlined) if nest.inlined is not None else 0.0
    rows[_N["at_root"]] = env.get(nest.at_root) if nest.at_root is not None else 0.0
    features = rows.T.copy()
    if whole is not None:
        loops = np.stack([rows[_N["vector"]], rows[_N["parallel"]], np.zeros_like(vector)], axis=1)
        features[whole, _INNER] = loops[whole]
        features[whole, _N["loops"]] = 0.0625 * (1.0 + (rows[_N["parallel"]][whole] > 0))
    inside = np.full(env.n, len(walk.levels), dtype=np.uint8)
    if not np.all(np.less(bound, 0.0)):
        inside = functools.reduce(
            np.add, (np.greater(at, bound) for at in walk.positions), np.zeros_like(inside)
        )
    return Summary(
        features,
        walk,
        vector,
        np.zeros(env.n, dtype=bool) if whole is None else whole,
        inside,
        np.arange(env.n),
    )


def unroll(summary: Summary, limit: Value) -> np.ndarray:
    """What the compiler will make of the innermost loops of a nest: features `UNROLLED`.

    TVM's UnrollLoop unrolls from inside, as long as the body then holds no more than `limit` stores
    (``pragma_auto_unroll_max_step``), and LLVM what is as short as `LLVM_UNROLLS`. A loop that became lanes
    of a vector is no loop any more. Where everything within the innermost reduction is unrolled, LLVM can
    keep the accumulators in registers. The first loop that is left may become lanes too, of LLVM's making, as
    far as the accesses that are described tell. A loop that holds another block, or is parallel, ends the
    body, and counts as no loop around it.

    Parameters
    ----------
    summary : Summary
    limit : float or numpy.ndarray
        ``[n]`` where it depends on a decision.

    Returns
    -------
    numpy.ndarray
        float32 ``[n, .]``
    """
    walk, which, vector, whole = summary.walk, summary.which, summary.vector, summary.whole
    points, inside = walk.points[:, which], summary.inside

    def at(table: np.ndarray, level: np.ndarray) -> np.ndarray:
        return table.ravel().take(level.astype(np.intp) * table.shape[1] + which)

    # Where two axes became one, extents are estimates: what adds less than half a lane is no loop.
    in_vector = count(points[1:] <= vector + 0.5)
    lanes = pick(points, in_vector)
    tvm = np.maximum(np.minimum(count(points[1:] <= limit * lanes), inside), in_vector)
    per_vector = np.ceil(vector / REGISTER_LANES)  # registers
    body = count(points[1:] <= np.maximum(limit, LLVM_UNROLLS / per_vector) * lanes)
    body = np.maximum(np.minimum(body, inside), in_vector)
    size, spatial = pick(points, body), at(walk.spatial, body)
    # Accumulators stay in registers through the reductions that follow on the body.
    accumulated = pick(points, count(walk.spatial[1:, which] <= spatial)) / spatial
    rolled = count(points[1:] <= size)  # loops of one iteration are none
    rolled[rolled >= inside] = len(walk.levels)
    extent, is_reduce = log2(at(walk.extents, rolled)), walk.is_reduce[rolled]

    loads, broadcast, contiguous = np.zeros((3, ACCESSES, len(which)), dtype=np.float32)
    for k, elements in enumerate(walk.elements(slice(int(body.max(initial=0)) + 1))):
        touched, by_vector = at(elements, body), at(elements, in_vector)
        is_ramp = summary.features[:, _N[f"vector_whole_{k}"]] > 0
        # Lanes that are neither consecutive nor one element are gathered one by one.
        loaded = np.where(is_ramp, touched / by_vector * np.ceil(by_vector / REGISTER_LANES), touched)
        loads[k] = np.log2(np.maximum(loaded * lanes / (size * per_vector), 2.0**-12)) * 0.125
    stride = walk.strides.take(rolled, axis=1)
    broadcast[: len(stride)] = stays = stride == 0
    fresh = np.array([at(one, rolled) for one in walk.fresh], dtype=bool).reshape(stride.shape)
    contiguous[: len(stride)] = goes_on = (stride == 1) & fresh
    vectorisable = (vector == 1.0) & ~is_reduce & (stays | goes_on).all(0) & (contiguous[0] > 0)
    found = np.stack(
        [
            log2(pick(points, tvm) / lanes), (walk.accumulators[which] <= size) & walk.is_reduce.any(),
            np.log2(at(walk.bytes, body) / size) * 0.125, log2(spatial / lanes * per_vector), *loads,
            log2(accumulated), extent, is_reduce,
            extent * vectorisable, vectorisable & (np.mod(at(walk.extents, rolled), REGISTER_LANES) == 0),
            *broadcast, *contiguous,
        ],
        axis=1, dtype=np.float32,
    )  # fmt: skip
    if whole.any():
        found[whole] = 0.0
        found[whole, : 4 + ACCESSES] = _body_of_whole(summary)
    return found


def _body_of_whole(summary: Summary) -> np.ndarray:
    """The first features of `unroll` where all loops become one: the body is a vector, with its even share.

    Returns
    -------
    numpy.ndarray
        float32 ``[., 4 + ACCESSES]``, of those candidates alone.
    """
    walk, which, vector = summary.walk, summary.which[summary.whole], summary.vector[summary.whole]
    out = np.zeros((len(which), 4 + ACCESSES), dtype=np.float32)
    points, per_vector = walk.points[-1, which], np.ceil(vector / REGISTER_LANES)
    out[:, 2] = np.log2(walk.bytes[-1, which] / points) * 0.125
    out[:, 3] = log2(per_vector)
    for k, elements in enumerate(walk.elements(slice(-1, None))[:, 0, which]):
        is_ramp = summary.features[summary.whole, _N[f"vector_whole_{k}"]] > 0
        touched = np.maximum(vector * elements / points, 1.0)
        # Of a vector of its own an access may be a ramp that is none over all of the loops.
        loaded = np.where(is_ramp | (touched == 1.0), np.ceil(touched / REGISTER_LANES), vector)
        out[:, 4 + k] = np.log2(loaded / per_vector) * 0.125
    return out


_TOGETHER_OF = [_N["work"], _N["vector"], _N["points"], *range(*_TRAFFIC.indices(len(NEST)))]


def together(nests: Sequence[np.ndarray], depths: Sequence[Value], cores: int) -> np.ndarray:
    """What the costliest blocks of a program amount to: features `schema.TOGETHER`.

    Work is counted as it is (``all_work``), in registers full of lanes (``lane_work``), and as the thread
    with most of it has it (``thread_work``); bytes as those moved into each of the imagined memories. A block
    that is inlined counts for nothing, though its consumer then does its work. Each block that has a parallel
    loop of its own starts threads anew (``launches``).

    Parameters
    ----------
    nests : sequence of numpy.ndarray
        Features ``[n, len(NEST)]`` of each block, the costliest first.
    depths : sequence of float or numpy.ndarray
        Position of the other block's loop that it is computed under; negative for none.
    cores : int

    Returns
    -------
    numpy.ndarray
        float32 ``[n, len(TOGETHER)]``
    """
    n = len(nests[0])
    sums = np.zeros((3 + len(CAPACITIES), n), dtype=np.float32)
    main, launches = np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.float32)
    for i, (nest, depth) in enumerate(zip(nests, depths, strict=True)):
        work, vector, points, *traffic = np.exp2(8.0 * nest[:, _TOGETHER_OF].T)
        remains = 1.0 - nest[:, _N["inlined"]]
        lanes = work * remains / np.minimum(vector, REGISTER_LANES)
        sums[0] += work * remains
        sums[1] += lanes
        sums[2] += lanes * ((nest[:, _N["imbalance"]] + 1.0) / cores)
        sums[3:] += points * remains * traffic
        if i == 0:
            main = sums[2].copy()
        launches += remains * (nest[:, _N["parallel"]] > 0) * np.less(depth, 0.0)
    share = main / np.maximum(sums[2], 1e-6)
    return np.concatenate([log2(sums + 1.0), [launches * 0.25, share]]).T


class _Lanes:
    """One access across the loops that may become a vector, innermost first.

    RewriteParallelVectorizeUnroll fuses inner loops into a vector as long as no access forbids it: the first
    loop that an access depends on must have stride 1, unless it is the innermost, and each further one must
    go on where the last ended. Loops that it does not depend on are always welcome: an access may still be no
    ramp over the whole vector, and LLVM then gathers it lane by lane.
    """

    def __init__(self, access: Access, n: int) -> None:
        self._access = access
        self._next: Value = 1.0  # stride that goes on where the loops so far end; 1 before the first
        self._run = np.ones(n, dtype=bool)  # whether the lanes so far are consecutive elements
        self._same = np.ones(n, dtype=bool)  # whether they are one element
        self.ramp = self._same  # whether they are either

    def join(self, walk: Walk, i: int, innermost: np.ndarray | np.bool) -> np.ndarray | bool:
        """Let the loop of level `i` join those within it; True where the access allows it."""
        single, extent, points = walk.single[i], walk.extents[i], walk.points[i]
        component = walk.levels[i][1]
        stride = self._stride({component.axis: walk.steps[i], component.also: walk.also_steps[i]})
        if stride is None:
            self._run = self._run & single
            self.ramp = self._run | self._same
            return True
        allowed = (stride == self._next) | single
        allowed = allowed | (self._same & innermost)  # it is the first that the access depends on
        self._run = self._run & ((stride == points) | single)
        self._same = self._same & single
        self._next = np.where(single, self._next, stride * extent)
        self.ramp = self._run | self._same
        return allowed

    def _stride(self, steps: dict[int, Value]) -> Value | None:
        """Elements from one iteration to the next, as the postprocessor sees them: along one dimension.

        `steps` are those of the axes that move.
        """
        strides = self._access.buffer.strides
        for size, form in zip(reversed(strides), reversed(self._access.index), strict=True):
            for axis, step in steps.items():
                if c := form.get(axis, 0.0):
                    return abs(c) * size * step
        return None


def _vector(
    nest: Nest, walk: Walk, held: Value, limit: float
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """What becomes the vector: no loop as far out as `held`, whose body holds another block too.

    Returns
    -------
    depth : numpy.ndarray
        uint8 ``[n]``, how many levels.
    lengths : list of numpy.ndarray
        uint8 ``[n]``, over how many of them each ranked access is a ramp.
    first : numpy.ndarray
        float32 ``[n]``, the position of its outermost loop.
    """
    n = walk.points.shape[1]
    depth, goes_on = np.zeros(n, dtype=np.uint8), np.ones(n, dtype=bool)
    lengths = [depth.copy() for _access in nest.shape.rank]
    first = np.full(n, np.inf, dtype=np.float32)
    for i, (_position, component) in enumerate(walk.levels):
        position = walk.positions[i]
        goes_on &= np.greater(position, held)
        if not component.is_reduce:
            goes_on &= walk.points[i + 1] <= limit
        if not goes_on.any():
            break
        allowed, ramps = walk.join(i)
        goes_on &= allowed
        depth += goes_on
        first = np.where(goes_on & walk.open[i], np.float32(position), first)
        for length, ramp in zip(lengths, ramps, strict=True):
            length += goes_on & ramp
    return depth, lengths, first


def _whole(nest: Nest, walk: Walk, held: Value) -> np.ndarray | None:
    """Where all loops become one, which is split into a parallel loop and a vector; None if nowhere.

    That is where none is a reduction or holds another block, and all could join one vector.
    """
    if any(component.is_reduce for _position, component in nest.shape.levels):
        return None
    whole = (walk.points[-1] > 1.0) & np.less(held, 0.0)
    for i in range(len(walk.levels)):
        if not whole.any():
            return None
        whole &= walk.join(i)[0]
    return whole if whole.any() else None


def _fused(
    nest: Nest, env: Env, cuts: Sequence[Value], first: np.ndarray, limit: float
) -> tuple[np.ndarray, np.ndarray]:
    """The parallel loop: RewriteParallelVectorizeUnroll fuses outer loops up to the limit.

    `first` is the position of the vector's outermost loop: it takes precedence.

    Returns
    -------
    extent, last : numpy.ndarray
        float32 ``[n]``, `last` the position of the innermost loop that it is made of; -1 without any.
    """
    fused, last = np.ones(env.n, dtype=np.float32), np.full(env.n, -1.0, dtype=np.float32)
    goes_on = np.ones(env.n, dtype=bool)
    for at, component in reversed(nest.shape.levels):
        position, extent = env.get(at), env.get(component.extent)
        goes_on &= np.less(position, first)
        if component.is_reduce or component.serial:
            goes_on &= extent <= 1.0
            continue
        fused *= np.where(goes_on, extent, np.float32(1.0))
        last = np.where(goes_on & np.greater(extent, 1.0), np.float32(position), last)
        goes_on &= fused <= limit
        for cut in cuts:
            goes_on &= np.not_equal(cut, position)
        if not goes_on.any():
            break
    return fused, last
