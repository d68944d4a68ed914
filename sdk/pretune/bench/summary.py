"""What rows of the search benchmark say together."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pretune.bench.stats import geomean
from pretune.measure.noise import MAX_DRIFT

CONFIDENCE = 0.95


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Sum up the ratios of rows by pair of budgets, smallest first.

    Parameters
    ----------
    rows : iterable of mapping
        As `pretune.bench.search.run` gives them.

    Returns
    -------
    list of dict
        ``trials`` of pretune and ``baseline_trials`` of MetaSchedule; ``geomean`` and ``median`` of
        MetaSchedule's latency over pretune's; ``seed_low`` and ``seed_high``, the smallest and largest
        geometric mean of a seed; ``low`` and ``high``, the `CONFIDENCE` interval of the geometric mean by a
        bootstrap over subgraphs, all seeds of one together (None of a single one); ``compared``,
        ``subgraphs`` and ``seeds``, how many ratios there are, and of what.
    """
    pairs: dict[tuple[int, int], list[tuple[str, int, float]]] = defaultdict(list)
    for row in rows:
        for found in row["ratios"]:
            if found["ratio"]:
                one = (row["name"], row["seed"], found["ratio"])
                pairs[found["baseline_trials"], found["trials"]].append(one)
    return [
        {"trials": trials, "baseline_trials": baseline_trials, **_figures(pairs[baseline_trials, trials])}
        for baseline_trials, trials in sorted(pairs)
    ]


def _figures(ratios: Sequence[tuple[str, int, float]]) -> dict[str, Any]:
    by_name: dict[str, list[float]] = defaultdict(list)
    by_seed: dict[int, list[float]] = defaultdict(list)
    for name, seed, ratio in ratios:
        by_name[name].append(ratio)
        by_seed[seed].append(ratio)
    values = [ratio for _name, _seed, ratio in ratios]
    means = [mean for each in by_seed.values() if (mean := geomean(each))]
    low, high = _interval(list(by_name.values()))
    return {
        "geomean": geomean(values),
        "median": statistics.median(values),
        "seed_low": min(means),
        "seed_high": max(means),
        "low": low,
        "high": high,
        "compared": len(values),
        "subgraphs": len(by_name),
        "seeds": len(by_seed),
    }


def _interval(ratios: Sequence[Sequence[float]]) -> tuple[float | None, float | None]:
    """Percentile interval of the geometric mean of ratios that are grouped by subgraph."""
    import numpy as np
    from scipy.stats import bootstrap

    if len(ratios) < 2:
        return None, None
    sums = np.array([sum(map(math.log, each)) for each in ratios])
    counts = np.array([len(each) for each in ratios])

    def mean(sums: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.exp(sums.sum(axis) / counts.sum(axis))

    found = bootstrap(
        (sums, counts), mean, paired=True, vectorized=True, confidence_level=CONFIDENCE, method="percentile",
        rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def moved(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Rows while which the machine's speed moved by more than `MAX_DRIFT`, and by how much."""
    found = {}
    for row in rows:
        if row["calibration"]:
            before, after = row["calibration"]
            if abs(after / before - 1) > MAX_DRIFT:
                found[f"{row['name']} #{row['seed']}"] = after / before - 1
    return found


def drift_notice(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line on the rows that `moved`, and on how far rows are from each other; empty if all is well."""
    if not (rows := [row for row in rows if row["calibration"]]):
        return ""
    times = [seconds for row in rows for seconds in row["calibration"]]
    across = max(times) / min(times) - 1
    if across <= MAX_DRIFT:
        return ""
    found = moved(rows)
    listed = ", ".join(f"{name} {change:+.0%}" for name, change in found.items())
    while_made = f", and while {len(found)} of {len(rows)} rows were made ({listed})" if found else ""
    return (
        f"the machine's speed moved: the calibration kernel took {1e3 * min(times):.3g} to "
        f"{1e3 * max(times):.3g} ms ({across:+.0%}){while_made}; ratios are of winners timed in turns, but "
        "trials at one speed may have been compared with trials at another"
    )
