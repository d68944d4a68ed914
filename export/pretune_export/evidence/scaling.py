"""How ranking gets better with more tasks and with more schedules of each."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pretune_export.config import TrainConfig
from pretune_export.dataset import Dataset, TaskData, compact
from pretune_export.encoded import load_data
from pretune_export.evidence.fidelity import set_apart
from pretune_export.evidence.ranking import judge
from pretune_export.quality import score_task
from pretune_export.train import load_best, train


def subset(
    datasets: Sequence[str | Path],
    out: Path,
    *,
    tasks: int | None = None,
    schedules: int | None = None,
    seed: int = 0,
) -> list[str]:
    """Write dataset folders with fewer training tasks or fewer schedules of each; other splits stay whole.

    Parameters
    ----------
    datasets : sequence of str or Path
    out : pathlib.Path
        Gets one folder for each of them.
    tasks : int, optional
        Training tasks that are kept, of all datasets together. Fewer are a subset of more.
    schedules : int, optional
        Schedules that are kept of each training task on each machine. Fewer are a subset of more.
    seed : int

    Returns
    -------
    list of str
        The folders written.
    """
    folders = [Path(folder) for folder in datasets]
    tables = [Dataset(folder).tasks for folder in folders]
    training = sorted({t["task"] for tasks_ in tables for t in tasks_.values() if t["split"] == "train"})
    kept = set(np.random.default_rng(seed).permutation(training)[:tasks].tolist())
    dropped = set(training) - kept
    written = []
    for n, folder in enumerate(folders):
        target = out / f"{n}-{folder.name}"
        shutil.rmtree(target, ignore_errors=True)
        compact(folder, target)
        for file in sorted(target.glob("measured-*.parquet")):
            table = pq.read_table(file)
            of = table["task"].to_pylist()
            keep = [task not in dropped for task in of]
            seen: Counter[str] = Counter()
            for i in np.random.default_rng(seed).permutation(len(of)):
                seen[of[i]] += 1
                if schedules is not None and of[i] in kept and seen[of[i]] > schedules:
                    keep[i] = False
            pq.write_table(table.filter(pa.array(keep)), file, compression="zstd")
        written.append(str(target))
    return written


def scaling(
    config: TrainConfig, out: Path, *, tasks: Sequence[int] = (), schedules: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Train on parts of the training data and judge each on the test split, or else the validation split.

    Writes ``scaling.json`` to `out` after each. Training resumes where it has been before.

    Parameters
    ----------
    config : TrainConfig
    out : pathlib.Path
        Work goes into ``scaling/`` below it; runs resume there.
    tasks, schedules : sequence of int
        Numbers of training tasks, and of schedules per task and machine; each is varied alone.

    Returns
    -------
    list of dict
        ``varied``, "tasks" or "schedules"; ``tasks`` and ``schedules``, how many were trained on; figures.
    """
    points = [("tasks", n) for n in tasks] + [("schedules", n) for n in schedules]
    rows = []
    for varied, n in points:
        work = out / "scaling" / f"{varied}-{n}"
        folders = subset(config.datasets, work / "data", **{varied: n}, seed=config.seed)
        settings = msgspec.structs.replace(config, datasets=folders)
        cache = work / "encoded.pickle"
        train(settings, work, cache=cache)
        data = load_data(settings, cache)
        net = load_best(work, settings)
        ranked, _ = set_apart(data)
        held_out = ranked["test"] or ranked["validation"]
        found = judge(lambda task: score_task(net, task, data.machines)[0], held_out)  # noqa: B023
        rows.append({"varied": varied, **count(data.train), **found["mean"]})
        (out / "scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
        cache.unlink(missing_ok=True)  # hundreds of megabytes each
    return rows


def count(tasks: Sequence[TaskData]) -> dict[str, int]:
    """``tasks``, how many different ones, and ``schedules``."""
    return {
        "tasks": len({task.task for task in tasks}),
        "schedules": sum(len(group.latency) for task in tasks for group in task.groups),
    }
