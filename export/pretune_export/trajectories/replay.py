"""Real states along a trace: the programs that the transition has to predict in latent space.

Replaying a trace needs no measurement. For one candidate, the state after step ``s`` is the encoder's view of
the program after that step's instruction, and the last state is the program after postprocessing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from pretune.compat import setup_tvm
from pretune.features import State, encode_state
from pretune.space import sampling_indices

FINAL = -1
"""Step number under which the postprocessed program is kept."""

Decide = Callable[[Schedule, int, list[Any]], Any]
"""Schedule so far, position and inputs of an instruction -> its decision; None lets TVM draw one."""


class Replayer:
    """Replays traces of one task.

    Parameters
    ----------
    mod : tvm.IRModule
    target : tvm.target.Target
    cores : int
        Cores of the target, as for `pretune.features.encode_state`.
    seed : int
        Seed of the generator of design spaces.

    Attributes
    ----------
    context : tvm.s_tir.meta_schedule.TuneContext
    """

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, cores: int, seed: int = 1) -> None:
        setup_tvm(target)
        from tvm.s_tir import meta_schedule as ms

        self.mod, self.cores = mod, cores
        self.context = ms.TuneContext(
            mod=mod, target=target, space_generator="post-order-apply", rand_state=seed, num_threads=1
        )
        generator: Any = self.context.space_generator  # annotated as optional; the context has made it
        self._postprocs = list(generator.postprocs)
        self._known: dict[int, tuple[Any, list[Any]]] = {}

    def replay(
        self, insts: list[Any], decide: Decide, after: Collection[int], seed: int | None = None
    ) -> tuple[Schedule | None, dict[int, tvm.IRModule]]:
        """Apply all instructions of a design space once.

        Parameters
        ----------
        insts : list of tvm.s_tir.schedule.Instruction
        decide : callable
            Asked for a decision before each of them.
        after : collection of int
            Positions of instructions after which the program is wanted.
        seed : int, optional
            Seed of the decisions that TVM draws, at least 1.

        Returns
        -------
        schedule : tvm.s_tir.Schedule or None
            None if TVM refuses a decision.
        programs : dict of int to tvm.IRModule
            Those of `after` that were reached.
        """
        sch = Schedule(self.mod, seed=seed, error_render_level="none")
        programs: dict[int, tvm.IRModule] = {}
        positions = itertools.count()

        def provide(_inst: Any, inputs: list[Any], _attrs: list[Any], _decision: Any) -> Any:
            # TVM asks before every instruction, sampling or not: the program is what the one before has made.
            position = next(positions)
            if position - 1 in after:
                programs[position - 1] = sch.mod
            return decide(sch, position, inputs)

        try:
            Trace(insts, {}).apply_to_schedule(sch, remove_postproc=True, decision_provider=provide)
        except Exception:
            return None, programs
        if len(insts) - 1 in after:
            programs[len(insts) - 1] = sch.mod
        return sch, programs

    def postprocess(self, sch: Schedule) -> bool | None:
        """Apply the postprocessors.

        Returns
        -------
        bool or None
            None if TVM cannot; False if they succeed, but the result exceeds the limits of the target's
            threads or memories (``VerifyGPUCode``, a mere check): its program is a state like any other.
        """
        valid = True
        try:
            sch.enter_postproc()
            for postproc in self._postprocs:
                if not postproc.apply(sch):
                    if type(postproc).__name__ != "VerifyGPUCode":
                        return None
                    valid = False
        except Exception:
            return None
        return valid

    def encode(self, mod: tvm.IRModule) -> State:
        """The encoder's view of a program."""
        return encode_state(mod["main"], cores=self.cores)

    def states(
        self, insts: list[Any], decisions: list[list[int]], steps: list[int], wanted: list[int]
    ) -> dict[int, State]:
        """States of one candidate.

        Parameters
        ----------
        insts : list
            Instructions of the design space, as JSON.
        decisions : list of list of int
            One per sampling instruction.
        steps : list of int
            Instruction index of every step of the action encoder, -1 for ``Postproc``.
        wanted : list of int
            Step numbers whose states are wanted, or `FINAL`.

        Returns
        -------
        dict of int to State
            A state that TVM cannot reach, or that a postprocessor refuses, is left out.
        """
        taken = {}
        for i, values in zip(sampling_indices(insts), decisions, strict=True):
            plain = insts[i][0] in ("SamplePerfectTile", "SamplePartitionedTile")
            taken[i] = list(values) if plain else values[0]
        after = {steps[s] for s in wanted if s != FINAL}
        known = self._from_json(insts, taken)
        if known is None:
            return {}
        sch, programs = self.replay(known, lambda _sch, position, _inputs: taken.get(position), after)
        out = {s: self.encode(programs[steps[s]]) for s in wanted if s != FINAL and steps[s] in programs}
        if FINAL in wanted and sch is not None and self.postprocess(sch):
            out[FINAL] = self.encode(sch.mod)
        return out

    def _from_json(self, insts: list[Any], decisions: dict[int, Any]) -> list[Any] | None:
        """TVM's instructions of a design space given as JSON, from one replay; None if TVM refuses that."""
        known = self._known.get(id(insts))
        if known is None:
            sch = Schedule(self.mod, seed=1, error_render_level="none")
            try:
                Trace.apply_json_to_schedule([insts, [list(item) for item in decisions.items()]], sch)
            except Exception:  # Another candidate's decisions may do.
                return None
            assert sch.trace is not None
            known = self._known[id(insts)] = insts, list(sch.trace.insts)
        return known[1]


def choose_steps(steps: list[int], n: int, rng: np.random.Generator) -> list[int]:
    """`n` random steps that have a state of their own (not ``Postproc``), and `FINAL`."""
    real = [s for s, inst in enumerate(steps) if inst >= 0]
    picked = rng.choice(real, size=min(n, len(real)), replace=False).tolist() if real else []
    return [*sorted(picked), FINAL]
