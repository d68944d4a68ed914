"""A progress line on stderr."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pretune.tuning import Progress, TaskResult

REFRESH_S = 0.1
"""Least time between two updates of the line on a terminal."""

PLAIN_S = 20.0
"""Least time between two lines on the same task where stderr is no terminal."""


def seconds_text(seconds: float | None) -> str:
    """A latency for people: ``1.23 ms``; ``-`` if there is none."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1.0:
            digits = ".3g" if seconds * scale < 1000 else ".0f"
            return f"{seconds * scale:{digits}} {unit}"
    return f"{seconds * 1e6:.3g} us"


def outcome_text(result: TaskResult) -> str:
    """How the schedule of a task was chosen, in a few words."""
    return {
        "search": f"search, {result.trials} trials",
        "default": "default: nothing was faster",
        "only": "only candidate, not measured",
        "model": "model, not measured",
        "failed": f"failed: {result.error}",
    }[result.chosen_by]


def progress_text(progress: Progress) -> str:
    """One line: task, trials or outcome, best and default latency, time left."""
    parts = [f"task {progress.index + 1}/{progress.tasks} {progress.task}"]
    if progress.result is not None:
        parts.append(outcome_text(progress.result))
    elif progress.budget:
        parts.append(f"{progress.trials}/{progress.budget} trials")
    if math.isfinite(progress.best):
        parts.append(f"best {seconds_text(progress.best)}")
    if math.isfinite(progress.default):
        parts.append(f"default {seconds_text(progress.default)}")
    if math.isfinite(progress.seconds_left):
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return "  ".join(parts)


@contextlib.contextmanager
def show_progress(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show a run on stderr: on a terminal a line that changes, elsewhere one for each task and now and then.

    Yields
    ------
    on_progress : callable or None
        To be called with each `Progress`; None if `quiet`.
    """
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True, highlight=False)
    shown = -math.inf

    def announce(progress: Progress) -> None:
        """Say once, first of all, what an earlier run had done."""
        nonlocal shown
        if shown == -math.inf and progress.resumed is not None:
            shown = time.monotonic()
            console.print(f"resumed: {progress.resumed} of {progress.tasks} tasks were done")

    if not console.is_terminal:

        def plain(progress: Progress) -> None:
            nonlocal shown
            announce(progress)
            if progress.result is not None or time.monotonic() - shown > PLAIN_S:
                shown = time.monotonic()
                console.print(progress_text(progress), soft_wrap=True, markup=False)

        yield plain
        return
    # No thread that refreshes the line: it would run while candidates are timed.
    start = Text("reading the program", overflow="ellipsis", no_wrap=True)
    with Live(start, console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
        live.refresh()

        def update(progress: Progress) -> None:
            nonlocal shown
            announce(progress)
            edge = progress.trials in (0, progress.budget)
            if edge or time.monotonic() - shown > REFRESH_S:
                shown = time.monotonic()
                live.update(Text(progress_text(progress), overflow="ellipsis", no_wrap=True), refresh=True)

        yield update
