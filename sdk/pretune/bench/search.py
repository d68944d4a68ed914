"""``pretune bench search``: what pretune finds against what stock MetaSchedule finds, for the same trials."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.bench.common import Bench, environment, prepare, show_environment
from pretune.bench.found import Curve, Found, Store, after, powers_of_two
from pretune.bench.metaschedule import check_xgboost, tune_stock
from pretune.bench.ours import tune_ours
from pretune.bench.suite import load_suite, tasks_of_module
from pretune.bench.summary import drift_notice, moved, summarise
from pretune.errors import OptionError, PretuneError, one_line
from pretune.measure import MeasurePool
from pretune.messages import explain_os_errors
from pretune.records import RunFolder, target_key

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.intake import Task

NOTES = (
    "pretune measures the untuned program once, beside its trials; MetaSchedule never does",
    "both name their winner by timing their best candidates in turns; where metaschedule's finalists are 1, "
    "its winner was named by its tuning measurement",
    "each side was tuned once with its largest budget; smaller budgets are the first trials of that run",
    "curves hold the latencies of the trials themselves; ratios are of winners timed again, all in turns",
)
"""How the two sides differ, for whoever reads the JSON."""

ROUNDS = 9
"""Turns in which the winners are timed; the fastest of each counts, since a busy machine only slows them."""

FAR_BEHIND = 5.0
"""An untuned program this many times slower than the winner keeps the latency of its first measurement."""

SIDES = ("pretune", "metaschedule")

Program = tuple[str, int]
"""What is timed: a side and its budget; ``("default", 0)`` is the untuned program."""

UNTUNED: Program = ("default", 0)


@dataclass(frozen=True)
class _Settings:
    """What decides a row, besides its name and seed."""

    trials: tuple[int, ...]
    baseline_trials: tuple[int, ...]
    weights: str
    target: str


def run(
    suite: str | Path,
    *,
    only: Sequence[str] | None = None,
    trials: Sequence[int] = (0, 64),
    baseline_trials: Sequence[int] = (64,),
    seeds: int = 1,
    weights: str | Path | None = None,
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
    bench = prepare(weights)
    manifest = (bench.weights.path / "manifest.json").read_bytes()
    settings = _Settings(
        tuple(sorted(set(trials))), tuple(sorted(set(baseline_trials))), _digest(manifest),
        target_key(bench.target),
    )  # fmt: skip
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    with _folder(out) as folder, MeasurePool(bench.target) as pool:
        known = _Known(folder)
        for seed in range(seeds):
            for name in names:
                key = _key(name, seed, settings)
                row = known.rows.find(key)
                if row is None:
                    row = _Row(bench, pool, known, settings, name, subgraphs[name], seed).make()
                    if row["ratios"]:
                        known.rows.keep(key, row)
                rows.append(row)
                say(_line(row, len(rows), seeds * len(names), rows))
    return {
        "benchmark": "search",
        "suite": str(suite),
        "trials": list(settings.trials),
        "baseline_trials": list(settings.baseline_trials),
        "seeds": seeds,
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

    columns = [(side, n) for side in reversed(SIDES) for n in found[_BUDGETS[side]]]
    table = Table("subgraph", "kind")
    for title in ("untuned", *(f"{_TITLES[side]} {n}" for side, n in columns), "tuning"):
        table.add_column(title, justify="right")
    for row in found["rows"]:
        name = row["name"] if found["seeds"] == 1 else f"{row['name']} #{row['seed']}"
        spent = [max((each["seconds"] for each in row[side]), default=0.0) for side in reversed(SIDES)]
        table.add_row(
            name,
            Text(row["error"] or row["kind"]),
            seconds_text(row["default_latency"]),
            *(seconds_text(_latency(row, side, n)) for side, n in columns),
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


_BUDGETS = {"pretune": "trials", "metaschedule": "baseline_trials"}
_TITLES = {"pretune": "pretune", "metaschedule": "MetaSchedule"}


class _Known:
    """What earlier runs into the same folder found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = Store(folder / "rows.jsonl")
        self.sides = {side: Store(folder / f"{side}.jsonl") for side in SIDES}


