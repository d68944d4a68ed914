"""Score traces of a task that come from anywhere: files, MetaSchedule's own search, a tuning database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune.features import ActionEncoder
from pretune.features.program import read_program
from pretune.features.state import encode_blocks
from pretune.space import split_trace
from pretune.space.packing import initial_program, prefix_length

if TYPE_CHECKING:
    import tvm

    from pretune.hardware import Hardware
    from pretune.model.world_model import WorldModel


class TraceScorer:
    """Scores traces of one task; those with the same instructions are rolled out together.

    Where candidates are drawn from a design space, `TaskScorer` is faster.

    Parameters
    ----------
    mod : tvm.IRModule
        The task's program: one PrimFunc called ``main``.
    model : WorldModel
    hardware : Hardware
        As the target restricts it.
    """

    def __init__(self, mod: tvm.IRModule, model: WorldModel, hardware: Hardware) -> None:
        self.mod, self.model, self.cores = mod, model, hardware.cores
        self.vector = np.asarray(hardware.vector(), dtype=np.float32)
        self._known: dict[str, tuple[ActionEncoder, np.ndarray]] = {}

    def score(self, traces: Sequence[Sequence[Any]]) -> tuple[np.ndarray, np.ndarray]:
        """Score traces.

        Parameters
        ----------
        traces : sequence of [instructions, decisions]
            As MetaSchedule writes them in JSON; postprocessing is ignored.

        Returns
        -------
        score : numpy.ndarray
            float32 ``[n]``, higher is faster, comparable within the task.
        embedding : numpy.ndarray
            float32 ``[n, embedding]``.

        Raises
        ------
        ValueError
            If a trace leaves a decision open.
        """
        groups: dict[str, tuple[list[int], list[list[list[int]]]]] = {}
        for i, (insts, decisions) in enumerate(traces):
            body, taken = split_trace(insts, decisions)
            rows = groups.setdefault(json.dumps(body), ([], []))
            rows[0].append(i)
            rows[1].append(taken)
        score = np.zeros(len(traces), np.float32)
        embedding: np.ndarray | None = None
        for key, (index, rows) in groups.items():
            s, e = self._score_alike(key, rows)
            if embedding is None:
                embedding = np.zeros((len(traces), e.shape[1]), np.float32)
            score[index], embedding[index] = s, e
        return score, embedding if embedding is not None else np.zeros((0, 0), np.float32)

    def _score_alike(self, key: str, rows: list[list[list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        """Score decision vectors of the same instructions."""
        if key not in self._known:
            insts = json.loads(key)
            func = initial_program(self.mod, insts)["main"]
            blocks = read_program(func)
            encoder = ActionEncoder(blocks, insts, self.cores, prefix_length(insts))
            self._known[key] = encoder, self.model.encode(encode_blocks(blocks, cores=self.cores))
        encoder, z0 = self._known[key]
        n = len(rows)
        decisions = [np.array([row[slot] for row in rows], np.int32) for slot in range(len(rows[0]))]
        actions, summary = encoder.encode(decisions)
        steps = [(step.type_id, a) for step, a in zip(encoder.steps, actions, strict=True)]
        zT = self.model.rollout(z0, steps)
        # A design space without decisions gives one row for all.
        zT, summary = (x if len(x) == n else np.repeat(x[:1], n, axis=0) for x in (zT, summary))
        return self.model.rank(zT, summary, self.vector)
