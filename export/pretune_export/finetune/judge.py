"""Before and after, on the tasks that were held out: how they are ranked, and what a short search finds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from pretune.bench.common import Bench
from pretune.bench.found import Store
from pretune.bench.metaschedule import tune_stock
from pretune.bench.ours import tune_ours
from pretune.bench.stats import geomean
from pretune.bench.turns import chosen, time_in_turns
from pretune.errors import OptionError, PretuneError, one_line
from pretune.intake import make_task
from pretune_export.config import TrainConfig
from pretune_export.encoded import load_data
from pretune_export.evaluate import rollout_error
from pretune_export.evidence.ranking import judge, rankable
from pretune_export.nets import WorldModelNet, load_net
from pretune_export.networks import CorpusTask
from pretune_export.networks.corpus import pick
from pretune_export.quality import ENOUGH, merit, score_task
from pretune_export.train import load_best

if TYPE_CHECKING:
    from pretune.measure import Pool

SEARCH_TASKS, SEARCH_TRIALS = 3, 16
"""Of the short search: a look at whether better ranking finds better schedules, not a benchmark."""

SEARCH_FLOPS = 1e9
"""Operations of a task in the short search, at most, where there are such: others take minutes each."""

SLOWER = 0.95
"""Latency with the base weights over that with the new ones: below it, a search contradicts the ranking.
Two searches with the same weights differ by as much."""

FEW = 4
"""Fewer held-out tasks than these are too few for their ranking to decide alone."""


def rank_held_out(config: TrainConfig, run: Path, base: Path) -> dict[str, Any]:
    """Judge the base weights and those of a training run on the same tasks.

    Parameters
    ----------
    config : TrainConfig
        Its ``test_datasets`` hold the held-out tasks, which neither training nor the choice of the epoch saw.
    run : pathlib.Path
        Of `pretune_export.train.train`.
    base : pathlib.Path
        Weights folder.

    Returns
    -------
    dict
        ``before`` and ``after``, each an evaluation as `pretune_export.evaluate.evaluate` gives it.

    Raises
    ------
    OptionError
        If no held-out task has enough schedules.
    """
    data = load_data(config, run / "encoded.pickle")
    if not rankable(data.test):
        raise OptionError(f"no held-out task has {ENOUGH} measured schedules; give a larger budget")

    def evaluation(net: WorldModelNet) -> dict[str, Any]:
        splits = {
            split: {
                **judge(lambda task: score_task(net, task, data.machines)[0], tasks),
                "rollout_error": rollout_error(net, tasks, data.machines),
            }
            for split, tasks in (("test", data.test), ("validation", data.validation))
            if rankable(tasks)
        }
        return {"main": "test", "mean": splits["test"]["mean"], **splits}

    return {"before": evaluation(load_net(base)), "after": evaluation(load_best(run, config))}


def search_held_out(
    tasks: Sequence[CorpusTask],
    before: Bench,
    after: Bench,
    pool: Pool,
    folder: Path,
    *,
    seed: int,
    until: float,
    on_task: Callable[[int, str], None],
) -> dict[str, Any] | None:
    """Tune some of the held-out tasks with the base weights, the new ones and MetaSchedule; time the winners.

    Parameters
    ----------
    before, after : Bench
        The machine with either weights.
    folder : pathlib.Path
        Keeps rows as they come: those that are there are not made again.
    until : float
        ``time.time()`` after which no further task is begun.

    Returns
    -------
    dict or None
        ``base`` and ``metaschedule``, geometric means of their latencies over that of the new weights;
        ``trials``, ``tasks``, ``rows``. None if no task gave latencies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = Store(folder / "rows.jsonl")
    light = [task for task in tasks if task.flops <= SEARCH_FLOPS]
    chosen = pick(light or tasks, SEARCH_TASKS)
    rows = []
    for n, task in enumerate(chosen):
        row = store.find(task.id)
        if row is None:
            if time.time() > until:
                continue
            on_task(n, task.name)
            row = _search(task, before, after, pool, folder / task.id, seed)
            store.keep(task.id, row)
        rows.append(row)
    whole = [row for row in rows if not row["error"]]
    if not whole:
        return None
    ratios = {
        side: geomean([row[side] / row["fine_tuned"] for row in whole]) for side in ("base", "metaschedule")
    }
    return {"trials": SEARCH_TRIALS, "tasks": len(whole), **ratios, "rows": rows}


def _search(
    task: CorpusTask, before: Bench, after: Bench, pool: Pool, folder: Path, seed: int
) -> dict[str, Any]:
    row: dict[str, Any] = {"task": task.name, "id": task.id, "error": ""}
    budget = {"budgets": [SEARCH_TRIALS], "seed": seed}
    try:
        mod: Any = tvm.ir.load_json(task.mod)
        made = make_task(task.name, mod["main"])
        found = {
            "base": tune_ours(made, before, pool, work_dir=folder / "base", **budget),
            "fine_tuned": tune_ours(made, after, pool, work_dir=folder / "fine-tuned", **budget),
            "metaschedule": tune_stock(made, after.target, pool, work_dir=folder / "metaschedule", **budget),
        }
        one = {side: by_budget[SEARCH_TRIALS] for side, by_budget in found.items()}
        if failed := [side for side in one if one[side].error and one[side].trace is None]:
            return row | {"error": f"{failed[0]}: {one[failed[0]].error}"}
        mods = {
            side: chosen(best, made.mod, after.target, ours=side != "metaschedule")
            for side, best in one.items()
        }
        row |= time_in_turns(pool, mods)
    except (PretuneError, OSError, MemoryError):
        raise
    except Exception as error:  # One task that TVM cannot handle is one row without latencies.
        return row | {"error": one_line(error)}
    if failed := [side for side in mods if row[side] is None]:
        row["error"] = f"{failed[0]} failed"
    return row


def better(rankings: dict[str, Any], search: dict[str, Any] | None) -> tuple[bool, str]:
    """Whether the new weights are better than the base, and why.

    They must rank the held-out tasks better by more than the standard error of the difference. Of fewer than
    `FEW`, any gain will do, but a short search must have found faster schedules too.
    """
    before, after = (rankings[name]["mean"] for name in ("before", "after"))
    rows = (rankings[name]["test"]["rows"] for name in ("after", "before"))
    gains = np.array([merit(new) - merit(old) for new, old in zip(*rows, strict=True)])
    count = len(gains)
    change = ", ".join(
        f"{label} {before[key]:.3f} -> {after[key]:.3f}"
        for key, label in (("top1", "top-1"), ("top5", "top-5"), ("spearman", "Spearman"))
    )
    text = f"on {count} held-out task{'s' * (count > 1)}: {change}"
    if gains.mean() <= 0:
        return False, f"they do not rank better {text}"
    if count < FEW:
        if search is None:
            return False, f"they rank better {text}; but so few tell little without a search"
        if search["base"] <= 1:
            return False, f"they rank better {text}; but so few tell little, and searches were no faster"
    elif gains.mean() <= gains.std(ddof=1) / math.sqrt(count):
        return False, f"they rank better by less than chance may give {text}"
    if search is not None and search["base"] < SLOWER:
        slower = f"latency with the base {search['base']:.2f} of theirs"
        return False, f"they rank better {text}; but searches with them found slower schedules ({slower})"
    return True, f"they rank better {text}"
