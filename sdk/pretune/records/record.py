"""One line of the log: one measured candidate of one task on one target."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pretune import env
from pretune.space.trace import plain, trace_to_json

if TYPE_CHECKING:
    from tvm.s_tir.schedule import Trace
    from tvm.target import Target

    from pretune.hardware import Hardware
    from pretune.intake import Task
    from pretune.measure.result import Measured

RECORD_VERSION = 1
"""Raised when a field changes its meaning; readers skip records of a version they do not know."""

ChosenBy = Literal["default", "search"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, self-contained: the log can be read without the program that was tuned.

    Parameters
    ----------
    version : int
        `RECORD_VERSION`.
    kind : str
        ``"trial"``, or ``"final"`` when the finalists of a task were timed in turns: the last finals of a
        task decide its winner. A final that is not ok (wrong outputs, say) disqualifies its trace.
    task_id, task_name : str
        The task; the id is the structural hash of its program.
    target, target_key : str
        The target as JSON, and a short hash of what matters in it.
    trial : int
        Position among the task's trials; 0 is the untuned default schedule.
    trace : list or None
        ``[instructions, decisions]`` as MetaSchedule writes a trace, postprocessing included; None for the
        default schedule.
    space : int or None
        Index of the design space the decisions belong to.
    decisions : list or None
        The decision vector within the design space.
    ok : bool
        Whether the candidate counts.
    latencies : tuple of float
        Seconds per call, one per repeat.
    stopped_early : bool
        Too slow to be timed more than once.
    error_kind, error : str
        What went wrong, as a word and as a line; empty if nothing did.
    build_s, run_s : float
        Seconds spent building and running.
    chosen_by : str
        ``"default"`` or ``"search"``.
    seed : int
        Seed of the run.
    microarch, cpu : str
        The machine: LLVM's name and the CPU's own; on a farm, what its target says.
    device : str
        ``"HOST:PORT"`` of the farm's device that measured it; empty for this machine.
    time : str
        When, in ISO 8601, UTC.
    pretune, tvm : str
        Versions.
    """

    version: int = RECORD_VERSION
    kind: Literal["trial", "final"] = "trial"
    task_id: str
    task_name: str
    target: str
    target_key: str
    trial: int
    trace: list[Any] | None = None
    space: int | None = None
    decisions: list[Any] | None = None
    ok: bool
    latencies: tuple[float, ...] = ()
    stopped_early: bool = False
    error_kind: str = ""
    error: str = ""
    build_s: float = 0.0
    run_s: float = 0.0
    chosen_by: ChosenBy
    seed: int = 0
    microarch: str = ""
    cpu: str = ""
    device: str = ""
    time: str = ""
    pretune: str = ""
    tvm: str = ""

    def __post_init__(self) -> None:
        if self.ok and not self.latencies:
            raise ValueError("a record that is ok needs a latency")
        if not all(math.isfinite(value) and value > 0 for value in self.latencies):
            raise ValueError(f"latencies must be positive and finite, not {self.latencies}")

    @property
    def latency(self) -> float:
        """The fastest repeat in seconds; infinite for a record that is not ok."""
        return min(self.latencies) if self.ok else math.inf

    @property
    def trace_key(self) -> str:
        """Short hash of the trace; ``"default"`` for the default schedule."""
        return trace_key(self.trace)


def make_record(
    task: Task,
    target: Target,
    measured: Measured,
    *,
    trial: int,
    trace: Trace | Sequence[Any] | None,
    chosen_by: ChosenBy,
    hardware: Hardware,
    seed: int = 0,
    kind: Literal["trial", "final"] = "trial",
    space: int | None = None,
    decisions: Sequence[Any] | None = None,
) -> Record:
    """Make a record of a measurement, adding the time and the versions.

    Parameters
    ----------
    task : Task
        What was tuned.
    target : tvm.target.Target
        For which target.
    measured : Measured
        What was measured.
    trace : Trace, JSON of one, or None
        The candidate; None for the default schedule.
    trial, chosen_by, seed, kind, space, decisions
        See `Record`.
    hardware : Hardware
        Where.
    """
    return Record(
        kind=kind,
        task_id=task.task_id,
        task_name=plain(task.name),
        target=str(target),
        target_key=target_key(target),
        trial=trial,
        trace=None if trace is None else trace_to_json(trace),
        space=space,
        decisions=None if decisions is None else plain(decisions),
        ok=measured.ok and not measured.error_kind,
        latencies=tuple(float(value) for value in measured.latencies),
        stopped_early=measured.stopped_early,
        error_kind=measured.error_kind,
        error=plain(measured.error),
        build_s=measured.build_s,
        run_s=measured.run_s,
        chosen_by=chosen_by,
        seed=seed,
        microarch=hardware.microarch,
        cpu=hardware.model_name,
        device=measured.device,
        time=datetime.now(UTC).isoformat(timespec="milliseconds"),
        pretune=_version("pretune"),
        tvm=_version("apache-tvm"),
    )


def target_key(target: Target | str | Mapping[str, Any]) -> str:
    """Short hash of what matters in a target: 12 hex digits, the same however the target was written.

    ``PRETUNE_EXACT_MATH`` matters too: latencies with and without it do not compare.

    Parameters
    ----------
    target : Target, str or mapping
        The target, or its JSON.
    """
    config = dict(target) if isinstance(target, Mapping) else json.loads(str(target))
    # TVM derives the features, the keys and the device from the rest; the host does not run the kernels.
    derived = {"tag", "keys", "host", "device"}
    config = {name: value for name, value in config.items() if name not in derived and "feature." not in name}
    if isinstance(config.get("mattr"), list):
        config["mattr"] = sorted(config["mattr"])
    if env.exact_math():
        config["math"] = "exact"
    return _hash(config, 6)


def trace_key(trace: Sequence[Any] | None) -> str:
    """Short hash of a trace's JSON: 16 hex digits; ``"default"`` for None."""
    return "default" if trace is None else _hash(trace, 8)


def _hash(value: Any, size: int) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
