"""What a side of the search benchmark found, how it got there, and where that is kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pretune.messages import explain_os_errors

Curve = list[list[Any]]
"""Points ``[trials, seconds]``: the best latency after so many trials; None while all had failed."""


@dataclass
class Found:
    """What one side found for one task within one budget.

    Attributes
    ----------
    trace : list or None
        Its choice; None leaves the program untuned.
    latency : float or None
        Seconds of that one, when the side chose it.
    traces : list of list
        MetaSchedule's finalists, in the order of their latencies while it tuned: `trace` is the one that was
        fastest when they were timed in turns. Empty in what earlier versions kept: then `trace` is the
        fastest while it tuned.
    trials, failures : int
        Candidates measured, and how many of them failed to build or run.
    seconds : float
        Wall time.
    error : str
        What ended it, if something did.
    curve : list of [int, float or None]
        See `best_so_far`. Empty in what earlier versions kept, and without trials.
    default : float or None
        Seconds of the untuned program, which only pretune measures.
    chosen_by : str
        As in `pretune.tuning.TaskResult`.
    notes : list of str
    """

    trace: list[Any] | None = None
    latency: float | None = None
    trials: int = 0
    failures: int = 0
    seconds: float = 0.0
    error: str = ""
    traces: list[Any] = field(default_factory=list)
    curve: Curve = field(default_factory=list)
    default: float | None = None
    chosen_by: str = ""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def best_so_far(latencies: Sequence[float]) -> Curve:
    """The lowest latency after 1, 2, 4, 8 ... trials, and after all.

    Parameters
    ----------
    latencies : sequence of float
        Of the trials in their order, in seconds; infinite for one that failed.
    """
    best = list(itertools.accumulate(latencies, min))
    counts = [*powers_of_two(len(best)), len(best)] if best else []
    return [[n, best[n - 1] if math.isfinite(best[n - 1]) else None] for n in dict.fromkeys(counts)]


def after(curve: Curve, trials: int) -> float | None:
    """Latency of a curve after so many trials: that of its last point up to there."""
    return next((latency for n, latency in reversed(curve) if n <= trials), None)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4 ... up to `most`."""
    return [1 << k for k in range(most.bit_length())]


class Store:
    """JSON values by key, in a file with a line for each: of the same key, the last line counts.

    A value is on disk when `keep` returns; whatever a kill tears off costs that value only.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Any] = {}
        if not path.is_file():
            return
        text = path.read_text()
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # torn
                entry = json.loads(line)
                self._values[entry["key"]] = entry["value"]
        if text and not text.endswith("\n"):
            self._write("\n")  # else the next line would be lost with the torn one

    def find(self, key: str) -> Any | None:
        return self._values.get(key)

    def keep(self, key: str, value: Any) -> None:
        self._write(json.dumps({"key": key, "value": value}, allow_nan=False) + "\n")
        self._values[key] = value

    def _write(self, text: str) -> None:
        with explain_os_errors(self.path.parent), self.path.open("a") as file:
            file.write(text)
