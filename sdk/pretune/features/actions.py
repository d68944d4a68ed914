"""The action encoding: each instruction of a trace with its references resolved, for many candidates at once.

`ActionEncoder` reads the initial program once, then follows the instructions of one design space
symbolically: which loop a reference names, its extent as a function of the decisions, which block, which
buffers it touches and with what strides. After that, encoding ``n`` decision vectors is numpy on arrays of
length ``n``: no TVM object is touched and there is no loop over candidates.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pretune.features.nest import (
    Component,
    Env,
    Extent,
    Nest,
    NestLoop,
    Value,
    const,
    describe_block,
    from_block,
    log2,
    positions,
    product,
    quotient,
    shared,
    slot_value,
    span,
)
from pretune.features.program import Access, Block, Buffer
from pretune.features.schema import (
    ACTION,
    ACTION_TYPES,
    ANNOTATION,
    ANNOTATIONS,
    BLOCK,
    DECISION,
    FACTORS,
    LOOP,
    NEST,
    QUERIES,
    SUMMARY,
)
from pretune.features.state import describe_loop
from pretune.features.summary import UNROLLED, Summary, summarise, together, unroll
from pretune.space.slots import INLINE, ROOT

_log = logging.getLogger(__name__)
_warned: set[str] = set()
_unresolved: set[str] = set()

_ROOT_BLOCK = object()
"""What a reference to the root block names: not a nest, but not nothing either."""

_AT_NEST = 0
_AT_LOOP = _AT_NEST + len(NEST)
_AT_DECISION = _AT_LOOP + len(LOOP)
_AT_BLOCK = _AT_DECISION + len(DECISION)
_AT_ANNOTATION = _AT_BLOCK + len(BLOCK)
assert _AT_ANNOTATION + len(ANNOTATION) == len(ACTION)

_FOR_POSTPROC = ANNOTATIONS[:6]
"""Annotations that change nothing until the postprocessors read them: the ``Postproc`` actions carry them."""

MAX_POSTPROC = 6
"""Blocks for which a closing ``Postproc`` action is made, costliest first."""


@dataclass(frozen=True)
class Step:
    """One action of a design space.

    Attributes
    ----------
    name : str
        Instruction name, or ``"Postproc"``.
    type_id : int
        Its number in `schema.ACTION_TYPES`.
    slots : frozenset of int
        The decision slots that its features depend on; empty when it is the same for all candidates.
    features : callable
        ``Env -> float32 [n, len(schema.ACTION)]``.
    inst : int
        Position of the instruction in the trace; -1 for ``Postproc``. The program after it is the state that
        the transition has to predict.
    """

    name: str
    type_id: int
    slots: frozenset[int]
    features: Callable[[Env], np.ndarray]
    inst: int


@dataclass(frozen=True)
class _Location:
    """A compute location: drawn by a decision, or a fixed loop of a nest; `depth` is its position there."""

    nest: Nest
    slot: int | None
    depth: Extent
    loop: NestLoop | None = None


class ActionEncoder:
    """Actions of one design space.

    Parameters
    ----------
    blocks : sequence of program.Block
        The initial program, from `program.read_program`.
    insts : sequence
        The trace's instructions as TVM's JSON, ``[name, inputs, attrs, outputs]``, without postprocessing.
    cores : int
        Cores of the target.
    first : int
        Instructions before this one have made the program of `blocks`, and are no steps.

    Attributes
    ----------
    steps : list of Step
        In trace order, then a ``Postproc`` step for each block that remains.
    """

    def __init__(self, blocks: Sequence[Block], insts: Sequence[Any], cores: int, first: int = 0) -> None:
        self.cores = cores
        self.steps: list[Step] = []
        self._nests = [from_block(b) for b in blocks]
        self._values: dict[str, Any] = {}  # What each random variable of the trace names.
        self._slot = 0
        self._annotated: dict[str, Extent] = {}
        self._frozen: dict[tuple, Nest] = {}
        total = sum(n.static_points() * n.cost for n in self._nests) or 1.0
        self._share = {id(n): n.static_points() * n.cost / total for n in self._nests}
        self._inst = -1
        for position, (name, inputs, attrs, outputs) in enumerate(insts[first:], first):
            if name == "EnterPostproc":
                break
            self._inst = position
            self._instruction(name, inputs, attrs, outputs)
        self._inst = -1
        self._finish()

    # -- evaluation ------------------------------------------------------------------------------------------

    def encode(self, decisions: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
        """Encode a batch of decision vectors.

        Parameters
        ----------
        decisions : sequence of numpy.ndarray
            Per slot the decision values, int ``[n, width]``.

        Returns
        -------
        actions : list of numpy.ndarray
            Per step float32 ``[n, len(ACTION)]``, or ``[1, len(ACTION)]`` for a step without decisions.
        summary : numpy.ndarray
            float32 ``[n, len(SUMMARY)]``, for the ranker.
        """
        n = len(decisions[0]) if len(decisions) else 1
        env = Env(decisions, n)
        single = Env([s[:1] for s in decisions], 1)
        actions = [step.features(env if step.slots else single) for step in self.steps]
        return actions, self.summarise(env)

    def summarise(self, env: Env) -> np.ndarray:
        """The ranker's view of all actions together: float32 ``[n, len(SUMMARY)]``."""
        out = np.zeros((env.n, len(SUMMARY)), dtype=np.float32)
        left = self._final[:MAX_POSTPROC]
        nests = [out[:, i * len(NEST) : (i + 1) * len(NEST)] for i in range(len(left[:2]))]
        nests += [np.empty((env.n, len(NEST)), dtype=np.float32) for _nest in left[2:]]
        for features, nest in zip(nests, left, strict=True):
            self._describe_nest(features, nest, env, unrolled=True)
        if len(left) > 2:
            out[:, 2 * len(NEST) : 3 * len(NEST)] = functools.reduce(np.maximum, nests[2:])
        tail = 3 * len(NEST)
        if left:
            out[:, tail : tail + len(BLOCK)] = describe_block(
                self._final[0], self._share.get(id(self._final[0]), 0.0)
            )
        tail += len(BLOCK)
        unroll = self._annotated.get("meta_schedule.unroll_explicit")
        if unroll is not None:
            out[:, tail] = np.log2(env.get(unroll) + 1.0) * 0.1
        out[:, tail + 1] = len(self._final) * 0.125
        out[:, tail + 2] = "meta_schedule.parallel" in self._annotated
        if left:
            depths = [-1.0 if nest.depth is None else env.get(nest.depth) for nest in left]
            out[:, tail + 3 :] = together(nests, depths, self.cores)
        return out

    # -- following the trace ---------------------------------------------------------------------------------

    def _instruction(self, name: str, inputs: list, attrs: list, outputs: list) -> None:
        self._look_up(name, inputs)
        handler = getattr(self, "_do_" + name.lower(), None)
        before = self._slot
        if handler is not None:
            handler(inputs, attrs, outputs)
        elif name.startswith("Sample"):
            self._sample(outputs)
        elif name not in QUERIES:
            self._generic(name, inputs, attrs, outputs)
        if name.startswith("Sample") and self._slot == before:
            self._slot += 1

    def _look_up(self, name: str, inputs: list) -> None:
        """Say so, once per kind of instruction, if a reference names nothing: less is known of the action."""
        references = (i for i in _flat(inputs) if isinstance(i, str) and not _is_text(i))
        if name not in _unresolved and any(self._values.get(i) is None for i in references):
            _unresolved.add(name)
            _log.info("instruction %s refers to something that this version cannot follow", name)

    def _generic(self, name: str, inputs: list, attrs: list, outputs: list) -> None:
        """An instruction without a rule of its own: its type, the block and the loop that it names.

        What it makes goes by the names of these, so that later instructions refer to something.
        """
        if name not in ACTION_TYPES and name not in _warned:
            _warned.add(name)
            _log.warning("instruction %s is not known to this version: encoded by what it names only", name)
        named = [self._values.get(i) for i in _flat(inputs) if isinstance(i, str)]
        block = next((v for v in named if isinstance(v, Nest)), None)
        loop = next((v for v in named if isinstance(v, NestLoop)), None)
        values = [a for a in attrs if isinstance(a, int | float) and not isinstance(a, bool)]
        self._add(name, block=block, loop=loop, value=const(abs(values[0])) if values else None)
        if block is None:
            block = next((n for n in self._nests if not n.gone and loop in n.loops), None)
        if loop is None and block is not None and block.loops:
            loop = block.loops[-1]
        # TVM's JSON tells blocks, loops and numbers apart by their names: b0, l1, v2.
        made = {"b": block, "l": loop}
        self._values.update((out, made[out[0]]) for out in outputs if out[0] in made)

    def _nest_by_name(self, name: str) -> Nest | None:
        return next((n for n in self._nests if n.name == name and not n.gone), None)

    def _do_getsblock(self, inputs: list, attrs: list, outputs: list) -> None:
        self._values[outputs[0]] = _ROOT_BLOCK if attrs[0] == "root" else self._nest_by_name(attrs[0])

    _do_getblock = _do_getsblock

    def _do_getloops(self, inputs: list, attrs: list, outputs: list) -> None:
        nest = self._values.get(inputs[0])
        loops = list(nest.loops) if isinstance(nest, Nest) else []
        # Where more are known than TVM names, those that are surely absent, as under a fixed location, go
        # first, then those of one iteration.
        for surely in (_is_absent, _is_trivial):
            gone = [loop for loop in loops if surely(loop)][: max(len(loops) - len(outputs), 0)]
            loops = [loop for loop in loops if loop not in gone]
        # A replay keeps the number of loops; where ours differs the innermost ones are the sure ones.
        for out, loop in zip(reversed(outputs), reversed(loops), strict=False):
            self._values[out] = loop

    def _do_getconsumers(self, inputs: list, attrs: list, outputs: list) -> None:
        for out, nest in zip(outputs, self._consumers(self._values.get(inputs[0])), strict=False):
            self._values[out] = nest

    def _do_getproducers(self, inputs: list, attrs: list, outputs: list) -> None:
        for out, nest in zip(outputs, self._producers(self._values.get(inputs[0])), strict=False):
            self._values[out] = nest

    def _do_getchildblocks(self, inputs: list, attrs: list, outputs: list) -> None:
        parent = self._values.get(inputs[0])
        children = [n for n in self._nests if not n.gone]
        if isinstance(parent, NestLoop):
            children = [n for n in children if parent in n.loops]
        elif parent is not _ROOT_BLOCK:  # a block made of a part of a nest still is that nest here
            children = [parent] if isinstance(parent, Nest) else []
        self._name(outputs, children)

    def _do_getoutputblocks(self, inputs: list, attrs: list, outputs: list) -> None:
        self._name(outputs, [n for n in self._nests if not n.gone and n.written and not self._consumers(n)])

    def _name(self, outputs: list, blocks: list[Nest]) -> None:
        if len(outputs) == len(blocks):  # else it is not known which is which
            self._values.update(zip(outputs, blocks, strict=True))

    def _consumers(self, nest: Any) -> list[Nest]:
        if not isinstance(nest, Nest) or nest.written is None:
            return []
        buffer = nest.written
        return [
            n for n in self._nests
            if n is not nest and not n.gone and any(a.buffer is buffer and not a.is_write for a in n.accesses)
        ]  # fmt: skip

    def _producers(self, nest: Any) -> list[Nest]:
        if not isinstance(nest, Nest):
            return []
        reads = {id(a.buffer) for a in nest.accesses if not a.is_write}
        return [
            n
            for n in self._nests
            if n is not nest and not n.gone and n.written is not None and id(n.written) in reads
        ]

    def _sample(self, outputs: list) -> None:
        for column, out in enumerate(outputs):
            self._values[out] = slot_value(self._slot, column)
        self._slot += 1

    def _do_samplecategorical(self, inputs: list, attrs: list, outputs: list) -> None:
        slot = self._slot
        table = np.array([float(v) for v in attrs[0]], dtype=np.float32)

        def evaluate(env: Env) -> Value:
            return table[np.clip(env.columns[slot][0].astype(np.int64), 0, len(table) - 1)]

        self._values[outputs[0]] = Extent(evaluate, frozenset({slot}))
        self._slot += 1

    def _do_samplecomputelocation(self, inputs: list, attrs: list, outputs: list) -> None:
        consumers = self._consumers(self._values.get(inputs[0]))
        if consumers:
            self._values[outputs[0]] = _Location(consumers[0], self._slot, slot_value(self._slot, 0))
        self._slot += 1

    def _extent(self, value: Any) -> Extent | None:
        if isinstance(value, str):
            value = self._values.get(value)
        if isinstance(value, Extent):
            return value
        return const(value) if isinstance(value, int | float) else None

    def _do_split(self, inputs: list, attrs: list, outputs: list) -> None:
        loop = self._values.get(inputs[0])
        if not isinstance(loop, NestLoop):
            self._add("Split")
            return
        factors = [self._extent(f) for f in inputs[1:]]
        known = [f for f in factors if f is not None]
        parts = [f if f is not None else quotient(loop.extent, known) for f in factors]
        if _is_trivial(loop):
            # Splitting a loop of one iteration is no event; the parts still need names.
            one = replace(loop.components[-1], extent=const(1.0), is_reduce=loop.is_reduce)
            ones = [NestLoop([replace(one)], loop.present) for _ in parts]
            self._replace([loop], ones)
            self._values.update(zip(outputs, ones, strict=False))
            return
        # A split of a fused loop is laid to the innermost of its axes.
        inner = loop.components[-1]
        new = [
            NestLoop([replace(inner, extent=part, step=_further(inner.step, parts[i + 1 :]))], loop.present)
            for i, part in enumerate(parts)
        ]
        owner = self._replace([loop], new)
        for out, made in zip(outputs, new, strict=False):
            self._values[out] = made
        self._add("Split", block=owner, loop=loop, factors=parts)

    def _do_fuse(self, inputs: list, attrs: list, outputs: list) -> None:
        loops = [v for v in (self._values.get(i) for i in inputs) if isinstance(v, NestLoop)]
        if not loops:
            self._add("Fuse")
            return
        fused = NestLoop([c for loop in loops for c in loop.components], _any([x.present for x in loops]))
        owner = self._replace(loops, [fused])
        self._values[outputs[0]] = fused
        self._add("Fuse", block=owner, loop=fused, factors=[loop.extent for loop in loops][:FACTORS])

    def _replace(self, old: list[NestLoop], new: list[NestLoop]) -> Nest | None:
        """Put `new` where the first of `old` stood, in every nest that holds it; returns the costliest."""
        owners = [n for n in self._nests if not n.gone and any(loop in n.loops for loop in old)]
        for nest in owners:
            first = min(nest.loops.index(loop) for loop in old if loop in nest.loops)
            kept = [loop for loop in nest.loops if loop not in old]
            nest.loops = kept[:first] + new + kept[first:]
        return max(owners, key=lambda n: self._share.get(id(n), 0.0), default=None)

    def _do_reorder(self, inputs: list, attrs: list, outputs: list) -> None:
        loops = [v for v in (self._values.get(i) for i in inputs) if isinstance(v, NestLoop)]
        owners = [n for n in self._nests if not n.gone and loops and all(loop in n.loops for loop in loops)]
        for nest in owners:
            places = sorted(nest.loops.index(loop) for loop in loops)
            for place, loop in zip(places, loops, strict=True):
                nest.loops[place] = loop
        owner = owners[0] if owners else None
        self._add("Reorder", block=owner, nest=owner)

    def _do_computeinline(self, inputs: list, attrs: list, outputs: list) -> None:
        nest = self._values.get(inputs[0])
        if isinstance(nest, Nest):
            for consumer in self._consumers(nest):
                _inline_into(nest, consumer)
            nest.gone = True
        self._add("ComputeInline", block=nest if isinstance(nest, Nest) else None)

    def _do_reversecomputeinline(self, inputs: list, attrs: list, outputs: list) -> None:
        nest = self._values.get(inputs[0])
        if isinstance(nest, Nest):
            for producer in self._producers(nest)[:1]:
                _append_to(producer, nest)
            nest.gone = True
        self._add("ReverseComputeInline", block=nest if isinstance(nest, Nest) else None)

    def _location(self, value: Any) -> _Location | None:
        if isinstance(value, _Location):
            return value
        if isinstance(value, NestLoop):
            for nest in self._nests:
                if not nest.gone and value in nest.loops:
                    return _Location(nest, None, positions(nest.loops)[nest.loops.index(value)], value)
        return None

    def _do_computeat(self, inputs: list, attrs: list, outputs: list, reverse: bool = False) -> None:
        name = "ReverseComputeAt" if reverse else "ComputeAt"
        nest, location = self._values.get(inputs[0]), self._location(self._values.get(inputs[1]))
        if not isinstance(nest, Nest) or location is None or location.nest is nest:
            self._add(name, block=nest if isinstance(nest, Nest) else None)
            return
        _move(nest, location, reverse)
        where = location.depth, len(location.nest.loops)
        self._add(name, block=nest, nest=nest, loop=location.loop, location=where)

    def _do_reversecomputeat(self, inputs: list, attrs: list, outputs: list) -> None:
        self._do_computeat(inputs, attrs, outputs, reverse=True)

    def _do_rfactor(self, inputs: list, attrs: list, outputs: list) -> None:
        loop = self._values.get(inputs[0])
        owner = next((n for n in self._nests if not n.gone and loop in n.loops), None)
        if not isinstance(loop, NestLoop) or owner is None or owner.written is None:
            self._add("RFactor")
            return
        at = owner.loops.index(loop)
        made = _rfactor(owner, loop)
        self._nests.insert(self._nests.index(owner), made)
        share = self._share.get(id(owner), 0.0)
        self._share |= {id(made): share, id(owner): share / 16}  # to combine is little work
        self._values[outputs[0]] = made
        self._add("RFactor", block=made, nest=made, loop=made.loops[at])

    def _cache(self, name: str, inputs: list, attrs: list, outputs: list) -> None:
        nest = self._values.get(inputs[0])
        if not isinstance(nest, Nest) or nest.written is None:
            self._add(name)
            return
        index = attrs[0] if attrs and isinstance(attrs[0], int) else 0
        scope = next((a.strip('"') for a in attrs if isinstance(a, str)), "local")
        if name == "CacheWrite":
            made = _copy_nest(nest.written, scope, name=f"{nest.written.name}_{scope}", write=True)
            for access in nest.accesses:
                if access.buffer is nest.written and access.is_write:
                    access.buffer = made.accesses[1].buffer
        else:
            reads = [a for a in nest.accesses if not a.is_write]
            if index >= len(reads):
                self._add(name, block=nest)
                return
            made = _copy_nest(
                reads[index].buffer, scope, name=f"{reads[index].buffer.name}_{scope}", write=False
            )
            reads[index].buffer = made.accesses[0].buffer
        nest.rerank()
        self._nests.append(made)
        self._share[id(made)] = 0.0
        self._values[outputs[0]] = made
        self._add(name, block=nest, nest=made)

    def _do_cachewrite(self, inputs: list, attrs: list, outputs: list) -> None:
        self._cache("CacheWrite", inputs, attrs, outputs)

    def _do_cacheread(self, inputs: list, attrs: list, outputs: list) -> None:
        self._cache("CacheRead", inputs, attrs, outputs)

    def _do_annotate(self, inputs: list, attrs: list, outputs: list) -> None:
        key = attrs[0].strip('"') if isinstance(attrs[0], str) else "other"
        target = self._values.get(inputs[0])
        value = self._extent(inputs[1]) if not _is_text(inputs[1]) else None
        if value is not None and key.startswith("meta_schedule."):
            self._annotated[key] = value
        if key in _FOR_POSTPROC:
            return
        block = target if isinstance(target, Nest) else None
        loop = target if isinstance(target, NestLoop) else None
        self._add("Annotate", block=block, loop=loop, key=key, value=value)

    def _do_unannotate(self, inputs: list, attrs: list, outputs: list) -> None:
        key = attrs[0].strip('"') if attrs and isinstance(attrs[0], str) else "other"
        if key in _FOR_POSTPROC:
            return
        target = self._values.get(inputs[0])
        self._add("Unannotate", block=target if isinstance(target, Nest) else None, key=key)

    # -- features --------------------------------------------------------------------------------------------

    def _add(
        self, name: str, *, block: Nest | None = None, nest: Nest | None = None, loop: NestLoop | None = None,
        factors: list[Extent] | None = None, value: Extent | None = None, key: str | None = None,
        location: tuple[Extent, int] | None = None,
    ) -> None:  # fmt: skip
        """Append a step. What it describes is frozen now: later instructions change the nests."""
        base = np.zeros(len(ACTION), dtype=np.float32)
        if block is not None:
            base[_AT_BLOCK:_AT_ANNOTATION] = describe_block(block, self._share.get(id(block), 0.0))
        if key is not None:
            base[_AT_ANNOTATION + ANNOTATIONS.index(key if key in ANNOTATIONS else "other")] = 1.0
        slots: frozenset[int] = frozenset()
        loop_extent: Extent | None = None
        if loop is not None:
            loop_extent = loop.extent
            inner = loop.components[-1]
            depth = len(block.loops) if block is not None else 1
            place = block.loops.index(loop) if block is not None and loop in block.loops else 0
            accesses = block.rank if block is not None else []
            axis = inner.axis if any(a.stride(inner.axis) for a in accesses) else inner.also
            base[_AT_LOOP:_AT_DECISION] = describe_loop(1.0, loop.is_reduce, place, depth, accesses, axis)
            slots |= loop_extent.slots
        frozen = self._freeze(nest) if nest is not None else None
        if frozen is not None:
            slots |= frozen.slots()
        for extent in (*(factors or ()), value, location[0] if location else None):
            if extent is not None:
                slots |= extent.slots
        unrolled = name == "Postproc"
        at_value = _AT_ANNOTATION + len(ANNOTATIONS) if key is not None else _AT_DECISION + FACTORS + 3

        def features(env: Env) -> np.ndarray:
            out = np.empty((env.n, len(base)), dtype=np.float32)
            if frozen is not None:
                self._describe_nest(out[:, _AT_NEST:_AT_LOOP], frozen, env, unrolled=unrolled)
                out[:, _AT_LOOP:] = base[_AT_LOOP:]
            else:
                out[:] = base
            if loop_extent is not None:
                out[:, _AT_LOOP] = log2(env.get(loop_extent))
            if factors:
                for i, factor in enumerate(factors[-FACTORS:]):
                    out[:, _AT_DECISION + i] = log2(env.get(factor))
                last = env.get(factors[-1])
                at = _AT_DECISION + FACTORS
                out[:, at] = np.asarray(np.mod(last, 16.0) == 0)
                out[:, at + 1] = np.asarray(np.mod(last, 8.0) == 0)
                out[:, at + 2] = np.asarray(np.mod(last, 2.0) == 1)
            if value is not None:
                out[:, at_value] = np.log2(np.abs(env.get(value)) + 1.0) * 0.1
            if location is not None:
                out[:, _AT_DECISION + FACTORS + 4] = (env.get(location[0]) + 2.0) / (location[1] + 2.0)
            return out

        type_id = ACTION_TYPES.index(name if name in ACTION_TYPES else "other")
        self.steps.append(Step(name, type_id, slots, features, self._inst))

    def _freeze(self, nest: Nest) -> Nest:
        """The nest as it is now; the same object as long as nothing about it changed."""
        key = (
            nest.name, *nest.ops, *(id(loop) for loop in nest.loops), *(id(a.buffer) for a in nest.accesses),
            id(nest.inlined), *(id(cut) for cut in nest.all_cuts()),
            *(id(other.depth) for other in self._nests if not other.gone),  # of `alone`
        )  # fmt: skip
        if key not in self._frozen:
            accesses = [Access(a.buffer, a.is_write, list(a.index)) for a in nest.accesses]
            frozen = Nest(
                nest.name, list(nest.axes), accesses, list(nest.ops), list(nest.loops), nest.has_init,
                nest.inlined, nest.at_root, cuts=nest.all_cuts(), depth=nest.depth,
                alone=self._alone(nest),
            )  # fmt: skip
            for other in self._frozen.values():
                if (other.loops, other.accesses, other.axes, other.ops) == (
                    frozen.loops, frozen.accesses, frozen.axes, frozen.ops
                ):  # fmt: skip
                    frozen.shape = other.shape  # Only what hangs under them differs.
                    break
            self._frozen[key] = frozen
        return self._frozen[key]

    def _alone(self, nest: Nest) -> Extent:
        """Whether a nest shares no loop with a reduction: TVM then unrolls nothing of it."""
        paths = [_path(nest, other) for other in self._nests if other.is_reduce and not other.gone]
        found = [path for path in paths if path is not None]

        def evaluate(env: Env) -> Value:
            shares = [functools.reduce(np.minimum, map(env.get, path), np.inf) for path in found]
            return np.less(functools.reduce(np.maximum, shares, -np.inf), 0.0)

        return Extent(evaluate, frozenset().union(*(depth.slots for path in found for depth in path)))

    def _summary_of(self, nest: Nest, env: Env) -> Summary:
        if nest not in env.summaries:
            env.summaries[nest] = self._find_summary(nest, env)
        return env.summaries[nest]

    def _find_summary(self, nest: Nest, env: Env) -> Summary:
        if env.whole is not None:
            whole, rows = env.whole
            return self._summary_of(nest, whole).take(rows)
        few, which = env.distinct(nest.slots())
        return self._summarise_nest(nest, env) if which is None else self._summary_of(nest, few).take(which)

    def _summarise_nest(self, nest: Nest, env: Env) -> Summary:
        limit = self._annotated.get("meta_schedule.parallel")
        vector = self._annotated.get("meta_schedule.vectorize")
        return summarise(
            nest, env, cores=self.cores,
            parallel_limit=float(np.max(env.get(limit))) if limit is not None and not limit.slots else 0.0,
            vector_limit=float(np.max(env.get(vector))) if vector is not None and not vector.slots else 1.0,
        )  # fmt: skip

    def _describe_nest(self, out: np.ndarray, nest: Nest, env: Env, *, unrolled: bool) -> None:
        """Write features `schema.NEST` to `out`; with `unrolled`, as postprocessing leaves the nest."""
        out[:] = self._summary_of(nest, env).features
        if unrolled:
            out[:, UNROLLED] = self._unrolled(nest, env)

    def _unrolled(self, nest: Nest, env: Env) -> np.ndarray:
        if nest not in env.unrolled:
            env.unrolled[nest] = self._find_unrolled(nest, env)
        return env.unrolled[nest]

    def _find_unrolled(self, nest: Nest, env: Env) -> np.ndarray:
        if env.whole is not None:
            whole, rows = env.whole
            return self._unrolled(nest, whole)[rows]
        limit = self._annotated.get("meta_schedule.unroll_explicit", const(0))
        few, which = env.distinct(nest.slots() | limit.slots)
        if which is not None:
            return self._unrolled(nest, few)[which]
        steps = env.get(limit)
        if nest.alone is not None and not nest.is_reduce:
            steps = np.where(env.get(nest.alone), 0.0, steps)
        return unroll(self._summary_of(nest, env), steps)

    def _finish(self) -> None:
        """Close with one ``Postproc`` step per block that remains, costliest last."""
        left = [n for n in self._nests if not n.gone]
        left.sort(key=lambda n: (-self._share.get(id(n), 0.0), n.name))
        self._final = [self._freeze(n) for n in left]
        for nest, frozen in zip(left, self._final, strict=True):
            self._share[id(frozen)] = self._share.get(id(nest), 0.0)
        unroll = self._annotated.get("meta_schedule.unroll_explicit")
        for nest in reversed(left[:MAX_POSTPROC]):
            self._add("Postproc", block=nest, nest=nest, value=unroll)


