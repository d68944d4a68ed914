"""One page of plots of an evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS, OTHER, RANDOM = "#1f77b4", "#9aa5b1", "#d9dee3"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw what `pretune_export.evaluate.evaluate` found as a PNG: a panel for each part that it has."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [_models, _networks, _rollout]
    panels += [panel for name, panel in OPTIONAL.items() if result.get(name)]
    points = result.get("fidelity", {}).get("rows", [])
    heights = [3.8] * math.ceil(len(panels) / 3) + [2.8] * math.ceil(len(points) / 4)
    figure = plt.figure(figsize=(14, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 12, height_ratios=heights)
    for i, panel in enumerate(panels):
        row, column = divmod(i, 3)
        panel(figure.add_subplot(grid[row, 4 * column : 4 * column + 4]), result)
    for i, task in enumerate(points):
        row, column = divmod(i, 4)
        at = math.ceil(len(panels) / 3) + row
        _scatter(figure.add_subplot(grid[at, 3 * column : 3 * column + 3]), task)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _models(axes: Axes, result: dict[str, Any]) -> None:
    """Top-1 and top-5 of the world model beside the baselines."""
    ours = result["mean"]
    rows = [("random", {f"top{k}": ours[f"random_top{k}"] for k in (1, 5)}, RANDOM)]
    rows += [(name, found[result["main"]], OTHER) for name, found in result.get("baselines", {}).items()]
    rows += [("pretune", ours, OURS)]
    for k, (_name, found, colour) in enumerate(rows):
        axes.bar([k - 0.2, k + 0.2], [found["top1"], found["top5"]], 0.38, color=colour)
        for x, key in ((k - 0.2, "top1"), (k + 0.2, "top5")):
            axes.text(x, found[key], f"{found[key]:.2f}", ha="center", va="bottom", fontsize=7)
    names = [name for name, _found, _colour in rows]
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axes.set_ylim(0, 1.05)
    axes.set_title(f"Top-1 (left) and top-5 (right), {result['main']} tasks", fontsize=10)


def _networks(axes: Axes, result: dict[str, Any]) -> None:
    networks = result[result["main"]]["networks"]
    at = np.arange(len(networks))
    bars = (("random_top1", "random, top-1", RANDOM), ("top1", "top-1", OURS), ("top5", "top-5", "#8fc1e3"))
    for k, (key, label, colour) in enumerate(bars):
        axes.bar(at + (k - 1) * 0.28, [n[key] for n in networks.values()], 0.28, label=label, color=colour)
    axes.set_xticks(at, list(networks), rotation=60, ha="right", fontsize=7)
    axes.set_ylim(0, 1.2)
    axes.legend(fontsize=7, loc="upper center", ncols=3)
    axes.set_title("By network", fontsize=10)


def _rollout(axes: Axes, result: dict[str, Any]) -> None:
    error = result[result["main"]]["rollout_error"]
    axes.plot([int(step) for step in error], list(error.values()), marker="o", color=OURS)
    axes.axhline(1, color=OTHER, linewidth=0.8)
    axes.set_xlabel("actions rolled out")
    axes.set_ylim(bottom=0)
    axes.set_title("Predicted against real latents (1: another candidate's)", fontsize=10)


def _ablations(axes: Axes, result: dict[str, Any]) -> None:
    rows = list(result["ablations"].items())[::-1]
    for offset, key, colour in ((0.2, "top1", OURS), (-0.2, "top5", "#8fc1e3")):
        values = [found.get(key, np.nan) for _name, found in rows]
        axes.barh(np.arange(len(rows)) + offset, values, 0.38, color=colour, label=key)
    axes.set_yticks(range(len(rows)), [name for name, _found in rows], fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_ylim(top=len(rows) + 0.6)
    axes.legend(fontsize=7, loc="upper center", ncols=2)
    axes.set_title("Ablations", fontsize=10)


def _scaling(axes: Axes, result: dict[str, Any]) -> None:
    for varied, marker in (("tasks", "o"), ("schedules", "s")):
        rows = [row for row in result["scaling"] if row["varied"] == varied]
        rows.sort(key=lambda row: row["schedules"])
        for key, style in (("top1", "-"), ("spearman", "--")):
            x, y = [row["schedules"] for row in rows], [row[key] for row in rows]
            axes.plot(x, y, style, marker=marker, label=f"fewer {varied}, {key}")
    axes.set_xscale("log")
    axes.set_xlabel("measured schedules trained on")
    axes.legend(fontsize=7)
    axes.set_title("Scaling", fontsize=10)


def _search(axes: Axes, result: dict[str, Any]) -> None:
    rows = result["search"]
    for budget in sorted({row["baseline_trials"] for row in rows}):
        own = [row for row in rows if row["baseline_trials"] == budget]
        mean = [row["geomean"] for row in own]
        ends = [(row["low"] or row["geomean"], row["high"] or row["geomean"]) for row in own]
        spread = [[m - low for m, (low, _) in zip(mean, ends, strict=True)],
                  [high - m for m, (_, high) in zip(mean, ends, strict=True)]]  # fmt: skip
        trials = [row["trials"] for row in own]
        axes.errorbar(trials, mean, spread, marker="o", capsize=3, label=f"MetaSchedule at {budget}")
    axes.axhline(1, color=OTHER, linewidth=0.8)
    axes.set_xscale("symlog", base=2, linthresh=16)
    axes.set_xlim(-4, 2 * max(row["trials"] for row in rows) + 8)
    axes.set_xlabel("trials of pretune a task")
    axes.legend(fontsize=7)
    axes.set_title("Search: MetaSchedule latency / pretune latency", fontsize=10)


def _curves(axes: Axes, result: dict[str, Any]) -> None:
    """Best so far against trials, both sides; the band is that of the geometric means of single seeds."""
    found = result["curves"]
    for side, label, colour in (("pretune", "pretune", OURS), ("metaschedule", "MetaSchedule", "#5b6672")):
        trials, mean, low, high = (
            [point[name] for point in found[side]] for name in ("trials", "geomean", "low", "high")
        )
        axes.plot(trials, mean, marker="o", markersize=3, color=colour, label=label)
        axes.fill_between(trials, low, high, color=colour, alpha=0.2, linewidth=0)
    axes.axhline(1, color=OTHER, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("trials a task")
    axes.legend(fontsize=7, loc="lower right")
    axes.set_title(f"MetaSchedule's best of {found['baseline_trials']} / best so far", fontsize=10)


def _scatter(axes: Axes, task: dict[str, Any]) -> None:
    axes.plot(task["scores"], np.array(task["latencies"]) * 1e3, ".", markersize=2, color=OURS, alpha=0.6)
    axes.set_yscale("log")
    axes.set_title(f"{task['task'][:36]}\nSpearman {task['spearman']:.2f}", fontsize=8)
    axes.set_xlabel("score", fontsize=7)
    axes.set_ylabel("latency, ms", fontsize=7)
    axes.tick_params(labelsize=6, which="both")


OPTIONAL = {"ablations": _ablations, "scaling": _scaling, "search": _search, "curves": _curves}
