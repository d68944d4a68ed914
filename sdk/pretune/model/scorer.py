"""Score decision vectors of a task: encode once, roll shared prefixes out once, rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pretune.features import ActionEncoder, encode_state
from pretune.features.nest import Env
from pretune.features.program import read_program
from pretune.features.schema import SUMMARY

if TYPE_CHECKING:
    from pretune.hardware import Hardware
    from pretune.model.world_model import WorldModel
    from pretune.space import DesignSpace, TaskSpace

CHUNK, MIN_CHUNK = 4096, 256
"""Candidates rolled out at once: many, so that numpy's calls cost little, yet not past the caches."""


class SpaceScorer:
    """Scores decision vectors of one design space.

    Parameters
    ----------
    model : WorldModel
    space : DesignSpace
    encoder : ActionEncoder
    z0 : numpy.ndarray
        Latent of the initial program, ``[latent]``.
    hardware : numpy.ndarray
        The hardware vector, ``[16]``.
    """

    def __init__(
        self,
        model: WorldModel,
        space: DesignSpace,
        encoder: ActionEncoder,
        z0: np.ndarray,
        hardware: np.ndarray,
    ) -> None:
        self.model, self.space, self.encoder, self.hardware = model, space, encoder, hardware
        steps = encoder.steps
        blank = Env([slot.options[:1] for slot in space.slots], 1)
        # What comes before the first decision is the same for every candidate.
        first = next((i for i, step in enumerate(steps) if step.slots), len(steps))
        self.z0 = model.rollout(z0, [(step.type_id, step.features(blank)) for step in steps[:first]])[0]
        self.steps = steps[first:]
        # What an action that depends on one decision brings to the transition is computed once per option.
        self._tables: dict[int, tuple[int, np.ndarray]] = {}
        for i, step in enumerate(self.steps):
            if len(step.slots) == 1:
                (slot,) = step.slots
                options = space.slots[slot].options
                table = [s.options[:1].repeat(len(options), axis=0) for s in space.slots]
                table[slot] = options
                features = step.features(Env(table, len(options)))
                self._tables[i] = (slot, model.action(step.type_id, features))
        self._static = {
            i: model.action(step.type_id, step.features(blank))
            for i, step in enumerate(self.steps)
            if not step.slots
        }

    def score(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Score candidates.

        Parameters
        ----------
        rows : numpy.ndarray
            Option indices, int ``[n, slots]``, at least one row.

        Returns
        -------
        score : numpy.ndarray
            float32 ``[n]``, higher is faster, comparable within the task.
        features : numpy.ndarray
            float32 ``[n, embedding + summary]``: the ranker's embedding, and the summary of the actions.
        """
        n = len(rows)
        score = np.empty(n, np.float32)
        features = np.empty((n, self.model.weights.config.sizes["embedding"] + len(SUMMARY)), np.float32)
        # Sorted, neighbours share their first decisions, and with them the first part of the rollout.
        order = np.lexsort(rows.T[::-1]) if rows.shape[1] else np.arange(n)
        threads = self.model.num_threads
        rounds = -(-n // (CHUNK * threads))
        chunk = max(MIN_CHUNK, -(-n // (rounds * threads)))  # as many chunks for each thread

        def fill(which: np.ndarray) -> None:
            score[which], embedding, summary = self._chunk(rows[which])
            features[which, : embedding.shape[1]] = embedding
            features[which, embedding.shape[1] :] = summary

        self.model.map(fill, [order[i : i + chunk] for i in range(0, n, chunk)])
        return score, features

    def _chunk(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score, embedding and summary of sorted candidates."""
        n = len(rows)
        env = Env(self.space.decisions(rows), n, rows)
        z = self.z0[None]
        group = np.zeros(n, dtype=np.int64)  # which row of z each candidate has
        known: frozenset[int] = frozenset()
        for i, step in enumerate(self.steps):
            new = sorted(step.slots - known)
            if new and len(z) < n:
                known |= step.slots
                key = group
                for slot in new:
                    key = key * len(self.space.slots[slot].options) + rows[:, slot]
                _values, lead, group_ = np.unique(key, return_index=True, return_inverse=True)
                if len(lead) > 0.7 * n:
                    lead = group_ = np.arange(n)
                z = z[group[lead]]
                group = group_
                leaders = lead
            elif len(z) < n:
                leaders = np.unique(group, return_index=True)[1]
            else:
                leaders = np.arange(n)
            z = self.model.step(z, self._action(i, rows, env, leaders))
        zT = z if len(z) == n and group[-1] == n - 1 else z[group]
        summary = self.encoder.summarise(env)
        score, embedding = self.model.rank(zT, summary, self.hardware)
        return score, embedding, summary

    def _action(self, i: int, rows: np.ndarray, env: Env, leaders: np.ndarray) -> np.ndarray:
        if i in self._static:
            return np.repeat(self._static[i], len(leaders), axis=0)
        if i in self._tables:
            slot, table = self._tables[i]
            return table[rows[leaders, slot]]
        step = self.steps[i]
        few, which = env.distinct(step.slots)
        if which is not None:
            return self.model.action(step.type_id, step.features(few))[which[leaders]]
        features = step.features(env)
        return self.model.action(step.type_id, features if len(leaders) == len(rows) else features[leaders])


class TaskScorer:
    """Scores candidates of all design spaces of a task.

    Parameters
    ----------
    model : WorldModel
    space : TaskSpace
    hardware : Hardware
        As the target restricts it.
    """

    def __init__(self, model: WorldModel, space: TaskSpace, hardware: Hardware) -> None:
        attrs: Any = space.target.attrs  # TVM annotates it as a string
        cores = int(attrs.get("num-cores", hardware.cores) or hardware.cores)
        vector = np.asarray(hardware.vector(), dtype=np.float32)
        self.embedding_width = model.weights.config.sizes["embedding"]
        self.spaces = []
        encoded: dict[int, tuple[Any, Any]] = {}  # blocks and latent of each initial program, by its address
        for design in space.spaces:
            func = design.program["main"]
            if id(design.program) not in encoded:
                z0 = model.encode(encode_state(func, cores=cores))
                encoded[id(design.program)] = read_program(func), z0
            blocks, z0 = encoded[id(design.program)]
            encoder = ActionEncoder(blocks, design.insts, cores, design.first)
            self.spaces.append(SpaceScorer(model, design, encoder, z0, vector))

    def score(self, k: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Score option indices of design space `k`; see `SpaceScorer.score`."""
        return self.spaces[k].score(rows)
