"""Real states along a trace: the programs that the transition has to predict in latent space.

Replaying a trace needs no measurement. For one candidate, the state after step ``s`` is the encoder's view of
the program after that step's instruction, and the last state is the program after postprocessing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm

from pretune.compat import setup_tvm
from pretune.features import State, encode_state
from pretune.space import sampling_indices

FINAL = -1
"""Step number under which the postprocessed program is kept."""


class Replayer:
    """Replays prefixes of the traces of one task.

    Parameters
    ----------
    mod : tvm.IRModule
    target : tvm.target.Target
    cores : int
    """

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, cores: int) -> None:
        setup_tvm(target)
        from tvm.s_tir import meta_schedule as ms

        self.mod, self.cores = mod, cores
        self._context = ms.TuneContext(
            mod=mod, target=target, space_generator="post-order-apply", num_threads=1
        )
        self._postprocs = list(self._context.space_generator.postprocs)

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
            A state that TVM cannot reach is left out.
        """
        taken = []
        for i, values in zip(sampling_indices(insts), decisions, strict=True):
            plain = insts[i][0] in ("SamplePerfectTile", "SamplePartitionedTile")
            taken.append([i, list(values) if plain else values[0]])
        out: dict[int, State] = {}
        for step in wanted:
            end = len(insts) if step == FINAL else steps[step] + 1
            try:
                sch = tvm.s_tir.Schedule(self.mod, error_render_level="none")
                tvm.s_tir.schedule.Trace.apply_json_to_schedule(
                    [insts[:end], [t for t in taken if t[0] < end]], sch
                )
                if step == FINAL:
                    sch.enter_postproc()
                    if not all(p.apply(sch) for p in self._postprocs):
                        continue
                out[step] = encode_state(sch.mod["main"], cores=self.cores)
            except Exception:
                continue  # TVM refuses the replay: one state fewer.
        return out


def choose_steps(steps: list[int], n: int, rng: np.random.Generator) -> list[int]:
    """`n` random steps that have a state of their own (not ``Postproc``), and `FINAL`."""
    real = [s for s, inst in enumerate(steps) if inst >= 0]
    picked = rng.choice(real, size=min(n, len(real)), replace=False).tolist() if real else []
    return [*sorted(picked), FINAL]
