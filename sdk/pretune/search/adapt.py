"""Correct the ranker on the task at hand from the trials measured so far, without torch.

A Gaussian process with the ranker's score as prior mean (its slope fitted) and a Matérn kernel over what
describes a candidate: the ranker's embedding and the summary of its actions. See Rasmussen and Williams,
"Gaussian Processes for Machine Learning", 2006, chapters 2, 4 and 5.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.linalg import LinAlgError

MAX_POINTS = 512
"""Trials kept in the posterior: beyond it, the fastest half and the latest half of the rest."""

FAILED = 1.5
"""A failed candidate counts as this much worse (in natural log of latency) than the slowest that ran."""

_LENGTHS = (0.6, 1.2, 2.4)
_SIGNALS = (0.1, 0.3, 0.8)
_NOISES = (0.03, 0.1)
_PRIOR = 1.2, 0.3
"""Length and signal before there are trials."""
_SLOPE, _SLOPE_PRECISION = 0.8, 30.0
"""Prior of the score's slope: the ranker is trained such that its scores have the scale of log latency."""


class _Fit(NamedTuple):
    """The process with the most likely hyperparameters: trials, their scaling, and what solves for means."""

    x: np.ndarray
    centre: np.ndarray
    scale: np.ndarray
    beta: np.ndarray
    length: float
    signal: float
    chol: np.ndarray
    alpha: np.ndarray


class Posterior:
    """Predicts the negative log latency of candidates of one task.

    With no trials `predict` returns the scores themselves and zero deviation.

    Parameters
    ----------
    scale : numpy.ndarray, optional
        Divisor of each feature, ``[e]``, such that unrelated candidates of the task are about 1 apart; by
        default the spread of the trials themselves.
    """

    def __init__(self, scale: np.ndarray | None = None) -> None:
        self._scale = scale
        self._score = np.zeros(0)
        self._x = np.zeros((0, 0))
        self._latency = np.zeros(0)
        self._fit: _Fit | None = None

    def update(self, score: np.ndarray, embedding: np.ndarray, latency: np.ndarray) -> None:
        """Add trials.

        Parameters
        ----------
        score, embedding : numpy.ndarray
            The ranker's outputs, ``[n]`` and ``[n, e]``.
        latency : numpy.ndarray
            Seconds ``[n]``; infinite for a candidate that failed.
        """
        self._score = np.concatenate([self._score, score])
        self._x = np.concatenate([self._x.reshape(-1, embedding.shape[1]), embedding])
        self._latency = np.concatenate([self._latency, latency])
        self._fit = None

    def predict(self, score: np.ndarray, embedding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of the negative log latency of candidates, each ``[n]``.

        The mean is relative to an unknown constant: it orders candidates of the task.
        """
        if not self._knows:
            return score.astype(np.float64), np.zeros(len(score))
        mean, v, _x = self._conditioned(score, embedding)
        # |chol^-1 k|^2, solved for all candidates at once.
        deviation = np.sqrt(np.maximum(self._fitted.signal**2 - np.einsum("ij,ij->j", v, v), 1e-9))
        return mean, deviation

    def joint(self, score: np.ndarray, embedding: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean ``[n]`` as of `predict`, and covariance ``[n, n]``: without trials, that of `_PRIOR`."""
        if not self._knows:
            scale = self._scale if self._scale is not None else 1.0
            x = (embedding - embedding.mean(0)) / scale
            return score.astype(np.float64), _kernel(x, x, *_PRIOR)
        mean, v, x = self._conditioned(score, embedding)
        return mean, _kernel(x, x, self._fitted.length, self._fitted.signal) - v.T @ v

    @property
    def _knows(self) -> bool:
        return bool(np.isfinite(self._latency).sum() > 1)

    @property
    def _fitted(self) -> _Fit:
        if self._fit is None:
            self._fit = self._fit_hyperparameters()
        return self._fit

    def _conditioned(
        self, score: np.ndarray, embedding: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Means, ``chol^-1 k`` ``[trials, n]``, and scaled features."""
        fit = self._fitted
        x = (embedding - fit.centre) / fit.scale
        k = _kernel(x, fit.x, fit.length, fit.signal)
        return fit.beta[0] + fit.beta[1] * score + k @ fit.alpha, np.linalg.solve(fit.chol, k.T), x

    def _fit_hyperparameters(self) -> _Fit:
        ran = np.isfinite(self._latency)
        y = np.empty(len(self._latency))
        y[ran] = -np.log(self._latency[ran])
        y[~ran] = y[ran].min() - FAILED
        # Far from the best, only that a candidate is slow matters, not by how much.
        best = y.max()
        y = best - np.where(best - y > 2.0, 2.0 + 0.3 * (best - y - 2.0), best - y)
        index = self._kept(y)
        y, score, x = y[index], self._score[index], self._x[index]
        centre = x.mean(0)
        # Features count by how far they spread over the task, so dead ones do not divide by zero.
        scale = (
            self._scale
            if self._scale is not None
            else np.full(x.shape[1], float(np.sqrt(x.var(0).sum())) + 1e-9)
        )
        x = (x - centre) / scale
        design = np.stack([np.ones(len(y)), score], axis=1)
        best_fit, most = None, -np.inf
        for length in _LENGTHS:
            base = _kernel(x, x, length, 1.0)
            for signal in _SIGNALS:
                for noise in _NOISES:
                    cov = signal**2 * base + noise**2 * np.eye(len(y))
                    try:
                        chol = np.linalg.cholesky(cov)
                    except LinAlgError:
                        continue
                    wd, wy = np.linalg.solve(chol, design), np.linalg.solve(chol, y)
                    # The first trials are the best-ranked: within them scores hardly differ, and a free slope
                    # would make the worst-ranked candidates look as good as the best.
                    prior = np.diag([1e-4, _SLOPE_PRECISION])
                    beta = np.linalg.solve(wd.T @ wd + prior, wd.T @ wy + prior @ np.array([0.0, _SLOPE]))
                    residual = wy - wd @ beta
                    evidence = (
                        -0.5 * residual @ residual
                        - np.log(np.diag(chol)).sum()
                        - 0.5 * _SLOPE_PRECISION * (beta[1] - _SLOPE) ** 2
                    )
                    if evidence > most:
                        alpha = np.linalg.solve(chol.T, residual)
                        best_fit, most = _Fit(x, centre, scale, beta, length, signal, chol, alpha), evidence
        assert best_fit is not None  # noise on the diagonal makes at least one factorisation exist
        return best_fit

    def _kept(self, y: np.ndarray) -> np.ndarray:
        if len(y) <= MAX_POINTS:
            return np.arange(len(y))
        fastest = np.argsort(-y)[: MAX_POINTS // 2]
        rest = np.setdiff1d(np.arange(len(y)), fastest)
        return np.concatenate([fastest, rest[-(MAX_POINTS - len(fastest)) :]])


def _kernel(a: np.ndarray, b: np.ndarray, length: float, signal: float) -> np.ndarray:
    # Of smoothness 3/2, since latencies have cliffs. From half of the schedules of each of 223 validation
    # tasks it predicts the order of the others at a rank correlation of .769, a squared exponential
    # at .762; with each feature of the summary in units of its spread (`TaskSearch._feature_scale`), at .773.
    square = (a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2.0 * a @ b.T
    distance = np.sqrt(np.maximum(3.0 * square, 0.0)) / length
    return signal**2 * (1.0 + distance) * np.exp(-distance)