def _path(a: Nest, b: Nest) -> list[Extent] | None:
    """The depths at which nests hang under each other between two of them; None if they do not."""
    above: list[tuple[Nest, list[Extent]]] = [(a, [])]
    while (last := above[-1][0]).anchor is not None and last.depth is not None:
        above.append((last.anchor, [*above[-1][1], last.depth]))
    depths: list[Extent] = []
    nest: Nest | None = b
    while nest is not None:
        for one, between in above:
            if one is nest:
                return between + depths
        if nest.depth is not None:
            depths.append(nest.depth)
        nest = nest.anchor
    return None


def _flat(values: Any) -> list[Any]:
    out: list[Any] = []
    for v in values:
        out.extend(_flat(v) if isinstance(v, list) else [v])
    return out


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.startswith('"')


def _inline_into(nest: Nest, consumer: Nest) -> None:
    """Move the body of `nest` into `consumer`: its operations, and its reads through the composed index."""
    buffer = nest.written
    if buffer is None:
        return
    write = next(a for a in nest.accesses if a.is_write)
    axis_of_dim = [max(form, key=lambda v: abs(form[v])) if form else None for form in write.index]
    kept, added = [], []
    for access in consumer.accesses:
        if access.buffer is not buffer or access.is_write:
            kept.append(access)
            continue
        bound = {axis: access.index[d] for d, axis in enumerate(axis_of_dim) if axis is not None}
        for read in nest.accesses:
            if read.is_write:
                continue
            added.append(Access(read.buffer, False, [_compose(form, bound) for form in read.index]))
    for access in added:
        if not any(k.buffer is access.buffer and k.index == access.index for k in kept):
            kept.append(access)
    consumer.accesses = kept
    consumer.ops = [a + b for a, b in zip(consumer.ops, nest.ops, strict=True)]
    consumer.rerank()


