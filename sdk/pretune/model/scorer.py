"""Score decision vectors of a task: encode once, roll shared prefixes out once, rank."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune.features import ActionEncoder
from pretune.features.nest import Env
from pretune.features.program import read_program
from pretune.features.schema import SUMMARY
from pretune.features.state import encode_blocks

if TYPE_CHECKING:
    from pretune.hardware import Hardware
    from pretune.model.world_model import WorldModel
    from pretune.space import DesignSpace, TaskSpace

CHUNK, MIN_CHUNK = 8192, 512
"""Candidates whose features are computed at once: many, so that numpy's calls cost little."""

BLOCK = 1536
"""Candidates rolled out at once: few, so that what goes from network to network stays in the caches."""

MAX_KEY = 1 << 62
"""Largest number that candidates are sorted by, such that it fits into 64 bits."""

Scored = tuple[np.ndarray, np.ndarray]
"""Score and features, as `SpaceScorer.score` returns them."""


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
        # By action, the decisions that none before it depends on; and all of them in that order.
        self._fresh: list[list[int]] = []
        self._order: list[int] = []
        for step in self.steps:
            self._fresh.append(sorted(step.slots.difference(self._order)))
            self._order += self._fresh[-1]
        # What an action that depends on one decision, or on none, brings to the transition is computed once
        # per option.
        self._tables: dict[int, tuple[int | None, np.ndarray]] = {}
        for i, step in enumerate(self.steps):
            if len(step.slots) > 1:
                continue
            slot = next(iter(step.slots), None)
            few = blank
            if slot is not None:
                options = space.slots[slot].options
                table = [s.options[:1].repeat(len(options), axis=0) for s in space.slots]
                table[slot] = options
                few = Env(table, len(options))
            self._tables[i] = slot, model.action(step.type_id, step.features(few))

    def score(self, rows: np.ndarray) -> Scored:
        """Score candidates.

        Parameters
        ----------
        rows : numpy.ndarray
            Option indices, int ``[n, slots]``.

        Returns
        -------
        score : numpy.ndarray
            float32 ``[n]``, higher is faster, comparable within the task.
        features : numpy.ndarray
            float32 ``[n, embedding + summary]``: the ranker's embedding, and the summary of the actions.
        """
        return _score_all(self.model, [(self, rows)])[0]

    def sort(self, rows: np.ndarray) -> np.ndarray:
        """An order in which neighbours share their first decisions, and so the start of the rollout."""
        key, combinations = np.zeros(len(rows), np.int64), 1
        for slot in self._order:
            size = len(self.space.slots[slot].options)
            combinations *= size
            if combinations > MAX_KEY:
                break
            key = key * size + rows[:, slot]
        return np.argsort(key)

    def chunk(self, rows: np.ndarray) -> Iterator[tuple[slice, np.ndarray, np.ndarray, np.ndarray]]:
        """Score, embedding and summary of sorted candidates, block by block."""
        n = len(rows)
        env = Env(self.space.decisions(rows), n, rows)
        # By action that many candidates share: what it brings to the transition, and which each of them has.
        shared: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for i, step in enumerate(self.steps):
            if i in self._tables:
                slot, table = self._tables[i]
                shared[i] = table, np.zeros(n, np.intp) if slot is None else rows[:, slot]
                continue
            few, which = env.distinct(step.slots)
            if which is not None:
                shared[i] = self.model.action(step.type_id, step.features(few)), which
        block = -(-n // -(-n // BLOCK))  # of about the same size each
        for start in range(0, n, block):
            part = slice(start, min(start + block, n))
            some = env.part(part)
            actions = {i: (table, which[part]) for i, (table, which) in shared.items()}
            zT = self._rollout(rows[part], some, actions)
            summary = self.encoder.summarise(some)
            yield part, *self.model.rank(zT, summary, self.hardware), summary

    def _rollout(
        self, rows: np.ndarray, env: Env, shared: dict[int, tuple[np.ndarray, np.ndarray]]
    ) -> np.ndarray:
        """Final latents of sorted candidates."""
        n = len(rows)
        z = self.z0[None]
        group = np.zeros(n, np.intp)  # which row of z each candidate has
        leads = group == np.arange(n)  # whether it is the first of those that have that row
        leaders = np.flatnonzero(leads)
        for i, step in enumerate(self.steps):
            if self._fresh[i] and len(z) < n:
                for slot in self._fresh[i]:
                    leads[1:] |= rows[1:, slot] != rows[:-1, slot]
                if leads.sum() > 0.7 * n:
                    leads[:] = True
                leaders = np.flatnonzero(leads)
                z = z.take(group[leaders], axis=0)
                group = np.cumsum(leads) - 1
            if i in shared:
                table, which = shared[i]
                action = table.take(which[leaders], axis=0)
            else:
                features = step.features(env)
                action = self.model.action(step.type_id, features if len(leaders) == n else features[leaders])
            z = self.model.step(z, action)
        return z if len(z) == n else z.take(group, axis=0)


def _score_all(model: WorldModel, work: Sequence[tuple[SpaceScorer, np.ndarray]]) -> list[Scored]:
    """Score candidates of several design spaces, such that every thread has as much to do."""
    width = model.weights.config.sizes["embedding"]
    share = -(-sum(len(rows) for _space, rows in work) // model.num_threads)
    chunk = min(CHUNK, max(MIN_CHUNK, share))
    jobs: list[tuple[int, np.ndarray]] = []  # which of the design spaces, and which of its candidates
    found: list[Scored] = []
    for number, (space, rows) in enumerate(work):
        n = len(rows)
        found.append((np.empty(n, np.float32), np.empty((n, width + len(SUMMARY)), np.float32)))
        if n:
            jobs += [(number, part) for part in np.array_split(space.sort(rows), -(-n // chunk))]
    jobs.sort(key=_size)
    while len(jobs) % model.num_threads and _size(jobs[-1]) >= 2 * MIN_CHUNK:
        number, largest = jobs.pop()
        for half in np.array_split(largest, 2):
            bisect.insort(jobs, (number, half), key=_size)

    def run(job: tuple[int, np.ndarray]) -> None:
        number, which = job
        space, rows = work[number]
        score, features = found[number]
        for part, *results in space.chunk(rows[which]):
            at = which[part]
            score[at], features[at, :width], features[at, width:] = results

    model.map(run, jobs[::-1])  # small ones last, for whichever thread is free
    return found


def _size(job: tuple[int, np.ndarray]) -> int:
    return len(job[1])


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
        self.model = model
        self.embedding_width = model.weights.config.sizes["embedding"]
        self.spaces = []
        encoded: dict[int, tuple[Any, Any]] = {}  # blocks and latent of each initial program, by its address
        for design in space.spaces:
            if id(design.program) not in encoded:
                blocks = read_program(design.program["main"])
                encoded[id(design.program)] = blocks, model.encode(encode_blocks(blocks, cores=cores))
            blocks, z0 = encoded[id(design.program)]
            encoder = ActionEncoder(blocks, design.insts, cores, design.first)
            self.spaces.append(SpaceScorer(model, design, encoder, z0, vector))

    def score(self, k: int, rows: np.ndarray) -> Scored:
        """Score option indices of design space `k`; see `SpaceScorer.score`."""
        return self.spaces[k].score(rows)

    def score_all(self, rows: Sequence[np.ndarray]) -> list[Scored]:
        """Score option indices of all design spaces, one array for each, faster than one after the other."""
        return _score_all(self.model, list(zip(self.spaces, rows, strict=True)))
