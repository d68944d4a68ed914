"""Search one task: sample and evolve decision vectors, rank them all, materialise the most promising."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pretune.search.adapt import Posterior
from pretune.search.code_size import builds_for_minutes

if TYPE_CHECKING:
    from pretune.model.scorer import TaskScorer
    from pretune.space import Candidate, TaskSpace

POPULATION = 8192
"""Random decision vectors drawn per proposal, over all design spaces."""

GENERATIONS = 4
CHILDREN = 2048
"""Children per generation, over all design spaces.

Smaller mutations, in as many generations or twice, find higher scores, which are further from the truth: the
first choices of 44 validation tasks came out 9 % slower (standard errors 4 and 5 %)."""

PARENTS = 192
EXPLORE = 0.5
"""Weight of the posterior's deviation when candidates are chosen; before there are trials, of its prior's."""

NOISE = 0.05
"""Of a measurement, in natural log of latency."""

MOST_JOINT = 1024
"""Candidates that a batch is chosen from, about: their covariance has the square of so many numbers."""

LOCAL = 0.25
"""Share of a batch, once trials exist, that is taken among the neighbours of the best of them."""

NEIGHBOURS = 512

FEWEST = 8
"""Candidates looked through as if that many were wanted, at least."""

HEDGE = 8
"""One in so many of the first batch packs an operand, or does not, should the ranker propose none such. Of
six convolutions with two seeds, 40 trials ended 1.54 and 1.64 times faster on one, 1.18 and 1.21 times on
another, within 3 % on the rest."""

MOST_REFUSED = 8
"""Candidates of one design space that come to nothing, for each that is wanted, before it is left alone."""


@dataclass(frozen=True)
class Proposal:
    """A candidate to measure, with what the model said of it.

    Attributes
    ----------
    candidate : Candidate
    row : numpy.ndarray
        Its option indices.
    score : float
        The ranker's score, before any correction.
    features : numpy.ndarray
    """

    candidate: Candidate
    row: np.ndarray
    score: float
    features: np.ndarray


class _Pool(NamedTuple):
    """Scored decision vectors of one design space."""

    rows: np.ndarray
    score: np.ndarray
    features: np.ndarray
    value: np.ndarray


class TaskSearch:
    """Proposes candidates of one task and learns from their latencies.

    Parameters
    ----------
    space : TaskSpace
    scorer : TaskScorer
    seed : int

    Notes
    -----
    The loop is ``propose`` -> measure -> ``update`` -> ``propose`` ... Each proposal scores `POPULATION`
    random decision vectors and ``GENERATIONS * CHILDREN`` mutations and crossovers of the best, trials
    included. What LLVM would take minutes to build (`builds_for_minutes`) is never proposed.
    """

    def __init__(self, space: TaskSpace, scorer: TaskScorer, *, seed: int = 0) -> None:
        self.space, self.scorer = space, scorer
        self.rng = np.random.default_rng(seed)
        self._knows = False  # whether there are trials
        self.scored = 0
        self._seen: set[int] = set()
        self._tried: list[set[bytes]] = [set() for _ in space.spaces]
        self._best: list[tuple[float, int, np.ndarray]] = []

    def propose(self, n: int, *, greedy: bool = False) -> list[Proposal]:
        """Up to `n` new candidates; fewer when the space is exhausted.

        The neighbours of the best trials come first, then the others; either the most promising first.

        Parameters
        ----------
        n : int
        greedy : bool
            Take the highest expected value alone: no exploration, no spread.
        """
        out: list[Proposal] = []
        if self._best and not greedy:
            self._take(self._neighbours(), int(LOCAL * n), out, explore=0.0)
        explore = 0.0 if greedy else EXPLORE
        pools = self._evolve(explore)
        if not self._knows and not greedy:
            self._take(pools, n - n // HEDGE, out, explore=explore)
            self._hedge(pools, n, out, explore)
        self._take(pools, n, out, explore=explore)
        return out

    def _hedge(self, pools: list[_Pool], n: int, out: list[Proposal], explore: float) -> None:
        """Fill `out` up to `n` with candidates that pack an operand, or that do not, where it has none such.

        Between the two the ranker may be wrong as a whole, and the posterior learns so from trials alone.
        """
        packs = [bool(design.first) for design in self.space.spaces]
        for missing in set(packs) - {packs[p.candidate.space] for p in out}:
            some = [
                pool if kind == missing else _Pool(*(part[:0] for part in pool))
                for pool, kind in zip(pools, packs, strict=True)
            ]
            self._take(some, n, out, explore=explore)

    def _take(self, pools: list[_Pool], n: int, out: list[Proposal], *, explore: float) -> None:
        """Materialise the best of `pools` until `out` holds `n`; `explore` is what they were scored with.

        With it, what is taken counts as measured, with the result that was expected, when the next one is
        chosen: its like are less uncertain then. See Desautels et al., "Parallelizing
        Exploration-Exploitation Tradeoffs in Gaussian Process Bandit Optimization", JMLR 2014.
        """
        if len(out) >= n:
            return
        several = max(n, FEWEST)  # where one is wanted, TVM may refuse many before it
        tops = [
            [(i, value) for i, value in self._top(pool, 64 * several) if pool.rows[i].tobytes() not in tried]
            for pool, tried in zip(pools, self._tried, strict=True)
        ]
        order = sorted(((value, k, i) for k, top in enumerate(tops) for i, value in top), reverse=True)
        if not order:
            return
        bar = order[min(len(order), 8 * several) - 1][0]
        del order[max(64, min(64 * several, MOST_JOINT) - several * len(pools)) :]
        # Should TVM refuse all that ranks high in one design space, there are the others.
        known = {(k, i) for _value, k, i in order}
        others = [(value, k, i) for k, top in enumerate(tops) for i, value in top[:several]]
        order += [one for one in others if one[1:] not in known]
        value = np.array([item[0] for item in order])
        mean, covariance = value, None
        if explore:
            scores = [p.score for p in out] + [pools[k].score[i] for _value, k, i in order]
            described = [p.features for p in out] + [pools[k].features[i] for _value, k, i in order]
            mean, covariance = self._posterior.joint(np.array(scores), np.stack(described))
            for at in range(len(out)):
                _condition(covariance, at)
            mean, covariance = mean[len(out) :], covariance[len(out) :, len(out) :]
            value = mean + explore * np.sqrt(np.maximum(covariance.diagonal(), 0.0))
        failures = [0] * len(pools)
        below: list[tuple[float, Proposal]] = []
        left = np.ones(len(order), bool)
        while left.any() and len(out) < n:
            at = int(np.where(left, value, -np.inf).argmax())
            left[at] = False
            _value, k, i = order[at]
            row = pools[k].rows[i]
            if row.tobytes() in self._tried[k] or failures[k] > MOST_REFUSED * several:
                continue
            self._tried[k].add(row.tobytes())
            candidate = self.space.materialise(k, row)
            if candidate is None or candidate.shash in self._seen or self._too_large(candidate):
                failures[k] += 1
                continue
            score, features = float(pools[k].score[i]), pools[k].features[i]
            taken = self.space.spaces[k].find(candidate.decisions)
            if taken is not None and (taken != row).any():
                # TVM took another compute location than was asked for: what came out was not ranked.
                actual = self._pool(taken[None], *self.scorer.score(k, taken[None]), explore)
                row, score, features = taken, float(actual.score[0]), actual.features[0]
                if actual.value[0] < bar:
                    below.append((actual.value[0], Proposal(candidate, row, score, features)))
                    failures[k] += 1
                    continue
                self._tried[k].add(row.tobytes())
            self._seen.add(candidate.shash)
            out.append(Proposal(candidate, row, score, features))
            if covariance is not None:
                _condition(covariance, at)
                value = mean + explore * np.sqrt(np.maximum(covariance.diagonal(), 0.0))
        if below and not out:  # All that was ranked high came out as something else: then the best of that.
            proposal = max(below, key=lambda item: item[0])[1]
            self._seen.add(proposal.candidate.shash)
            self._tried[proposal.candidate.space].add(proposal.row.tobytes())
            out.append(proposal)

    def _too_large(self, candidate: Candidate) -> bool:
        return builds_for_minutes(candidate.mod, self.space.target)

    def update(self, proposals: list[Proposal], latencies: list[float]) -> None:
        """Learn from trials: seconds per candidate, infinite for one that failed."""
        if not proposals:
            return
        self._learn(
            np.array([p.score for p in proposals]),
            np.stack([p.features for p in proposals]),
            np.array(latencies),
        )
        for p, latency in zip(proposals, latencies, strict=True):
            if np.isfinite(latency):
                self._best.append((latency, p.candidate.space, p.row))
        self._best.sort(key=lambda item: item[0])

    def restore(self, k: int, decisions: list[list[int]], latency: float) -> None:
        """Learn from a trial of an earlier run: decisions of design space `k`, and seconds."""
        row = self.space.spaces[k].find(decisions)
        if row is None:
            return  # Decisions that this design space does not offer: of another TVM.
        self._tried[k].add(row.tobytes())
        score, features = self.scorer.score(k, row[None])
        self._learn(score, features, np.array([latency]))
        if np.isfinite(latency):
            self._best.append((latency, k, row))
            self._best.sort(key=lambda item: item[0])

    def _learn(self, score: np.ndarray, features: np.ndarray, latency: np.ndarray) -> None:
        self._posterior.update(score, features, latency)
        self._knows = True

    @functools.cached_property
    def _posterior(self) -> Posterior:
        return Posterior(self._feature_scale())

    # -- steps -----------------------------------------------------------------------------------------------

    def _evolve(self, explore: float) -> list[_Pool]:
        spaces = self.space.spaces
        share = POPULATION // len(spaces)
        pools = self._score_all([self._unique(space.sample(share, self.rng)) for space in spaces], explore)
        for _generation in range(GENERATIONS):
            values = np.concatenate([pool.value for pool in pools])
            if len(values) < 2:
                break
            bar = np.partition(values, -min(PARENTS, len(values)))[-min(PARENTS, len(values))]
            fresh = [pool.rows[:0] for pool in pools]
            for k, pool in enumerate(pools):
                parents = pool.rows[pool.value >= bar][:PARENTS]
                trials = [row for _latency, space, row in self._best[:16] if space == k]
                if trials:
                    parents = np.concatenate([np.stack(trials), parents])
                if not len(parents):
                    continue
                n = max(1, CHILDREN * len(parents) // (PARENTS + len(trials)))
                a = parents[self.rng.integers(len(parents), size=n)]
                b = parents[self.rng.integers(len(parents), size=n)]
                children = np.where(
                    self.rng.random((n, 1)) < 0.5,
                    spaces[k].mutate(a, self.rng),
                    spaces[k].mutate(spaces[k].crossover(a, b, self.rng), self.rng, rate=0.5),
                )
                fresh[k] = self._unique(children, pool.rows)
            pools = [_merge(*pair) for pair in zip(pools, self._score_all(fresh, explore), strict=True)]
        return pools

    def _neighbours(self) -> list[_Pool]:
        """Small changes of the best trials, by their expected latency alone."""
        near = []
        for k, design in enumerate(self.space.spaces):
            best = [row for _latency, space, row in self._best[:4] if space == k]
            rows = (
                np.stack(best)[self.rng.integers(len(best), size=NEIGHBOURS)]
                if best
                else design.sample(0, self.rng)
            )
            near.append(self._unique(design.mutate(rows, self.rng, rate=0.5)))
        return self._score_all(near, 0.0)

    def _feature_scale(self) -> np.ndarray:
        """Divisors under which random candidates differ by about 1 in the embedding and 1 in the summary.

        Of the summary each feature counts alike, of the embedding those that spread.
        """
        samples = [design.sample(256, self.rng) for design in self.space.spaces]
        variance = np.concatenate([features for _, features in self.scorer.score_all(samples)]).var(axis=0)
        embedding, summary = np.split(variance, [self.scorer.embedding_width])
        live = summary > 1e-9
        return np.concatenate(
            [
                np.full(len(embedding), np.sqrt(embedding.sum()) + 1e-6),
                np.where(live, np.sqrt(np.maximum(summary, 1e-9) * max(live.sum(), 1)), np.inf),
            ]
        )

    def _score_all(self, rows: Sequence[np.ndarray], explore: float) -> list[_Pool]:
        """Pools of all design spaces, from the decision vectors of each."""
        found = self.scorer.score_all(rows)
        return [self._pool(some, *scored, explore) for some, scored in zip(rows, found, strict=True)]

    def _pool(self, rows: np.ndarray, score: np.ndarray, features: np.ndarray, explore: float) -> _Pool:
        self.scored += len(rows)
        if not self._knows:
            return _Pool(rows, score, features, score.astype(np.float64))
        mean, deviation = self._posterior.predict(score, features)
        return _Pool(rows, score, features, mean + explore * deviation)

    @staticmethod
    def _unique(rows: np.ndarray, known: np.ndarray | None = None) -> np.ndarray:
        rows = np.unique(rows, axis=0)
        if known is None or not len(known) or not rows.shape[1]:
            return rows
        return rows[~np.isin(_packed(rows), _packed(known))]

    @staticmethod
    def _top(pool: _Pool, n: int) -> list[tuple[int, float]]:
        order = np.argsort(-pool.value, kind="stable")[:n]
        return [(int(i), float(pool.value[i])) for i in order]


def _condition(covariance: np.ndarray, at: int) -> None:
    """Take a candidate as measured, in place: the others are less uncertain as far as they are like it."""
    column = covariance[at] / np.sqrt(covariance[at, at] + NOISE**2)
    covariance -= np.outer(column, column)


def _packed(rows: np.ndarray) -> np.ndarray:
    """Each row as one opaque value, so that whole rows compare."""
    return np.ascontiguousarray(rows).view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()


def _merge(a: _Pool, b: _Pool) -> _Pool:
    return _Pool(*map(np.concatenate, zip(a, b, strict=True)))