def _compose(form: dict, bound: dict[Any, dict]) -> dict:
    out: dict = {}
    for axis, c in form.items():
        for var, k in bound.get(axis, {}).items():
            out[var] = out.get(var, 0.0) + c * k
    return out


def _append_to(producer: Nest, nest: Nest) -> None:
    """Move the body of the consumer `nest` behind `producer`, which then writes the consumer's buffer."""
    write = next((a for a in nest.accesses if a.is_write), None)
    own = next((a for a in producer.accesses if a.is_write), None)
    if write is None or own is None:
        return
    for access in producer.accesses:
        if (
            access.buffer is own.buffer
            and access.is_write
            and len(write.buffer.shape) == len(own.buffer.shape)
        ):
            access.buffer = write.buffer
    producer.accesses += [a for a in nest.accesses if not a.is_write and a.buffer is not own.buffer]
    producer.ops = [a + b for a, b in zip(producer.ops, nest.ops, strict=True)]
    producer.rerank()


def _move(nest: Nest, location: _Location, reverse: bool) -> None:
    """Put `nest` under a loop of the location's nest: its own loops then cover only the region needed."""
    anchor = location.nest
    where = location.depth  # ROOT and INLINE are no position
    # With `reverse`, the anchor produces what `nest` reads; otherwise it consumes what `nest` writes.
    buffer = anchor.written if reverse else nest.written
    need = next((a for a in anchor.accesses if a.buffer is buffer and a.is_write == reverse), None)
    have = next((a for a in nest.accesses if a.buffer is buffer and a.is_write != reverse), None)

    def around(position: Extent) -> Extent:
        """Whether a loop of the anchor is then around the nest."""
        return Extent(
            lambda env: np.less_equal(env.get(position), env.get(where)), position.slots | where.slots
        )

    def within(position: Extent) -> Extent:
        return Extent(lambda env: np.greater(env.get(position), env.get(where)), position.slots | where.slots)

    axis_dim: dict[int, int] = {}  # own axis -> dimension of the shared buffer
    anchor_axis: dict[int, int] = {}  # anchor's axis -> own axis along the same dimension
    if need is not None and have is not None:
        for d, form in enumerate(have.index):
            if form:
                own = max(form, key=lambda v: abs(form[v]))
                axis_dim.setdefault(own, d)
                for axis in need.index[d]:
                    anchor_axis.setdefault(axis, own)

    outer = []
    inner: list[Component] = []
    for position, loop in zip(positions(anchor.loops), anchor.loops, strict=False):
        here, below = around(position), within(position)
        parts = []
        for c in loop.components:
            own = anchor_axis.get(c.axis, -1)
            axis, step = nest.parts.get(own, (own, None))
            extent, also = _where(here, c.extent), own if axis != own else -1
            parts.append(Component(axis, extent, False, also, step, c.is_reduce or c.serial))
        outer.append(NestLoop(parts, _both(here, loop.present)))
        inner += [replace(c, extent=_where(below, c.extent)) for c in loop.components]
    slots = where.slots.union(*(c.slots for c in inner))

    axes = {axis for c in inner for axis in (c.axis, c.also) if axis >= 0}
    tiles = {axis: _tile(axis, [c for c in inner if axis in (c.axis, c.also)]) for axis in axes}

    def needed(env: Env, d: int) -> Value:
        assert need is not None
        form = need.index[d]
        return span(need.buffer.shape[d], form, {a: env.get(tile) for a, tile in tiles.items() if a in form})

    whole = [e for e, _r in nest.axes]
    # At the root a nest keeps its loops. Mostly these are its axes in order, the same as loops made anew, and
    # no second set is needed.
    stays = location.slot is not None and [[c.axis for c in loop.components] for loop in nest.loops] != [
        [i] for i in range(len(nest.axes))
    ]
    moved = Extent(lambda env: np.greater_equal(env.get(where), 0.0), where.slots)
    loops = outer
    for i, (extent, is_reduce) in enumerate(nest.axes):
        if i in axis_dim and not is_reduce:

            def evaluate(env: Env, d: int = axis_dim[i], full: Extent = whole[i]) -> Value:
                return np.minimum(needed(env, d), env.get(full))

            extent = Extent(evaluate, slots | extent.slots)
        loops.append(nest.loop_over(i, _where(moved, extent) if stays else extent))
        if stays:
            loops[-1].present = moved
    if stays:
        kept = Extent(lambda env: np.less(env.get(where), 0.0), where.slots)
        loops += [
            NestLoop(
                [replace(c, extent=_where(kept, c.extent)) for c in loop.components],
                _both(kept, loop.present),
            )
            for loop in nest.loops
        ]
    nest.loops = loops
    nest.anchor, nest.depth = anchor, where
    # The loop is shared with whatever the anchor itself was moved under.
    cut: Extent = where
    holder: Nest | None = anchor
    while holder is not None:
        holder.cuts.append(cut)
        if holder.depth is not None:
            cut = shared(cut, holder.depth)
        holder = holder.anchor
    if location.slot is not None:
        nest.inlined = Extent(lambda env: np.equal(env.get(where), INLINE).astype(np.float32), where.slots)
        nest.at_root = Extent(lambda env: np.equal(env.get(where), ROOT).astype(np.float32), where.slots)


