"""``pretune bench measure``: trials a minute, against MetaSchedule's LocalBuilder and LocalRunner."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune.bench.common import (
    conv2d_relu,
    depthwise_relu,
    environment,
    matmul_relu,
    show_environment,
    softmax,
)
from pretune.bench.stats import spearman
from pretune.compat import setup_tvm
from pretune.errors import EnvironmentFaultError
from pretune.hardware import detect, make_target
from pretune.measure import MeasurePool
from pretune.space import Candidate, TaskSpace

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.intake import Task

SEED = 0
BUILD_TIMEOUT = 180.0


def run(*, candidates: int = 48) -> dict[str, Any]:
    """Measure the same random candidates of three tasks both ways.

    The workers of both are running before the clock starts, as far as MetaSchedule keeps any: its builder
    starts new ones for every batch, so it gets all candidates in one.

    Parameters
    ----------
    candidates : int
        In all.

    Returns
    -------
    dict
        ``pretune_per_minute``, ``metaschedule_per_minute`` and their ``ratio``; ``spearman``, the mean over
        the tasks of the rank correlation of the two sets of latencies; ``rows`` by task.

    Raises
    ------
    EnvironmentFaultError
        If there is no C++ compiler, which LocalRunner needs.
    """
    setup_tvm()
    from tvm.support.cc import get_cc

    if get_cc() is None:
        raise EnvironmentFaultError(
            "MetaSchedule's LocalRunner needs a C++ compiler, and none is on PATH; run: apt-get install g++"
        )
    machine = detect()
    target = make_target("native", machine)
    tasks = [matmul_relu(), conv2d_relu(), depthwise_relu()]
    groups = [sample(task, target, max(4, candidates // len(tasks))) for task in tasks]

    with MeasurePool(target) as pool:
        # All its workers start with the first batch that is large enough for them.
        pool.measure([softmax().mod] * pool.size)
        start = time.perf_counter()
        ours = [[m.latency for m in pool.measure([c.mod for c in group])] for group in groups]
        ours_s = time.perf_counter() - start
    theirs, build_s, run_s = _stock(tasks, groups, target)
    theirs_s = build_s + run_s

    rows = []
    for task, a, b in zip(tasks, ours, theirs, strict=True):
        both = [(x, y) for x, y in zip(a, b, strict=True) if np.isfinite(x) and np.isfinite(y)]
        rows.append(
            {
                "name": task.name,
                "candidates": len(a),
                "both_ran": len(both),
                "spearman": spearman(*zip(*both, strict=True)) if both else None,
                "median_ratio": statistics.median(y / x for x, y in both) if both else None,
                "pretune": [x if np.isfinite(x) else None for x in a],
                "metaschedule": [y if np.isfinite(y) else None for y in b],
            }
        )
    count = sum(map(len, groups))
    correlations = [row["spearman"] for row in rows if row["spearman"] is not None]
    return {
        "benchmark": "measure",
        "candidates": count,
        "pretune_per_minute": 60 * count / ours_s,
        "metaschedule_per_minute": 60 * count / theirs_s,
        "ratio": theirs_s / ours_s,
        "pretune_seconds": ours_s,
        "metaschedule_build_seconds": build_s,
        "metaschedule_run_seconds": run_s,
        "spearman": statistics.mean(correlations) if correlations else None,
        "rows": rows,
        **environment(machine),
    }


def render(found: Mapping[str, Any], console: Console) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table("task")
    for name in ("candidates", "ran in both", "Spearman", "theirs / ours"):
        table.add_column(name, justify="right")
    for row in found["rows"]:
        numbers = (row["spearman"], row["median_ratio"])
        shown = ("-" if number is None else f"{number:.3f}" for number in numbers)
        table.add_row(row["name"], str(row["candidates"]), str(row["both_ran"]), *shown)
    console.print(table)
    console.print(
        f"pretune {found['pretune_per_minute']:.0f} trials a minute, MetaSchedule "
        f"{found['metaschedule_per_minute']:.0f} (building {found['metaschedule_build_seconds']:.1f} s, "
        f"running {found['metaschedule_run_seconds']:.1f} s): {found['ratio']:.1f}x",
        soft_wrap=True,
    )
    show_environment(dict(found), console)


def sample(task: Task, target: Any, count: int) -> list[Candidate]:
    """Different random candidates of a task."""
    space = TaskSpace.generate(task.mod, target)
    rng = np.random.default_rng(SEED)
    found: dict[int, Candidate] = {}
    for _ in range(20 * count):
        k = int(rng.integers(len(space.spaces)))
        candidate = space.materialise(k, space.spaces[k].sample(1, rng)[0])
        if candidate is not None:
            found.setdefault(candidate.shash, candidate)
        if len(found) == count:
            break
    return list(found.values())


def _stock(
    tasks: list[Task], groups: list[list[Candidate]], target: Any
) -> tuple[list[list[float]], float, float]:
    """Latencies by task, and the seconds that building and running took."""
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.builder import BuilderInput
    from tvm.s_tir.meta_schedule.runner import RunnerInput

    # Its workers import all tensor intrinsics first, 20 to 40 s, which its own deadline of 30 s includes.
    builder: Any = ms.builder.LocalBuilder(timeout_sec=BUILD_TIMEOUT)
    runner: Any = ms.runner.LocalRunner()  # has started its worker when this returns
    start = time.perf_counter()
    built = builder.build([BuilderInput(c.mod, target) for group in groups for c in group])
    build_s = time.perf_counter() - start
    paths = iter([None if result.error_msg else str(result.artifact_path) for result in built])
    latencies: list[list[float]] = []
    run_s = 0.0
    for task, group in zip(tasks, groups, strict=True):
        info = ms.arg_info.ArgInfo.from_prim_func(task.mod["main"])
        mine = [next(paths) for _ in group]
        inputs = [RunnerInput(path, "cpu", info) for path in mine if path is not None]
        start = time.perf_counter()
        results = iter([future.result() for future in runner.run(inputs)])
        run_s += time.perf_counter() - start
        latencies.append([_seconds(next(results)) if path is not None else float("inf") for path in mine])
        for path in filter(None, mine):
            shutil.rmtree(Path(path).parent, ignore_errors=True)
    return latencies, build_s, run_s


def _seconds(result: Any) -> float:
    if result.error_msg is not None or not result.run_secs:
        return float("inf")
    return min(float(value) for value in result.run_secs)
