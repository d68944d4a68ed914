"""A row of the search benchmark: a subgraph tuned both ways with one seed, and the winners timed in turns."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.bench.common import Bench
from pretune.bench.found import Curve, Found, Store, after, powers_of_two
from pretune.bench.metaschedule import tune_stock
from pretune.bench.ours import tune_ours
from pretune.bench.turns import chosen, time_in_turns
from pretune.errors import PretuneError, one_line
from pretune.measure import MeasurePool
from pretune_export.suite import tasks_of_module

if TYPE_CHECKING:
    from pretune.intake import Task

FAR_BEHIND = 5.0
"""An untuned program this many times slower than the winner keeps the latency of its first measurement."""

SIDES = ("pretune", "metaschedule")

Program = tuple[str, int]
"""What is timed: a side and its budget; ``("default", 0)`` is the untuned program."""

UNTUNED: Program = ("default", 0)


@dataclass(frozen=True)
class Settings:
    """What decides a row, besides its name and seed.

    Attributes
    ----------
    budgets : dict of str to list of int
        Trials of each side, smallest first.
    weights, target : str
        Short hashes.
    """

    budgets: dict[str, list[int]]
    weights: str
    target: str

    def key(self, name: str, seed: int) -> str:
        """Under which the row of a subgraph is kept."""
        budgets = json.dumps([self.budgets[side] for side in SIDES], separators=(",", ":"))
        return f"{name} {seed} {budgets} {self.weights} {self.target}"


class Known:
    """What earlier runs into the same folder found."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = Store(folder / "rows.jsonl")
        self.sides = {side: Store(folder / f"{side}.jsonl") for side in SIDES}


class Row:
    """One subgraph with one seed."""

    def __init__(
        self,
        bench: Bench,
        pool: MeasurePool,
        known: Known,
        settings: Settings,
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
            budgets = self.settings.budgets[side]
            row[side] = [
                {
                    "trials": budget,
                    "latency": _sum(parts, lambda part: latency_of(part, side, budget)),  # noqa: B023
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
        found: dict[Program, Found] = {}
        for side in SIDES:
            found |= {(side, budget): one for budget, one in self._side(side, task).items()}
        mods: dict[Program, Any] = {UNTUNED: task.mod}
        for program, one in found.items():
            mods[program] = chosen(one, task.mod, self.bench.target, ours=program[0] == "pretune")
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
        store, budgets = self.known.sides[side], self.settings.budgets[side]
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
        """As `time_in_turns`.

        `default` and `best` are what was measured before: an untuned program that failed or is far behind,
        and that no side chose, keeps that, since a turn of it may take seconds.
        """
        slow = default is None or best is None or default > FAR_BEHIND * best
        if slow and all(mod is not mods[UNTUNED] for program, mod in mods.items() if program != UNTUNED):
            tuned = {program: mod for program, mod in mods.items() if program != UNTUNED}
            return {UNTUNED: default, **time_in_turns(self.pool, tuned)}
        return time_in_turns(self.pool, mods)

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


def latency_of(found: Mapping[str, Any], side: str, budget: int) -> float | None:
    """Of a row, or of a task in one."""
    return next((one["latency"] for one in found[side] if one["trials"] == budget), None)


def _after(part: Mapping[str, Any], side: str, trials: int) -> float | None:
    """Best latency of a task after so many trials; where there was nothing to try, of the only choice."""
    curve: Curve = part["curves"][side]
    return after(curve, trials) if curve else part[side][-1]["latency"]


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None