def _tile(axis: int, components: Sequence[Component]) -> Extent:
    """Points of an axis that loops over it span together, outermost first."""

    def evaluate(env: Env) -> Value:
        tile: Value = 1.0
        for c in reversed(components):
            extent = env.get(c.extent)
            if c.step is None or c.also == axis:
                tile = tile * extent
            else:
                tile = tile + env.get(c.step) * (extent - 1.0)
        return tile

    return Extent(evaluate, frozenset().union(*(c.slots for c in components)))


def _where(holds: Extent, extent: Extent) -> Extent:
    """`extent` where that holds, else 1."""

    def evaluate(env: Env) -> Value:
        here, value = env.get(holds), env.get(extent)
        if np.ndim(here) == 0:
            return value if here else 1.0
        return np.where(here, np.asarray(value, np.float32), np.float32(1.0))

    return Extent(evaluate, extent.slots | holds.slots)


def _is_absent(loop: NestLoop) -> bool:
    """Whether there is no such loop, whatever the decisions."""
    return loop.present is not None and not loop.present.slots and not Env([], 1).get(loop.present)


def _is_trivial(loop: NestLoop) -> bool:
    """Whether the loop is one iteration, whatever the decisions."""
    return not loop.extent.slots and Env([], 1).get(loop.extent) == 1.0


