"""``pretune bench search``: what pretune finds against what stock MetaSchedule finds, for the same trials."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.bench.common import environment, prepare, show_environment
from pretune.bench.metaschedule import check_xgboost
from pretune.bench.row import Known, Row, Settings, latency_of
from pretune.bench.summary import drift_notice, moved, summarise
from pretune.errors import OptionError
from pretune.measure import MeasurePool
from pretune.records import RunFolder, target_key
from pretune_export.suite import load_suite

if TYPE_CHECKING:
    from rich.console import Console

NOTES = (
    "pretune measures the untuned program once, beside its trials; MetaSchedule never does",
    "both name their winner by timing their best candidates in turns; where metaschedule's finalists are 1, "
    "its winner was named by its tuning measurement",
    "each side was tuned once with its largest budget; smaller budgets are the first trials of that run",
    "pretune's schedules are compiled with its vector math, all else as stock TVM compiles it",
    "curves hold the latencies of the trials themselves; ratios are of winners timed again, all in turns",
)
"""How the two sides differ, for whoever reads the JSON."""

TITLES = {"metaschedule": "MetaSchedule", "pretune": "pretune"}
"""The sides, as tables name them."""


def run(
    suite: str | Path,
    *,
    only: Sequence[str] | None = None,
    trials: Sequence[int] = (0, 64),
    baseline_trials: Sequence[int] = (64,),
    seeds: int = 1,
    weights: str | Path | None = None,
    target: Any = "native",
    out: str | Path | None = None,
    say: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Tune every subgraph of a suite with pretune and with stock MetaSchedule, and time the winners in turns.

    Parameters
    ----------
    suite : str or Path
        A Python file that defines ``SUBGRAPHS``: a dict of objects whose ``build()`` gives a torch module and
        its example inputs.
    only : sequence of str, optional
        Names of subgraphs.
    trials, baseline_trials : sequence of int
        Budgets per task, of pretune (0: the model's first choice) and of MetaSchedule. Each side is tuned
        once, with its largest: see `tune_ours` and `tune_stock`. The winners of all are timed in turns.
    seeds : int
        How often all is repeated, with seeds 0, 1 ...
    weights : str or Path, optional
        Weights folder.
    target : Target, mapping or str
        What both sides tune for; runs on this machine.
    out : str or Path, optional
        Keeps what either side found for a task (``pretune.jsonl``, ``metaschedule.jsonl``), rows
        (``rows.jsonl``) and logs. What is there is not made again, and serves other pairs of budgets;
        MetaSchedule's also serves other weights. So an interrupted run loses one side of one task.
    say : callable
        Told about progress, a line at a time.

    Returns
    -------
    dict
        ``rows``, one per subgraph and seed, with ``ratios``, MetaSchedule's latency over pretune's for pairs
        of budgets, and ``curves``, best latencies so far by side; ``summary`` as `summarise` gives it;
        ``notes`` on how the two sides differ; ``drift``, a line if the machine's speed moved; the machine and
        versions.

    Raises
    ------
    MissingExtraError
        Without torch or XGBoost.
    InputError, OptionError
        For a suite that is none, and unknown names.
    """
    subgraphs = load_suite(suite)
    if unknown := [name for name in only or () if name not in subgraphs]:
        raise OptionError(f"no subgraph {unknown[0]!r} in {suite}; it has: {', '.join(subgraphs)}")
    check_xgboost()
    names = [name for name in subgraphs if only is None or name in only]
    bench = prepare(weights, target)
    networks = (bench.weights.path / "model.safetensors").read_bytes()
    budgets = {"pretune": sorted(set(trials)), "metaschedule": sorted(set(baseline_trials))}
    settings = Settings(budgets, _digest(networks), target_key(bench.target))
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    with _folder(out) as folder, MeasurePool(bench.target) as pool:
        known = Known(folder)
        for seed in range(seeds):
            for name in names:
                key = settings.key(name, seed)
                row = known.rows.find(key)
                if row is None:
                    row = Row(bench, pool, known, settings, name, subgraphs[name], seed).make()
                    if row["ratios"]:
                        known.rows.keep(key, row)
                rows.append(row)
                say(_line(row, len(rows), seeds * len(names), rows))
    return {
        "benchmark": "search",
        "suite": str(suite),
        "trials": budgets["pretune"],
        "baseline_trials": budgets["metaschedule"],
        "seeds": seeds,
        "target": str(bench.target),
        "weights": f"{bench.weights.config.name} ({bench.weights.why})",
        "summary": summarise(rows),
        "drift": drift_notice(rows),
        "notes": list(NOTES),
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
        **environment(bench.machine),
    }


def render(found: Mapping[str, Any], console: Console) -> None:
    """Print a table of the rows and one of the pairs of budgets."""
    from rich.table import Table
    from rich.text import Text

    from pretune.progress import seconds_text

    columns = [("metaschedule", n) for n in found["baseline_trials"]]
    columns += [("pretune", n) for n in found["trials"]]
    table = Table("subgraph", "kind")
    for title in ("untuned", *(f"{TITLES[side]} {n}" for side, n in columns), "tuning"):
        table.add_column(title, justify="right")
    for row in found["rows"]:
        name = row["name"] if found["seeds"] == 1 else f"{row['name']} #{row['seed']}"
        spent = [max((each["seconds"] for each in row[side]), default=0.0) for side in TITLES]
        table.add_row(
            name,
            Text(row["error"] or row["kind"]),
            seconds_text(row["default_latency"]),
            *(seconds_text(latency_of(row, side, n)) for side, n in columns),
            " / ".join(f"{seconds:.0f}" for seconds in spent) + " s",
        )
    console.print(table)
    table = Table("trials", "MetaSchedule's", "geometric mean", "95 % interval", "seeds", "median", "rows")
    for one in found["summary"]:
        table.add_row(
            str(one["trials"] or "none: first choice"),
            str(one["baseline_trials"]),
            _ratio(one["geomean"]),
            "-" if one["low"] is None else f"{one['low']:.2f} to {one['high']:.2f}",
            f"{one['seed_low']:.2f} to {one['seed_high']:.2f}" if one["seeds"] > 1 else str(one["seeds"]),
            _ratio(one["median"]),
            str(one["compared"]),
        )
    console.print("MetaSchedule's latency / pretune's:")
    console.print(table)
    if found["drift"]:
        console.print(found["drift"], markup=False, soft_wrap=True)
    console.print(f"weights: {found['weights']}", markup=False)
    show_environment(dict(found), console)


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="pretune-bench-") as folder:
            yield Path(folder)
        return
    with RunFolder(out) as held:  # one benchmark at a time
        yield held.path


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(row: Mapping[str, Any], done: int, count: int, rows: Sequence[Mapping[str, Any]]) -> str:
    from pretune.progress import seconds_text

    start = f"[{done}/{count}] {row['name']} #{row['seed']}"
    if not row["ratios"]:
        return f"{start}: no ratio: {row['error']}"
    sides = "; ".join(
        f"{TITLES[side]} "
        + ", ".join(f"{one['trials']}: {seconds_text(one['latency'])}" for one in row[side])
        for side in TITLES
    )
    pairs = ", ".join(
        f"{o['trials']}/{o['baseline_trials']}: {_ratio(o['geomean'])}" for o in summarise(rows)
    )
    drift = "".join(f"; calibration moved by {change:+.0%} meanwhile" for change in moved([row]).values())
    return f"{start}: {sides}{drift}; geometric means so far {pairs}"
