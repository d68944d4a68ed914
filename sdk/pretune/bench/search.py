"""``pretune bench search``: what pretune finds against what stock MetaSchedule finds, for the same trials."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.bench.common import Bench, environment, prepare, show_environment
from pretune.bench.metaschedule import Baseline, check_xgboost, tune_stock
from pretune.bench.stats import geomean
from pretune.bench.suite import load_suite, tasks_of_module
from pretune.errors import OptionError, PretuneError, one_line
from pretune.measure import MeasurePool
from pretune.messages import explain_os_errors
from pretune.records import RunFolder, target_key

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.intake import Task
    from pretune.tuning import TaskResult

NOTES = (
    "pretune measures the untuned program once, beside its trials; MetaSchedule never does",
    "both name their winner by timing their best candidates in turns; where metaschedule_finalists is 1, "
    "MetaSchedule's was named by its tuning measurement",
)
"""How the two sides differ, for whoever reads the JSON."""

ROUNDS = 9
"""Turns in which the winners are timed; the fastest of each counts, since a busy machine only slows them."""

FAR_BEHIND = 5.0
"""An untuned program this many times slower than the winner keeps the latency of its first measurement."""


@dataclass(frozen=True)
class _Settings:
    """What decides a row, besides its name and seed."""

    trials: int
    baseline_trials: int
    weights: str
    target: str


def run(
    suite: str | Path,
    *,
    only: Sequence[str] | None = None,
    trials: int = 64,
    baseline_trials: int = 64,
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
    trials, baseline_trials : int
        Per task, of pretune (0: the model's first choice) and of MetaSchedule.
    seeds : int
        How often all is repeated, with seeds 0, 1 ...
    weights : str or Path, optional
        Weights folder.
    out : str or Path, optional
        Keeps rows as they come (``rows.jsonl``), MetaSchedule's results and the logs: rows that are there
        are not made again, and MetaSchedule's results serve other weights and trials of pretune too.
    say : callable
        Told about progress, a line at a time.

    Returns
    -------
    dict
        ``rows``; ``geomean`` and ``median`` of their ``ratio``, MetaSchedule's latency over pretune's;
        ``geomean_zero`` and ``median_zero`` of ``zero_ratio``, the same for pretune's unmeasured first
        choice; ``notes`` on how the two sides differ; the machine and versions.

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
    settings = _Settings(trials, baseline_trials, _digest(manifest), target_key(bench.target))
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    with _folder(out) as folder, MeasurePool(bench.target) as pool:
        known = _Known(folder)
        for seed in range(seeds):
            for name in names:
                row = known.row(name, seed, settings)
                if row is None:
                    row = _Row(bench, pool, known, settings, name, subgraphs[name], seed).make()
                    if row["ratio"] is not None:
                        known.keep_row(name, seed, settings, row)
                rows.append(row)
                say(_line(row, len(rows), seeds * len(names), rows))
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    zeros = [row["zero_ratio"] for row in rows if row["zero_ratio"]]
    return {
        "benchmark": "search",
        "suite": str(suite),
        "trials": trials,
        "baseline_trials": baseline_trials,
        "seeds": seeds,
        "weights": f"{bench.weights.config.name} ({bench.weights.why})",
        "geomean": geomean(ratios),
        "median": statistics.median(ratios) if ratios else None,
        "geomean_zero": geomean(zeros),
        "median_zero": statistics.median(zeros) if zeros else None,
        "compared": len(ratios),
        "notes": list(NOTES),
        "seconds": round(time.monotonic() - started, 1),
        "rows": rows,
        **environment(bench.machine),
    }


def render(found: Mapping[str, Any], console: Console) -> None:
    """Print a table."""
    from rich.table import Table
    from rich.text import Text

    from pretune.progress import seconds_text

    table = Table("subgraph", "kind")
    for name in ("untuned", "MetaSchedule", "pretune", "ratio", "first choice", "ratio", "tuning"):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        name = row["name"] if found["seeds"] == 1 else f"{row['name']} #{row['seed']}"
        table.add_row(
            name,
            Text(row["error"] or row["kind"]),
            *(seconds_text(row[f"{side}_latency"]) for side in ("default", "metaschedule", "pretune")),
            _ratio(row["ratio"]),
            seconds_text(row["zero_latency"]),
            _ratio(row["zero_ratio"]),
            f"{row['metaschedule_seconds']:.0f} / {row['pretune_seconds']:.0f} s",
        )
    console.print(table)
    console.print(
        f"MetaSchedule at {found['baseline_trials']} trials over pretune at {found['trials']}: "
        f"geometric mean {_ratio(found['geomean'])}, median {_ratio(found['median'])}, "
        f"of {found['compared']} rows"
    )
    console.print(
        f"over pretune's unmeasured first choice: geometric mean {_ratio(found['geomean_zero'])}, "
        f"median {_ratio(found['median_zero'])}"
    )
    console.print(f"weights: {found['weights']}", markup=False)
    show_environment(dict(found), console)


class _Known:
    """What earlier runs into the same folder found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows = folder / "rows.jsonl"
        self._baselines = folder / "metaschedule.jsonl"

    def row(self, name: str, seed: int, settings: _Settings) -> dict[str, Any] | None:
        return self._find(self._rows, _key(name, seed, settings))

    def keep_row(self, name: str, seed: int, settings: _Settings, row: dict[str, Any]) -> None:
        self._keep(self._rows, _key(name, seed, settings), row)

    def baseline(self, task: Task, seed: int, settings: _Settings) -> Baseline | None:
        found = self._find(self._baselines, _baseline_key(task, seed, settings))
        return None if found is None else Baseline(**found)

    def keep_baseline(self, task: Task, seed: int, settings: _Settings, found: Baseline) -> None:
        self._keep(self._baselines, _baseline_key(task, seed, settings), found.to_dict())

    def _find(self, path: Path, key: str) -> dict[str, Any] | None:
        found = None
        for line in path.read_text().splitlines() if path.is_file() else ():
            with contextlib.suppress(ValueError):  # an interrupted run may leave half a line
                entry = json.loads(line)
                if entry["key"] == key:
                    found = entry["value"]
        return found

    def _keep(self, path: Path, key: str, value: dict[str, Any]) -> None:
        with explain_os_errors(self.folder), path.open("a") as file:
            file.write(json.dumps({"key": key, "value": value}, allow_nan=False) + "\n")


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
            "pretune_seconds": 0.0,
            "metaschedule_seconds": 0.0,
            "tasks": [],
        }
        sides = ("default", "metaschedule", "pretune", "zero")
        try:
            tasks = self._tasks()
            row["calibration"] = self.pool.calibrate()
            parts = [self._task(task) for task in tasks]
        except PretuneError:
            raise  # the pool or the disk: every other row would fail too
        except Exception as error:  # one subgraph that fails is one row without a ratio
            row |= {f"{side}_latency": None for side in sides}
            return row | {
                "ratio": None,
                "zero_ratio": None,
                "error": f"{type(error).__name__}: {one_line(error)}",
            }
        for part in parts:
            row["pretune_seconds"] += part["pretune_seconds"]
            row["metaschedule_seconds"] += part["metaschedule_seconds"]
            row["tasks"].append(part)
        for side in sides:
            # The latency of the subgraph: each task as often as it is called.
            each = [part["weight"] * part[side] if part[side] else math.inf for part in parts]
            row[f"{side}_latency"] = sum(each) if math.isfinite(sum(each)) else None
        row["error"] = "; ".join(part["error"] for part in parts if part["error"])
        row["ratio"] = _over(row["metaschedule_latency"], row["pretune_latency"])
        row["zero_ratio"] = _over(row["metaschedule_latency"], row["zero_latency"])
        return row

    def _tasks(self) -> tuple[Task, ...]:
        module, inputs = self.subgraph.build()
        return tasks_of_module(module, inputs, target=self.bench.target, name=self.name)

    def _task(self, task: Task) -> dict[str, Any]:
        """Latencies of one task: seconds by side, and how they came about."""
        from pretune.tuning import replay

        ours, ours_s = self._pretune(task, self.settings.trials)
        zero, _zero_s = (ours, 0.0) if self.settings.trials == 0 else self._pretune(task, 0)
        stock = self.known.baseline(task, self.seed, self.settings)
        if stock is None:
            stock = tune_stock(
                task,
                self.bench.target,
                self.pool,
                trials=self.settings.baseline_trials,
                seed=self.seed,
                work_dir=self.folder / f"metaschedule-{task.task_id}",
            )
            self.known.keep_baseline(task, self.seed, self.settings, stock)
        traces = {"default": None, "metaschedule": stock.trace, "pretune": ours.trace, "zero": zero.trace}
        mods = {s: task.mod if trace is None else replay(task.mod, trace) for s, trace in traces.items()}
        default = ours.default or self._once(task)
        best = ours.best or stock.latency or default
        latencies = self._in_turns(mods, default, best)
        errors = [f"{task.name}: {text}" for text in {ours.error, zero.error, stock.error} if text]
        errors += [f"{task.name}: {side} failed" for side, latency in latencies.items() if latency is None]
        return {
            "name": task.name,
            "task_id": task.task_id,
            "weight": task.weight,
            **latencies,
            "chosen_by": ours.chosen_by,
            "pretune_trials": ours.trials,
            "pretune_seconds": round(ours_s, 2),
            "metaschedule_trials": stock.trials,
            "metaschedule_failures": stock.failures,
            "metaschedule_finalists": max(1, len(stock.traces)),
            "metaschedule_seconds": round(stock.seconds, 2),
            "notes": ours.notes,
            "error": "; ".join(errors),
        }

    def _pretune(self, task: Task, trials: int) -> tuple[TaskResult, float]:
        """Tune as `pretune.tune` does; also the seconds it took."""
        from pretune.tuning import Run

        bench = self.bench
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            folder = None
            if trials:
                path = self.folder / f"pretune-{task.task_id}"
                shutil.rmtree(path, ignore_errors=True)  # of an interrupted run: else its trials cost no time
                folder = stack.enter_context(RunFolder(path))
            pool = self.pool if trials else None
            machine = (bench.target, bench.hardware, bench.model)
            result = Run(*machine, pool, folder, trials, self.seed, None, [], 1).task(0, task)
        return result, time.perf_counter() - start

    def _in_turns(
        self, mods: Mapping[str, Any], default: float | None, best: float | None
    ) -> dict[str, float | None]:
        """Fastest turn of each side; None if it failed. A program that two sides share is timed once.

        `default` and `best` are what was measured before: an untuned program that failed or is far behind
        keeps that, since a turn of it may take seconds.
        """
        from tvm_ffi import structural_hash

        keys = {side: structural_hash(mod) for side, mod in mods.items()}
        programs = {keys[side]: mod for side, mod in mods.items()}
        slow = default is None or best is None or default > FAR_BEHIND * best
        if slow and list(keys.values()).count(keys["default"]) == 1:
            del programs[keys["default"]]
        timed = self.pool.interleave(list(programs.values()), rounds=ROUNDS)
        fastest = {
            key: measured.latency if measured.ok else None
            for key, measured in zip(programs, timed, strict=True)
        }
        return {side: fastest.get(key, default) for side, key in keys.items()}

    def _once(self, task: Task) -> float | None:
        """Latency of the untuned program where pretune has not measured it; None if it fails."""
        from pretune.tuning import patient

        with patient(self.pool):
            (measured,) = self.pool.measure([task.mod])
        return measured.latency if measured.ok else None


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
    import hashlib

    return hashlib.sha256(data).hexdigest()[:16]


def _key(name: str, seed: int, settings: _Settings) -> str:
    return f"{name} {seed} {settings.trials} {settings.baseline_trials} {settings.weights} {settings.target}"


def _baseline_key(task: Task, seed: int, settings: _Settings) -> str:
    return f"{task.task_id} {seed} {settings.baseline_trials} {settings.target}"


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _line(row: Mapping[str, Any], done: int, count: int, rows: Sequence[Mapping[str, Any]]) -> str:
    from pretune.progress import seconds_text

    if row["ratio"] is None:
        return f"[{done}/{count}] {row['name']}: no ratio: {row['error']}"
    so_far = geomean([r["ratio"] for r in rows if r["ratio"]])
    return (
        f"[{done}/{count}] {row['name']}: MetaSchedule {seconds_text(row['metaschedule_latency'])}, "
        f"pretune {seconds_text(row['pretune_latency'])}: {_ratio(row['ratio'])}, "
        f"first choice {_ratio(row['zero_ratio'])}; geometric mean so far {_ratio(so_far)}"
    )