def _both(a: Extent, b: Extent | None) -> Extent:
    if b is None:
        return a
    return Extent(lambda env: np.logical_and(env.get(a), env.get(b)), a.slots | b.slots)


def _any(holds: Sequence[Extent | None]) -> Extent | None:
    """Whether any holds; None stands for what always does."""
    known = [one for one in holds if one is not None]
    if len(known) < len(holds):
        return None
    return Extent(
        lambda env: functools.reduce(np.logical_or, map(env.get, known)),
        frozenset().union(*(one.slots for one in known)),
    )


def _further(step: Extent | None, within: Sequence[Extent]) -> Extent | None:
    """By how much the axis of a loop moves that stands around loops of such a step."""
    return step if step is None or not within else product([step, *within])


def _rfactor(owner: Nest, loop: NestLoop) -> Nest:
    """Split a reduction in two: the new block keeps partial results over `loop`, `owner` combines them.

    As TVM does, both have the axis of the partial results first, so that loops made anew begin with it, and
    the new block one axis for what remains of the reduction.
    """
    write = next(a for a in owner.accesses if a.is_write)
    part = loop.components[-1].extent
    spatial = [i for i, (_extent, is_reduce) in enumerate(owner.axes) if not is_reduce]
    reduced = [i for i, (_extent, is_reduce) in enumerate(owner.axes) if is_reduce]
    whole = product([owner.axes[i][0] for i in reduced])
    most = 1 << 20 if whole.slots else int(Env([], 1).get(whole))
    shape = (*write.buffer.shape, most)  # of the last dimension, as many as decisions tell
    partial = Buffer(write.buffer.name + ".rf", shape, write.buffer.itemsize, write.buffer.scope, True)

    # In the new block the loop is spatial and stands for an axis of its own beside the reduced one, which all
    # that was reduced over is a quotient or a remainder of.
    placed = {i: at + 1 for at, i in enumerate(spatial)}
    rest = len(spatial) + 1
    slope, moved = 1.0, dict(placed)
    slopes = dict.fromkeys(placed, 1.0)
    for i in reversed(reduced):
        moved[i], slopes[i] = rest, slope
        extent = owner.axes[i][0]
        slope /= 1.0 if extent.slots else float(Env([], 1).get(extent))

    def later(form: dict) -> dict:
        out: dict = {}
        for axis, c in form.items():
            if axis in moved:
                out[moved[axis]] = max(out.get(moved[axis], 0.0), c * slopes[axis], key=abs)
        return out

    over = [other for other in owner.loops if other.is_reduce]
    innermost = over[-1:] == [loop] and len(over) > 1  # then its axis goes on by `part` in what remains
    made = Nest(
        owner.name + "_rf",
        [(part, False), *(owner.axes[i] for i in spatial), (quotient(whole, [part]), True)],
        [
            Access(partial, True, [*map(later, a.index), {0: 1.0}]) if a.buffer is write.buffer
            else Access(a.buffer, a.is_write, [*map(later, a.index)])
            for a in owner.accesses
        ],
        list(owner.ops),
        [
            NestLoop([Component(rest, part, False, 0)], loop.present) if other is loop
            else NestLoop([replace(c, axis=moved.get(c.axis, -1)) for c in other.components], other.present)
            for other in owner.loops
        ],
        owner.has_init,
        parts={0: (rest, const(1) if innermost else None), **({rest: (rest, part)} if innermost else {})},
    )  # fmt: skip
    owner.axes = [(part, True), *(owner.axes[i] for i in spatial)]
    owner.loops = [
        NestLoop([Component(0, part, True)], loop.present) if other is loop
        else NestLoop([replace(c, axis=placed.get(c.axis, -1)) for c in other.components], other.present)
        for other in owner.loops if other is loop or not other.is_reduce
    ]  # fmt: skip
    out_index = [later(form) for form in write.index]
    owner.accesses = [
        Access(write.buffer, True, out_index),
        Access(partial, False, [*map(dict, out_index), {0: 1.0}]),
    ]
    owner.rerank()
    return made


def _copy_nest(buffer: Buffer, scope: str, *, name: str, write: bool) -> Nest:
    """A block that copies `buffer` to or from a cache of the same shape."""
    cache = Buffer(name, buffer.shape, buffer.itemsize, scope, buffer.is_float)
    index = [{d: 1.0} for d in range(len(buffer.shape))]
    source, sink = (cache, buffer) if write else (buffer, cache)
    axes = [(const(s), False) for s in buffer.shape]
    loops = [NestLoop([Component(d, const(s), False)]) for d, s in enumerate(buffer.shape)]
    accesses = [Access(sink, True, list(index)), Access(source, False, [dict(f) for f in index])]
    return Nest(name, axes, accesses, [0.0] * 8, loops)