class _Row:
    """One subgraph with one seed."""

    def __init__(
        self,
        bench: Bench,
        pool: MeasurePool,
        known: _Known,
        settings: _Settings,
        name: str,
        subgraph: Any,
        seed: int,
    ) -> None:
        self.bench, self.pool, self.known, self.settings = bench, pool, known, settings
        self.name, self.subgraph, self.seed = name, subgraph, seed
        self.folder = known.folder / "work" / f"{name}-seed{seed}"

    def make(self) -> dict[str, Any]:
        """Tune both ways, time the winners in turns."""
        row: dict[str, Any] = {
            "name": self.name,
            "kind": str(getattr(self.subgraph, "kind", "")),
            "seed": self.seed,
            "error": "",
            "calibration": [],
            "default_latency": None,
            **{side: [] for side in SIDES},
            "ratios": [],
            "curves": {},
            "tasks": [],
        }
        try:
            tasks = self._tasks()
            before = self.pool.calibrate()
            parts = [self._task(task) for task in tasks]
            row["calibration"] = [before, self.pool.calibrate()]
        except PretuneError:
            raise  # the pool or the disk: every other row would fail too
        except Exception as error:  # one subgraph that fails is one row without a ratio
            return row | {"error": f"{type(error).__name__}: {one_line(error)}"}
        row["tasks"] = parts
        row["error"] = "; ".join(part["error"] for part in parts if part["error"])
        row["default_latency"] = _sum(parts, lambda part: part["default"])
        for side in SIDES:
            budgets = getattr(self.settings, _BUDGETS[side])
            row[side] = [
                {
                    "trials": budget,
                    "latency": _sum(parts, lambda part: _latency(part, side, budget)),  # noqa: B023
                    "seconds": round(sum(part[side][at]["seconds"] for part in parts), 2),
                }
                for at, budget in enumerate(budgets)
            ]
            if all(part["curves"][side] or not part[side][-1]["measured"] for part in parts):
                row["curves"][side] = [
                    [n, _sum(parts, lambda part: _after(part, side, n))]  # noqa: B023
                    for n in sorted({*powers_of_two(budgets[-1]), budgets[-1]})
                ]
        row["ratios"] = [
            {"trials": ours["trials"], "baseline_trials": stock["trials"], "ratio": ratio}
            for stock in row["metaschedule"]
            for ours in row["pretune"]
            if (ratio := _over(stock["latency"], ours["latency"]))
        ]
        return row

    def _tasks(self) -> tuple[Task, ...]:
        module, inputs = self.subgraph.build()
        return tasks_of_module(module, inputs, target=self.bench.target, name=self.name)

    def _task(self, task: Task) -> dict[str, Any]:
        """Latencies of one task: seconds by side, and how they came about."""
        from pretune.tuning import replay

        found: dict[Program, Found] = {}
        for side in SIDES:
            found |= {(side, budget): one for budget, one in self._side(side, task).items()}
        mods: dict[Program, Any] = {UNTUNED: task.mod}
        for program, one in found.items():
            mods[program] = task.mod if one.trace is None else replay(task.mod, one.trace)
        default = next((one.default for one in found.values() if one.default), None) or self._once(task)
        best = min((one.latency for one in found.values() if one.latency), default=default)
        latencies = self._in_turns(mods, default, best)
        errors = dict.fromkeys(f"{task.name}: {one.error}" for one in found.values() if one.error)
        failed = [program for program, latency in latencies.items() if latency is None]
        errors |= dict.fromkeys(f"{task.name}: {' '.join(map(str, program))} failed" for program in failed)
        part: dict[str, Any] = {
            "name": task.name,
            "task_id": task.task_id,
            "weight": task.weight,
            "default": latencies[UNTUNED],
            **{side: [] for side in SIDES},
            "curves": {
                side: max((o.curve for p, o in found.items() if p[0] == side), key=len) for side in SIDES
            },
            "error": "; ".join(errors),
        }
        for (side, budget), one in found.items():
            part[side].append(
                {
                    "trials": budget,
                    "latency": latencies[side, budget],
                    "seconds": round(one.seconds, 2),
                    "measured": one.trials,
                    "failures": one.failures,
                    "finalists": max(1, len(one.traces)),
                    "chosen_by": one.chosen_by,
                    "notes": one.notes,
                }
            )
        return part

    def _side(self, side: str, task: Task) -> dict[int, Found]:
        """What a side finds within each of its budgets, one run makes all that are missing."""
        store, budgets = self.known.sides[side], getattr(self.settings, _BUDGETS[side])
        keys = {budget: self._key(side, task, budget) for budget in budgets}
        found = {b: Found(**value) for b, key in keys.items() if (value := store.find(key)) is not None}
        if missing := [budget for budget in budgets if budget not in found]:
            work_dir = self.folder / f"{side}-{task.task_id}"
            if side == "pretune":
                new = tune_ours(
                    task, self.bench, self.pool, budgets=missing, seed=self.seed, work_dir=work_dir
                )
            else:
                new = tune_stock(
                    task, self.bench.target, self.pool, budgets=missing, seed=self.seed, work_dir=work_dir
                )
            for budget, one in new.items():
                store.keep(keys[budget], one.to_dict())
            found |= new
        return {budget: found[budget] for budget in budgets}

    def _key(self, side: str, task: Task, budget: int) -> str:
        key = f"{task.task_id} {self.seed} {budget} {self.settings.target}"
        return key if side == "metaschedule" else f"{key} {self.settings.weights}"

    def _in_turns(
        self, mods: Mapping[Program, Any], default: float | None, best: float | None
    ) -> dict[Program, float | None]:
        """Fastest turn of each program; None if it failed. One that several share is timed once.

        `default` and `best` are what was measured before: an untuned program that failed or is far behind
        keeps that, since a turn of it may take seconds.
        """
        from tvm_ffi import structural_hash

        keys = {program: structural_hash(mod) for program, mod in mods.items()}
        distinct = {keys[program]: mod for program, mod in mods.items()}
        slow = default is None or best is None or default > FAR_BEHIND * best
        if slow and list(keys.values()).count(keys[UNTUNED]) == 1:
            del distinct[keys[UNTUNED]]
        timed = self.pool.interleave(list(distinct.values()), rounds=ROUNDS)
        fastest = {
            key: measured.latency if measured.ok else None
            for key, measured in zip(distinct, timed, strict=True)
        }
        return {program: fastest.get(key, default) for program, key in keys.items()}

    def _once(self, task: Task) -> float | None:
        """Latency of the untuned program where pretune has not measured it; None if it fails."""
        from pretune.tuning import patient

        with patient(self.pool):
            (measured,) = self.pool.measure([task.mod])
        return measured.latency if measured.ok else None


