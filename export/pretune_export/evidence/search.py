"""What the benchmarks of the search found: ``pretune bench search`` at several budgets, over seeds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from pretune.bench.stats import geomean


def summarise(benches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per budget, smallest first.

    Parameters
    ----------
    benches : sequence of dict
        JSON of ``pretune bench search``. The unmeasured first choice, which every run times too, becomes a
        row of its own at 0 trials.

    Returns
    -------
    list of dict
        ``trials`` of pretune, ``baseline_trials`` of MetaSchedule; ``geomean`` and ``median`` of
        MetaSchedule's latency over pretune's; ``low`` and ``high``, the smallest and largest geometric mean
        of a seed; ``subgraphs``, ``seeds``, and the machine.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for bench in benches:
        budgets = {bench["trials"]: "ratio"} | ({0: "zero_ratio"} if bench["trials"] else {})
        for trials, ratio in budgets.items():
            found = _row(bench["rows"], ratio)
            if found and (trials == bench["trials"] or (trials, bench["baseline_trials"]) not in rows):
                rows[trials, bench["baseline_trials"]] = {
                    "trials": trials,
                    "baseline_trials": bench["baseline_trials"],
                    **found,
                    **{name: bench[name] for name in ("cpu", "microarch", "cores", "weights")},
                }
    return [rows[key] for key in sorted(rows)]


def _row(rows: Sequence[dict[str, Any]], ratio: str) -> dict[str, Any]:
    by_seed: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row[ratio]:
            by_seed[row["seed"]].append(row[ratio])
    if not by_seed:
        return {}
    each = [x for seed in by_seed.values() for x in seed]
    means = [mean for seed in by_seed.values() if (mean := geomean(seed))]
    return {
        "geomean": geomean(each),
        "low": min(means),
        "high": max(means),
        "median": statistics.median(each),
        "subgraphs": len({row["name"] for row in rows if row[ratio]}),
        "seeds": len(by_seed),
    }
