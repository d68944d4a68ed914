"""What the benchmarks of the search found: ``pretune bench search`` at several budgets, over seeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from pretune.bench.stats import geomean
from pretune.bench.summary import summarise as summarise_rows

MACHINE = ("cpu", "microarch", "cores", "weights")
"""What a row says of where, and with what, it was measured."""


def summarise(benches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per pair of budgets, smallest first.

    Parameters
    ----------
    benches : sequence of dict
        JSON of ``pretune bench search``. Where several have the same pair, the last one counts.

    Returns
    -------
    list of dict
        As `pretune.bench.summary.summarise` gives them, and the machine.
    """
    rows: dict[tuple[int, int], dict[str, Any]] = {}
    for bench in benches:
        machine = {name: bench[name] for name in MACHINE}
        for row in summarise_rows(bench["rows"]):
            rows[row["baseline_trials"], row["trials"]] = row | machine
    return [rows[key] for key in sorted(rows)]


def curves(benches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Best latency so far against trials, of the benchmark with the largest budgets whose rows have both.

    Returns
    -------
    dict
        ``baseline_trials``, MetaSchedule's budget; ``pretune`` and ``metaschedule``, lists of ``trials``,
        ``geomean``, ``low`` and ``high``: MetaSchedule's best latency in the end over the side's best so far,
        geometric mean over subgraphs and seeds, and the smallest and largest of a seed. Latencies are those
        of the trials themselves. Empty if there are no curves.
    """

    def whole(bench: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        return [row for row in bench["rows"] if len(row["curves"]) == 2]

    with_curves = [bench for bench in benches if whole(bench)]
    if not with_curves:
        return {}
    bench = max(with_curves, key=lambda one: (max(one["baseline_trials"]), max(one["trials"])))
    found: dict[str, Any] = {"baseline_trials": max(bench["baseline_trials"])}
    for side in ("pretune", "metaschedule"):
        ratios: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in whole(bench):
            final = row["curves"]["metaschedule"][-1][1]
            for trials, latency in row["curves"][side]:
                if final and latency:
                    ratios[trials][row["seed"]].append(final / latency)
        found[side] = [_point(trials, by_seed) for trials, by_seed in sorted(ratios.items())]
    return found


def _point(trials: int, by_seed: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    means = [mean for each in by_seed.values() if (mean := geomean(each))]
    every = [ratio for each in by_seed.values() for ratio in each]
    return {"trials": trials, "geomean": geomean(every), "low": min(means), "high": max(means)}