def _sum(
    parts: Sequence[Mapping[str, Any]], latency: Callable[[Mapping[str, Any]], float | None]
) -> float | None:
    """Latency of a subgraph: each task as often as it is called; None if one has none."""
    each = [part["weight"] * (latency(part) or math.inf) for part in parts]
    return total if math.isfinite(total := sum(each)) else None


def _latency(found: Mapping[str, Any], side: str, budget: int) -> float | None:
    """Of a row, or of a task in one."""
    return next((one["latency"] for one in found[side] if one["trials"] == budget), None)


def _after(part: Mapping[str, Any], side: str, trials: int) -> float | None:
    """Best latency of a task after so many trials; where there was nothing to try, of the only choice."""
    curve: Curve = part["curves"][side]
    return after(curve, trials) if curve else part[side][-1]["latency"]


@contextlib.contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="pretune-bench-") as folder:
            yield Path(folder)
        return
    folder = Path(out).expanduser()
    with explain_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with RunFolder(folder):  # one benchmark at a time
        yield folder


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _key(name: str, seed: int, settings: _Settings) -> str:
    budgets = json.dumps([settings.trials, settings.baseline_trials], separators=(",", ":"))
    return f"{name} {seed} {budgets} {settings.weights} {settings.target}"


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(row: Mapping[str, Any], done: int, count: int, rows: Sequence[Mapping[str, Any]]) -> str:
    from pretune.progress import seconds_text

    start = f"[{done}/{count}] {row['name']} #{row['seed']}"
    if not row["ratios"]:
        return f"{start}: no ratio: {row['error']}"
    sides = "; ".join(
        f"{_TITLES[side]} "
        + ", ".join(f"{one['trials']}: {seconds_text(one['latency'])}" for one in row[side])
        for side in reversed(SIDES)
    )
    pairs = ", ".join(
        f"{o['trials']}/{o['baseline_trials']}: {_ratio(o['geomean'])}" for o in summarise(rows)
    )
    drift = "".join(f"; calibration moved by {change:+.0%} meanwhile" for change in moved([row]).values())
    return f"{start}: {sides}{drift}; geometric means so far {pairs}"
