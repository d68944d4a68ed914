"""A task's design spaces: generate, sample, mutate, and materialise candidates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune.compat import setup_tvm
from pretune.hardware.hardware import vector_bits_of
from pretune.hardware.target import llvm_features
from pretune.native_log import quiet_native
from pretune.space.packing import find_packing, pack, prefix_length, with_epilogue
from pretune.space.slots import Slot, factorisations
from pretune.space.trace import sampling_indices, trace_to_json

if TYPE_CHECKING:
    import tvm
    from tvm.s_tir import Schedule
    from tvm.s_tir.meta_schedule import TuneContext
    from tvm.target import Target

PROBES = 24
"""Random replays per design space from which the options of data-dependent slots are read."""


@dataclass(frozen=True)
class Candidate:
    """A materialised candidate.

    Attributes
    ----------
    space : int
        Which design space of the task.
    decisions : tuple of numpy.ndarray
        The decisions TVM really took, one int array per slot (it may correct an impossible one).
    schedule : tvm.s_tir.Schedule
        The schedule with postprocessors applied.
    shash : int
        Structural hash of the scheduled module.
    """

    space: int
    decisions: tuple[np.ndarray, ...]
    schedule: Schedule
    shash: int

    @property
    def mod(self) -> tvm.IRModule:
        """The scheduled module."""
        return self.schedule.mod

    @property
    def trace_json(self) -> list[Any]:
        """The trace as ``[instructions, decisions]``, postprocessing included."""
        return trace_to_json(self.schedule.trace)


class DesignSpace:
    """One trace of a task with its decisions left open.

    Attributes
    ----------
    insts : list
        The trace's instructions as TVM's JSON: ``[name, inputs, attrs, outputs]``.
    slots : tuple of Slot
        The open decisions, in trace order.
    program : tvm.IRModule
        What the decisions start from: the task's program, or with an operand copied first.
    first : int
        Position of the instruction that follows that copy.
    """

    def __init__(
        self,
        mod: tvm.IRModule,
        schedule: Schedule,
        postprocs: Sequence[Any],
        seed: int = 1,
        program: tvm.IRModule | None = None,
    ) -> None:
        from tvm.s_tir import Schedule as TVMSchedule

        self._new_schedule = lambda: TVMSchedule(mod, error_render_level="none")
        self.trace: Any = schedule.trace  # TVM annotates it as optional: a traced schedule has one
        self.postprocs = list(postprocs)
        self._tvm_insts = list(self.trace.insts)
        self.insts: list[Any] = trace_to_json(self.trace)[0]
        self.first = prefix_length(self.insts)
        self.program = mod if program is None else program
        self._sampling = sampling = sampling_indices(self.insts)
        observed = self._probe(TVMSchedule, mod, seed) if sampling else []
        self.slots = tuple(self._slot(n, index, observed) for n, index in enumerate(sampling))
        self._sizes = np.array([len(slot.options) for slot in self.slots], dtype=np.int64)

    def _probe(self, schedule_type: Any, mod: Any, seed: int) -> list[list[np.ndarray]]:
        """Decisions of random replays, ``[replay][slot]``; the schedule's own decisions come first."""
        from tvm.s_tir.schedule import Trace

        observed = [self._decisions_of(self.trace)]
        if all(self.insts[i][0] in ("SampleCategorical",) for i in self._sampling):
            return observed
        blank = Trace(self._tvm_insts, {})
        for k in range(PROBES):
            sch = schedule_type(mod, seed=seed + k, error_render_level="none")
            try:
                blank.apply_to_schedule(sch, remove_postproc=True)
            except Exception:
                continue  # An impossible combination of random decisions: one probe fewer.
            observed.append(self._decisions_of(sch.trace))
        return observed

    def _decisions_of(self, trace: Any) -> list[np.ndarray]:
        """The decisions of a replay of this space, one int32 array per sampling instruction."""
        insts = trace.insts
        decisions = trace.decisions
        out = []
        for index in self._sampling:
            value = decisions[insts[index]]
            values = [int(value)] if not hasattr(value, "__len__") else [int(v) for v in value]
            out.append(np.array(values, dtype=np.int32))
        return out

    def _slot(self, n: int, index: int, observed: list[list[np.ndarray]]) -> Slot:
        name, _inputs, attrs, _outputs = self.insts[index]
        seen = np.unique(np.stack([row[n] for row in observed]), axis=0)
        if name == "SampleCategorical":
            options = np.arange(len(attrs[0]), dtype=np.int32)[:, None]
        elif name == "SamplePerfectTile" and len({int(np.prod(r)) for r in seen.astype(np.int64)}) == 1:
            options = factorisations(int(np.prod(seen[0].astype(np.int64))), int(attrs[0]), int(attrs[1]))
            if not len(options):
                options = seen
        else:
            # Compute locations, and tiles of loops whose extent depends on earlier decisions.
            options = seen
        return Slot(index, name, options)

    @property
    def size(self) -> float:
        """Number of decision vectors (some may fail to build)."""
        return float(np.prod(self._sizes.astype(np.float64))) if len(self.slots) else 1.0

    def sample(self, n: int, rng: np.random.Generator) -> np.ndarray:
        """Uniform random decision vectors: int32 ``[n, slots]`` of option indices."""
        return (rng.random((n, len(self.slots))) * self._sizes).astype(np.int32)

    def find(self, decisions: Sequence[Any]) -> np.ndarray | None:
        """Option indices of decisions, one for each slot; None if this design space does not offer them."""
        if len(decisions) != len(self.slots):
            return None
        found = [slot.find(np.asarray(d)) for slot, d in zip(self.slots, decisions, strict=True)]
        return None if -1 in found else np.array(found, dtype=np.int32)

    def mutate(self, parents: np.ndarray, rng: np.random.Generator, rate: float = 1.5) -> np.ndarray:
        """Redraw on average `rate` slots of each parent, at least one. Shapes as `sample`."""
        n, s = parents.shape
        if s == 0:
            return parents.copy()
        weight = np.log2(self._sizes + 1e-9)
        open_slots = np.flatnonzero(self._sizes > 1)
        if not len(open_slots):
            return parents.copy()
        p = weight[open_slots] / weight[open_slots].sum()
        flip = rng.random((n, s)) < (np.minimum(rate / len(open_slots), 0.5) * (self._sizes > 1))
        flip[np.arange(n), rng.choice(open_slots, size=n, p=p)] = True
        return np.where(flip, self.sample(n, rng), parents)

    def crossover(self, a: np.ndarray, b: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Each slot from one of two parents. Shapes as `sample`."""
        return np.where(rng.random(a.shape) < 0.5, a, b)

    def decisions(self, rows: np.ndarray) -> list[np.ndarray]:
        """Decision values of option indices ``[n, slots]``: per slot an int32 ``[n, width]``."""
        return [slot.options[rows[:, i]] for i, slot in enumerate(self.slots)]

    def materialise(self, row: np.ndarray, index: int = 0) -> Candidate | None:
        """Replay the trace with the decisions of option indices `row` ``[slots]``, then postprocess.

        Returns
        -------
        Candidate or None
            None when TVM refuses the decisions or a postprocessor does.
        """
        values = {
            self._tvm_insts[s.index]: s.to_tvm(s.options[r]) for s, r in zip(self.slots, row, strict=True)
        }
        return self.replay(values, index)

    def replay(self, values: dict[Any, Any], index: int = 0) -> Candidate | None:
        """As `materialise`, from decisions by TVM instruction; a missing one is drawn by TVM."""
        from tvm.s_tir.schedule import Trace
        from tvm_ffi import structural_hash

        sch = self._new_schedule()
        try:
            Trace(self._tvm_insts, values).apply_to_schedule(sch, remove_postproc=True)
            taken = tuple(self._decisions_of(sch.trace))
            sch.enter_postproc()
            for postproc in self.postprocs:
                if not postproc.apply(sch):
                    return None
        except Exception:
            # TVM raises ScheduleError, InternalError or ValueError for decisions that do not apply.
            return None
        return Candidate(index, taken, sch, structural_hash(sch.mod))


class TaskSpace:
    """All design spaces of a task for one target.

    Attributes
    ----------
    mod : tvm.IRModule
        The task's program.
    target : tvm.target.Target
    spaces : tuple of DesignSpace
    """

    def __init__(self, mod: tvm.IRModule, target: Target, spaces: Sequence[DesignSpace]) -> None:
        self.mod = mod
        self.target = target
        self.spaces = tuple(spaces)
        self._contexts: list[TuneContext] = []

    @classmethod
    def generate(cls, mod: tvm.IRModule, target: Target, *, seed: int = 1) -> TaskSpace:
        """Run MetaSchedule's post-order-apply space generator, where it helps on a packed program as well.

        Parameters
        ----------
        mod : tvm.IRModule
            A task's program: one PrimFunc called ``main``.
        target : tvm.target.Target
            Must give ``num-cores`` on a CPU.
        seed : int
            Seed of the space generator's own sampling.
        """
        from tvm.s_tir import Schedule

        setup_tvm(target)
        context, schedules, postprocs = _generate(mod, target, seed)
        designs = [DesignSpace(mod, schedule, postprocs, seed) for schedule in schedules]
        contexts = [context]
        packing = find_packing(mod, lanes) if (lanes := _lanes(target)) else None
        for copied in (packing, packing.plain) if packing is not None else ():
            packed = Schedule(mod, error_render_level="none")
            try:
                pack(packed, copied)
                context, schedules, postprocs = _generate(packed.mod, target, seed)
            except RuntimeError:  # TVM refuses the copy, or what goes with it.
                continue
            contexts.append(context)
            program = packed.mod  # one object: what is read of it is read once
            for schedule in schedules:
                whole = packed.copy()
                schedule.trace.apply_to_schedule(whole, remove_postproc=True)
                designs += [
                    DesignSpace(mod, each, postprocs, seed, program) for each in with_epilogue(whole, copied)
                ]
            break
        space = cls(mod, target, designs)
        space._contexts = contexts  # The postprocessors hold a raw pointer to theirs.
        return space

    @property
    def size(self) -> float:
        """Number of decision vectors over all spaces."""
        return sum(space.size for space in self.spaces)

    @property
    def is_trivial(self) -> bool:
        """Whether there is nothing to decide."""
        return self.size <= 1

    def materialise(self, space: int, row: np.ndarray) -> Candidate | None:
        """Materialise option indices `row` of design space number `space`."""
        return self.spaces[space].materialise(row, space)


def _generate(mod: tvm.IRModule, target: Target, seed: int) -> tuple[TuneContext, list[Any], list[Any]]:
    """MetaSchedule's design spaces of a program, and postprocessors, which live as long as the context."""
    from tvm.s_tir import meta_schedule as ms

    context = ms.TuneContext(
        mod=mod, target=target, space_generator="post-order-apply", rand_state=seed, num_threads=1
    )
    with quiet_native():  # of pooling, TOPI names a rule that TVM has not got for CPUs
        schedules = list(context.generate_design_space())
    generator: Any = context.space_generator  # TVM annotates it as optional: the context has made it
    return context, schedules, list(generator.postprocs)


def _lanes(target: Target) -> int:
    """float32 elements of a CPU's widest vector; 0 for another target."""
    kind: Any = target.kind  # TVM annotates it as a string
    if kind.name != "llvm":
        return 0
    return vector_bits_of(llvm_features(json.loads(str(target)))) // 32
