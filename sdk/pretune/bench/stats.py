"""The averages that benchmarks and the training side report."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def geomean(values: Sequence[float]) -> float | None:
    """Geometric mean; None of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def spearman(a: ArrayLike, b: ArrayLike) -> float | None:
    """Rank correlation of two series without many ties; None where it does not exist."""
    ranks = np.stack([np.argsort(np.argsort(np.asarray(x))) for x in (a, b)])
    if ranks.shape[1] < 3:
        return None
    return float(np.asarray(np.corrcoef(ranks))[0, 1])
