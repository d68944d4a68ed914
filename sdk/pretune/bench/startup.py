"""``pretune bench startup``: from the start of a process to its first ranked batch of candidates."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune.bench.common import environment, prepare, show_environment
from pretune.errors import PretuneError

if TYPE_CHECKING:
    from rich.console import Console

BATCH = 64

# What runs in the process that is timed. Each prints one JSON line when its batch is ready.
_PRETUNE = """
import time
start = time.perf_counter()
import pretune
from pretune.bench import startup
startup.first_batch(start, {weights!r})
"""
_STOCK = """
import time
start = time.perf_counter()
from pretune.bench import startup_stock
startup_stock.first_batch(start)
"""


def run(*, baseline: bool = False, repeat: int = 5, weights: str | Path | None = None) -> dict[str, Any]:
    """Start processes that read the weights, generate a design space (matmul and ReLU) and rank candidates.

    Parameters
    ----------
    baseline : bool
        Also start one that does it with stock MetaSchedule, once.
    repeat : int
        Processes; the median counts.
    weights : str or Path, optional
        Weights folder.

    Returns
    -------
    dict
        ``seconds``, the median wall time; ``all``, each; ``stages``, seconds of the last by stage;
        ``baseline_seconds`` and ``speedup`` with `baseline`.
    """
    bench = prepare(weights)  # fails here, with a line, rather than in the process
    code = _PRETUNE.format(weights=str(bench.weights.path))
    runs = [_start(code) for _ in range(repeat)]
    found: dict[str, Any] = {
        "benchmark": "startup",
        "seconds": statistics.median(seconds for seconds, _ in runs),
        "all": [seconds for seconds, _ in runs],
        "stages": runs[-1][1],
        "weights": bench.weights.config.name,
    }
    if baseline:
        found["baseline_seconds"], found["baseline_stages"] = _start(_STOCK)
        found["speedup"] = found["baseline_seconds"] / found["seconds"]
    return found | environment(bench.machine)


def render(found: Mapping[str, Any], console: Console) -> None:
    """Print a table."""
    from rich.table import Table

    table = Table("", "total")
    stages = list(found["stages"])
    for stage in stages:
        table.add_column(stage, justify="right")
    table.add_row("pretune", f"{found['seconds']:.2f} s", *(f"{found['stages'][s]:.2f} s" for s in stages))
    if "baseline_seconds" in found:
        of = found["baseline_stages"]
        cells = (f"{of[s]:.2f} s" if s in of else "-" for s in stages)
        table.add_row("MetaSchedule", f"{found['baseline_seconds']:.2f} s", *cells)
    console.print(table)
    console.print(f"total: wall time from the start of the process, median of {len(found['all'])}")
    show_environment(dict(found), console)


def first_batch(start: float, weights: str) -> None:
    """In the process that is timed: rank, and say when each stage ended.

    Parameters
    ----------
    start : float
        ``time.perf_counter()`` at the first line of the process.
    weights : str
        Weights folder.
    """
    stages: dict[str, float] = {}

    def done(stage: str) -> None:
        stages[stage] = round(time.perf_counter() - start - sum(stages.values()), 3)

    import tvm  # noqa: F401

    from pretune.bench.common import matmul_relu, prepare
    from pretune.model import TaskScorer
    from pretune.search import TaskSearch
    from pretune.space import TaskSpace

    done("imports")
    bench = prepare(weights)
    done("weights")
    space = TaskSpace.generate(matmul_relu().mod, bench.target)
    done("design space")
    search = TaskSearch(space, TaskScorer(bench.model, space, bench.hardware))
    proposals = search.propose(BATCH)
    done("ranking")
    if len(proposals) != BATCH:
        raise RuntimeError(f"{len(proposals)} candidates instead of {BATCH}")
    print(json.dumps(stages), flush=True)


def _start(code: str) -> tuple[float, dict[str, float]]:
    """Start a process; seconds until its line, and what the line says."""
    begin = time.perf_counter()
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        line = ""
        for line in process.stdout:  # others may print as well: the batch is ready when JSON comes
            if line.startswith("{"):
                break
        seconds = time.perf_counter() - begin
        process.communicate()
        errors.seek(0)
        last = (errors.read().strip().splitlines() or ["no message"])[-1]
    if not line.startswith("{"):
        raise PretuneError(f"the process that is timed failed: {last[:300]}; run: pretune doctor")
    return round(seconds, 3), json.loads(line)
