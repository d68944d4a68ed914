"""Transfer: what fine-tuning makes of a few schedules on a target that the base weights have not seen."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pretune.errors import OptionError
from pretune_export.config import TrainConfig
from pretune_export.dataset import Dataset, compact
from pretune_export.encoded import ENCODED_BY, Data, load_data
from pretune_export.evidence.fidelity import set_apart
from pretune_export.evidence.ranking import judge
from pretune_export.evidence.scaling import count
from pretune_export.finetune.plan import FINE_TUNING, SCHEDULES
from pretune_export.nets import WorldModelNet, load_net
from pretune_export.quality import score_task
from pretune_export.train import load_best, train

VALIDATION = 0.15
"""Share of the schedules that is spent on choosing the epoch: they have to be measured too."""

TIMES = 10
"""A model of its own has as many times the schedules of the best fine-tuned one, as far as there are."""

SCRATCH_STEPS = 300
"""A model from scratch makes as many steps of the optimiser at least, however few its schedules."""

Schedule = tuple[str, str]
"""Its task, and its design space with its decisions."""


def draw(datasets: Sequence[str | Path], out: Path, schedules: int, *, seed: int = 0) -> list[str]:
    """Write dataset folders with so many schedules in all, of training and validation tasks together.

    Tasks are taken in a random order, `SCHEDULES` of each, as `pretune finetune` would measure them, and then
    as many again; fewer schedules are a subset of more. A schedule that several machines measured (on one
    thread as well, say) counts once.

    Returns
    -------
    list of str
        The folders written.

    Raises
    ------
    OptionError
        If nothing is left to train on, or to choose an epoch by.
    """
    written = [out / f"{n}-{Path(folder).name}" for n, folder in enumerate(datasets)]
    known: dict[str, dict[str, dict[str, None]]] = {"train": {}, "validation": {}}
    for folder, target in zip(datasets, written, strict=True):
        shutil.rmtree(target, ignore_errors=True)
        compact(Path(folder), target)
        tasks = Dataset(target).tasks
        for file in target.glob("measured-*.parquet"):
            for task, decisions in _schedules(file):
                known[tasks[task]["split"]].setdefault(task, {})[decisions] = None
    validation = round(VALIDATION * schedules)
    quotas = {"train": schedules - validation, "validation": validation}
    chosen = {key for split, quota in quotas.items() for key in _choose(known[split], quota, seed)}
    for split in quotas:
        if not any(task in known[split] for task, _decisions in chosen):
            raise OptionError(f"{datasets[0]}: no {split} schedules to draw; run: pretune-export collect")
    for target in written:
        for file in target.glob("measured-*.parquet"):
            keep = [schedule in chosen for schedule in _schedules(file)]
            pq.write_table(pq.read_table(file).filter(pa.array(keep)), file, compression="zstd")
    return [str(target) for target in written]


def _schedules(file: Path) -> list[Schedule]:
    """The schedule of each row: one folder numbers its design spaces alike for all machines."""
    rows = pq.read_table(file, columns=["task", "space", "decisions"]).to_pylist()
    return [(row["task"], f"{file.parent.name} {row['space']} {row['decisions']}") for row in rows]


def _choose(known: dict[str, dict[str, None]], quota: int, seed: int) -> Iterator[Schedule]:
    """Up to `quota` schedules of tasks in a random order."""
    rng = np.random.default_rng(seed)
    mixed: dict[str, list[str]] = {}
    for task in (sorted(known)[i] for i in rng.permutation(len(known))):
        keys = sorted(known[task])
        order = np.random.default_rng([seed, int(task[:8], 16)]).permutation(len(keys))
        mixed[task] = [keys[i] for i in order]
    most = max(map(len, mixed.values()), default=0)
    chosen = (
        (task, key)
        for start in range(0, most, SCHEDULES)
        for task, keys in mixed.items()
        for key in keys[start : start + SCHEDULES]
    )
    return itertools.islice(chosen, quota)


def transfer(config: TrainConfig, out: Path, *, base: Path, schedules: Sequence[int]) -> list[dict[str, Any]]:
    """Fine-tune `base` on so many schedules, train from scratch on the same, and judge all on the test tasks.

    Writes ``transfer.json`` to `out` after each. Training resumes where it has been before.

    Parameters
    ----------
    config : TrainConfig
        The target that `base` was trained without: its datasets, and its test datasets. Models from scratch
        are trained as it says.
    out : pathlib.Path
        Work goes into ``transfer/`` below it.
    base : pathlib.Path
        Weights folder.
    schedules : sequence of int

    Returns
    -------
    list of dict
        ``model``, "base", "fine-tuned" or "scratch"; ``drawn``, the schedules asked for, validation included;
        ``tasks`` and ``schedules`` that were trained on, each machine's counted; the best ``epoch``;
        ``seconds`` that all epochs took; figures of the test tasks.
    """
    wanted = [*schedules, TIMES * max(schedules)]
    gentle = {name: value for name, value in FINE_TUNING.items() if name not in ENCODED_BY}
    rows: list[dict[str, Any]] = []
    for n in wanted:
        work = out / "transfer" / str(n)
        part = msgspec.structs.replace(
            config, datasets=draw(config.datasets, work / "data", n, seed=config.seed)
        )
        cache = work / "encoded.pickle"
        data = load_data(part, cache)
        if not rows:
            rows.append({"model": "base", "drawn": 0, **_figures(load_net(base), data)})
        ways = {"scratch": msgspec.structs.replace(part, least_steps=max(part.least_steps, SCRATCH_STEPS))}
        if n in schedules:
            ways["fine-tuned"] = msgspec.structs.replace(part, base=str(base), pretrained="", **gentle)
        for name, way in ways.items():
            best = train(way, work / name, cache=cache)
            row = {"model": name, "drawn": n, **count(data.train), "epoch": best["epoch"]}
            log = (work / name / "log.jsonl").read_text().splitlines()
            row["seconds"] = round(sum(json.loads(line)["seconds"] for line in log), 1)
            rows.append(row | _figures(load_best(work / name, way), data))
            (out / "transfer.json").write_text(json.dumps(rows, indent=1) + "\n")
        cache.unlink(missing_ok=True)  # hundreds of megabytes each
    return rows


def _figures(net: WorldModelNet, data: Data) -> dict[str, float]:
    return judge(lambda task: score_task(net, task, data.machines)[0], set_apart(data)[0]["test"])["mean"]
