"""Whether the machine was busy, told from how far the repeats of a candidate, or calibrations, differ."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

BUSY_SPREAD = 0.10
"""A task whose median spread is larger was timed on a busy machine. Of the 313 tasks of
``hub_cards/datasets/cpu-x86-64-v4``, timed while nothing else ran, half are below 0.018 and three above 0.10
(ten, by their first six trials); those of runs beside other work were 0.45 to 4.6."""

LEAST_TRIALS = 6
"""Fewer say nothing about a task: one hiccup of the machine would decide."""

LEAST_SHARE = 0.05
"""As many tasks as that may be noisy on a quiet machine."""

MAX_DRIFT = 0.10
"""What is measured between two calibrations is suspect if the kernel's time moves by a larger fraction."""


def spread(latencies: Sequence[float]) -> float:
    """How far repeats of one candidate, in seconds, differ: the slowest over the fastest, less 1."""
    return max(latencies) / min(latencies) - 1


def busy_notice(spreads: Sequence[Sequence[float]]) -> str:
    """Say so if the machine was busy.

    Parameters
    ----------
    spreads : sequence of sequence of float
        For each task the `spread` of its trials.

    Returns
    -------
    str
        One line with what it means and what to do; empty if all is well.
    """
    medians = [statistics.median(each) for each in spreads if len(each) >= LEAST_TRIALS]
    noisy = [median for median in medians if median > BUSY_SPREAD]
    if len(noisy) <= LEAST_SHARE * len(medians):
        return ""
    return (
        f"the machine was busy while {len(noisy)} of the tasks were timed: repeats of a schedule differ by "
        f"{statistics.median(noisy):.0%}, on a quiet machine by 2%, so latencies are too high and which of "
        "two close schedules was chosen is chance; stop what else runs and tune anew, with another --out"
    )
