"""pretune's side of the search benchmark: what `pretune.tune` does with a task, within several budgets."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pretune.bench.common import Bench
from pretune.bench.found import Found, best_so_far
from pretune.measure import Pool
from pretune.records import Record, RunFolder

if TYPE_CHECKING:
    from pretune.intake import Task
    from pretune.tuning import Progress, TaskResult


def tune_ours(
    task: Task, bench: Bench, pool: Pool, *, budgets: Sequence[int], seed: int, work_dir: Path
) -> dict[int, Found]:
    """Tune a task once, with the largest budget; smaller ones are its first trials, with finals of their own.

    The search does not know its budget: it proposes 16 candidates and then 8 at a time whatever the budget
    is, so that a run with a budget of that form is the beginning of every longer one. Only where a smaller
    budget would end within a batch would its last few be others.

    Parameters
    ----------
    budgets : sequence of int
        Trials; 0 measures nothing and takes the model's first choice.
    work_dir : Path
        Records go here. What an interrupted benchmark has left is deleted, for its trials would cost no time.

    Returns
    -------
    dict of int to Found
        By budget. `Found.seconds` of a smaller one is the time to its last trial and that of its finals.
    """
    found: dict[int, Found] = {}
    if 0 in budgets:
        result, seconds = _run(task, bench, None, None, 0, seed, [])
        found[0] = _found(result, seconds, [])
    measured = sorted((budget for budget in budgets if budget), reverse=True)
    if not measured:
        return found
    shutil.rmtree(work_dir, ignore_errors=True)
    clock = _Clock()
    records: list[Record] = []
    most = measured[0]
    result, seconds = _run(task, bench, pool, work_dir / str(most), most, seed, records, clock)
    found[most] = _found(result, seconds, records)
    for budget in measured[1:]:
        first = [record for record in records if record.kind == "trial" and record.trial <= budget]
        trials = max((record.trial for record in first), default=0)
        if trials == found[most].trials:  # the design space holds no more
            found[budget] = found[most]
            continue
        result, seconds = _run(task, bench, pool, work_dir / str(budget), trials, seed, list(first))
        found[budget] = _found(result, clock.after(trials) + seconds, first)
    return found


class _Clock:
    """When each trial was done."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._done: dict[int, float] = {}

    def __call__(self, progress: Progress) -> None:
        self._done.setdefault(progress.trials, time.perf_counter() - self._start)

    def after(self, trials: int) -> float:
        """Seconds to the end of this trial."""
        return self._done.get(trials, 0.0)


def _run(
    task: Task,
    bench: Bench,
    pool: Pool | None,
    path: Path | None,
    trials: int,
    seed: int,
    records: list[Record],
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[TaskResult, float]:
    """Tune as `pretune.tune` does, beginning with `records`, which grow; also the seconds it took."""
    from pretune.tuning import Run

    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(RunFolder(path)) if path else None
        machine = (bench.target, bench.hardware, bench.model)
        result = Run(*machine, pool, folder, trials, seed, on_progress, records, 1).task(0, task)
    return result, time.perf_counter() - start


def _found(result: TaskResult, seconds: float, records: Sequence[Record]) -> Found:
    tried = [record for record in records if record.kind == "trial" and record.trace is not None]
    return Found(
        trace=result.trace,
        latency=result.best,
        trials=len(tried),
        failures=sum(not record.ok for record in tried),
        seconds=seconds,
        error=result.error,
        curve=best_so_far([record.latency for record in tried]),
        default=result.default,
        chosen_by=result.chosen_by,
        notes=result.notes,
    )
