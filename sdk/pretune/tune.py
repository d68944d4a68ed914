"""The main job: a program in, a tuned one out.

``tune`` reads the program, and for each of its tasks: generates the design spaces, lets the world model rank many thousands
of candidates in latent space, measures the most promising, learns from the latencies, and repeats. Every latency is on
disk before the next candidate starts, so that a run can be stopped at any moment and resumed.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune import env
from pretune.compat import check_versions, setup_tvm
from pretune.errors import EnvironmentFaultError, NothingTunedError, OptionError, PretuneError

check_versions()

from pretune.hardware import Hardware, detect, hardware_for_target, make_target  # noqa: E402
from pretune.hardware.target import check_runs_here  # noqa: E402
from pretune.intake import Program, Task, load_program, select_tasks  # noqa: E402
from pretune.measure import MeasurePool  # noqa: E402
from pretune.model import TaskScorer, WorldModel, find_weights  # noqa: E402
from pretune.records import Record, RunFolder, best_records, make_record, target_key, write_database  # noqa: E402
from pretune.search import Proposal, TaskSearch  # noqa: E402
from pretune.space import Candidate, TaskSpace  # noqa: E402

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.measure import Measured

BATCH = 16
"""Trials between two looks at what was learnt."""

FINALISTS = 4
"""Candidates timed in turns with the default schedule before the winner is named."""

FINAL_ROUNDS = 7


@dataclass(frozen=True)
class Progress:
    """What a progress line shows.

    Attributes
    ----------
    task : str
    index, tasks : int
        Number of this task, and of all.
    trials, budget : int
        Trials of this task so far, and its budget.
    best, default : float
        Latencies in seconds; infinite while unknown.
    seconds_left : float
        Estimate for the whole run; NaN while unknown.
    """

    task: str
    index: int
    tasks: int
    trials: int
    budget: int
    best: float
    default: float
    seconds_left: float


@dataclass
class TaskResult:
    """The outcome of one task.

    Attributes
    ----------
    default, best : float or None
        Latencies in seconds of the untuned and of the chosen schedule, timed in turns; None if not measured.
    chosen_by : str
        ``"search"``; ``"default"`` if nothing beat the untuned schedule; ``"only"`` where the design space holds one
        candidate; ``"model"`` for the first choice of an unmeasured run; ``"failed"``.
    trace : list or None
        The chosen schedule as ``[instructions, decisions]``; None for the default.
    notes : list of str
        Candidates that were dropped for wrong outputs, and the like.
    """

    task_id: str
    name: str
    weight: int
    default: float | None = None
    best: float | None = None
    chosen_by: str = "failed"
    trials: int = 0
    error: str = ""
    trace: list[Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def speedup(self) -> float | None:
        """Default latency over the chosen one's."""
        return self.default / self.best if self.default and self.best else None


@dataclass
class TuneResult:
    """The outcome of a run.

    Attributes
    ----------
    tasks : list of TaskResult
        Heaviest first.
    out : pathlib.Path
        Output folder: ``records.jsonl``, ``database/``, ``result.json``, and ``model.so`` for a whole model.
    library : pathlib.Path or None
    notices : list of str
    """

    program: str
    target: str
    weights: str
    hardware: Hardware
    tasks: list[TaskResult]
    out: Path
    library: Path | None
    seconds: float
    notices: list[str]

    def to_dict(self) -> dict[str, Any]:
        """What ``result.json`` holds."""
        return {
            "version": 1,
            "program": self.program,
            "target": self.target,
            "weights": self.weights,
            "cpu": self.hardware.model_name,
            "microarch": self.hardware.microarch,
            "seconds": round(self.seconds, 3),
            "library": str(self.library) if self.library else None,
            "notices": self.notices,
            "tasks": [{**asdict(t), "speedup": t.speedup} for t in self.tasks],
        }


def tune(
    source: Any,
    *,
    target: Any = "native",
    shapes: Mapping[str, Sequence[int]] | None = None,
    trials: int = 64,
    op: str | None = None,
    out: str | Path = "pretune-out",
    weights: str | Path | None = None,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Tune a program.

    Parameters
    ----------
    source : str, Path or object
        An ``.onnx``, ``.pt2``, ``.py`` or ``.json`` file, or such a program as an object; see `pretune.intake.load_program`.
    target : str, dict or tvm.target.Target
        ``"native"`` is this machine.
    shapes : mapping, optional
        Shapes of inputs with dynamic dimensions, by name.
    trials : int
        Candidates to measure per task; 0 measures nothing and takes the model's first choice.
    op : str, optional
        Tune only tasks whose names match this pattern (``fnmatch``).
    out : str or Path
        Output folder. An earlier run there is resumed: nothing is measured twice.
    weights : str or Path, optional
        Weights folder; by default the installed one that covers the hardware best.
    seed : int
        Seed of all sampling.
    on_progress : callable, optional
        Called after every trial.

    Returns
    -------
    TuneResult

    Raises
    ------
    InputError, TargetError, WeightsError, OutputError, OptionError
        For what was given.
    NothingTunedError
        If every task failed; the message is the first failure.
    """
    if trials < 0:
        raise OptionError(f"trials must be 0 or more, not {trials}; try --trials 64")
    started = time.monotonic()
    machine = detect()
    made = make_target(target, machine)
    if trials:
        check_runs_here(made, machine)
    hardware = hardware_for_target(made, machine)
    chosen = find_weights(hardware, weights)
    program = load_program(source, target=made, shapes=shapes)
    tasks = select_tasks(program.tasks, op)
    with RunFolder(out) as folder, contextlib.ExitStack() as stack:
        pool = stack.enter_context(MeasurePool(made)) if trials else None
        setup_tvm(made.kind.name)
        model = WorldModel(chosen, env.num_threads() or machine.cores)
        run = _Run(made, hardware, model, pool, folder, trials, seed, on_progress, folder.log.load(), len(tasks))
        results = [run.task(i, task) for i, task in enumerate(tasks)]
        notices = list(run.notices)
        library = _write(program, tasks, results, made, folder, run.records, notices)
        result = TuneResult(
            program.name, str(made), f"{chosen.config.name} ({chosen.why})", hardware, results, folder.path, library,
            time.monotonic() - started, notices,
        )  # fmt: skip
        folder.write_result(result.to_dict())
    if all(r.chosen_by == "failed" for r in results):
        first = results[0]
        raise NothingTunedError(f"none of {len(results)} tasks could be tuned; {first.name}: {first.error}")
    return result


def load(weights: str | Path | None = None, *, target: Any = "native") -> WorldModel:
    """The world model for a target: the given weights folder, or the installed one that covers it best."""
    machine = detect()
    hardware = hardware_for_target(make_target(target, machine), machine)
    return WorldModel(find_weights(hardware, weights), env.num_threads() or machine.cores)


@dataclass
class _Run:
    """What the tasks of a run share."""

    target: Target
    hardware: Hardware
    model: WorldModel
    pool: MeasurePool | None
    folder: RunFolder
    budget: int
    seed: int
    on_progress: Callable[[Progress], None] | None
    records: list[Record]
    count: int
    notices: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    done_trials: int = 0

    def task(self, index: int, task: Task) -> TaskResult:
        """Tune one task; whatever goes wrong costs this task only."""
        result = TaskResult(task.task_id, task.name, task.weight)
        try:
            space = TaskSpace.generate(task.mod, self.target)
            if space.is_trivial:
                self._only_candidate(space, result)
            elif self.pool is None:
                self._first_choice(space, task, result)
            else:
                _TaskRun(self, self.pool, index, task, space, result).run()
        except PretuneError:
            raise  # A full disk or a dead pool ends the run; what was measured is on disk.
        except Exception as error:
            if env.debug():
                raise
            result.error = _one_line(error)
        return result

    def _only_candidate(self, space: TaskSpace, result: TaskResult) -> None:
        candidate = space.materialise(0, np.zeros(len(space.spaces[0].slots), np.int32)) if space.spaces else None
        result.chosen_by, result.trace = ("only", candidate.trace_json) if candidate else ("default", None)

    def _first_choice(self, space: TaskSpace, task: Task, result: TaskResult) -> None:
        search = TaskSearch(space, TaskScorer(self.model, space, self.hardware), seed=self.seed)
        proposals = search.propose(1, greedy=True)
        if not proposals:
            raise RuntimeError("no candidate of the design space could be built")
        result.chosen_by, result.trace = "model", proposals[0].candidate.trace_json


class _TaskRun:
    """Search, measure and decide one task."""

    def __init__(self, run: _Run, pool: MeasurePool, index: int, task: Task, space: TaskSpace, result: TaskResult) -> None:
        self.shared, self.pool, self.index, self.task, self.space, self.result = run, pool, index, task, space, result
        self.key = target_key(run.target)
        self.best = self.default = math.inf
        self.trials = 0
        self.by_trace: dict[str, Candidate] = {}

    def run(self) -> None:
        earlier = [r for r in self.shared.records if r.task_id == self.task.task_id and r.target_key == self.key]
        measured = [r for r in earlier if r.kind == "trial"]
        self.trials = sum(1 for r in measured if r.trace is not None)
        self.best = min((r.latency for r in measured), default=math.inf)
        if not any(r.trace is None for r in measured):
            self._measure([None], [self.task.mod])
        self.default = min((r.latency for r in self._mine() if r.trace is None), default=math.inf)
        budget = self.shared.budget
        if self.trials < budget:
            search = TaskSearch(
                self.space, TaskScorer(self.shared.model, self.space, self.shared.hardware), seed=self.shared.seed
            )
            restore(search, measured)
            while self.trials < budget:
                proposals = search.propose(min(BATCH, budget - self.trials))
                if not proposals:
                    break  # Every candidate of a small design space has been measured.
                latencies = self._measure(proposals, [p.candidate.mod for p in proposals])
                search.update(proposals, latencies)
        self.result.trials = self.trials
        self._decide()

    def _mine(self) -> list[Record]:
        return [r for r in self.shared.records if r.task_id == self.task.task_id and r.target_key == self.key]

    def _measure(self, proposals: Sequence[Proposal | None], mods: list[Any]) -> list[float]:
        """Measure candidates (None is the default schedule); each is recorded before the next one is timed."""
        latencies = [math.inf] * len(mods)

        def on_result(i: int, measured: Measured) -> None:
            proposal = proposals[i]
            candidate = proposal.candidate if proposal is not None else None
            self._record(
                measured,
                trace=candidate.trace_json if candidate else None,
                chosen_by="search" if candidate else "default",
                trial=self.trials + 1 if candidate else 0,
                space=candidate.space if candidate else None,
                decisions=[d.tolist() for d in candidate.decisions] if candidate else None,
            )
            latencies[i] = measured.latency
            self.best = min(self.best, measured.latency)
            if candidate is not None:
                self.trials += 1
                self.shared.done_trials += 1
            else:
                self.default = measured.latency
            self._progress()

        best = self.best if math.isfinite(self.best) else None
        self.pool.measure(mods, best=best, on_result=on_result)
        return latencies

    def _record(self, measured: Measured, **fields: Any) -> Record:
        shared = self.shared
        record = make_record(
            self.task, shared.target, measured, hardware=shared.hardware, seed=shared.seed, **fields
        )
        shared.folder.log.append(record)
        shared.records.append(record)
        return record

    def _decide(self) -> None:
        """Time the finalists in turns with the default, check the winner's outputs, and name it."""
        result = self.result
        mine = self._mine()
        ranked = best_records(mine, self.task.task_id, self.key)
        if not ranked:
            failed = next((r for r in mine if not r.ok), None)
            raise RuntimeError(failed.error if failed else "nothing could be measured")
        if mine[-1].kind != "final":
            self._finals(ranked)
            ranked = best_records(self._mine(), self.task.task_id, self.key)
        if not ranked:
            raise RuntimeError("no schedule gives the outputs of the untuned program")
        winner = ranked[0]
        default = next((r for r in ranked if r.trace is None), None)
        result.best = _median(winner.latencies)
        result.default = _median(default.latencies) if default is not None else None
        result.trace = winner.trace
        result.chosen_by = "default" if winner.trace is None else "search"

    def _finals(self, ranked: list[Record]) -> None:
        """Write a final record for each finalist; one whose outputs are wrong is recorded as failed."""
        default = [r for r in ranked if r.trace is None]
        finalists = [r for r in ranked if r.trace is not None][:FINALISTS] + default
        mods = [self._module_of(r) for r in finalists]
        timed = self.pool.interleave(mods, rounds=FINAL_ROUNDS)
        order = sorted(range(len(finalists)), key=lambda i: timed[i].latency)
        checked = False
        for i in order:
            record, measured = finalists[i], timed[i]
            if record.trace is not None and not checked and measured.ok:
                wrong = self.pool.compare(self.task.mod, mods[i])
                if wrong is None:
                    checked = True  # Only a winner needs checking; slower ones are never used.
                else:
                    note = f"{self.task.name}: trial {record.trial} computes something else and was dropped ({wrong})"
                    self.result.notes.append(note)
                    self.shared.notices.append(note)
                    measured = _failed(measured, wrong)
            if record.trace is None:
                checked = True
            self._record(
                measured, kind="final", trace=record.trace, chosen_by=record.chosen_by, trial=record.trial,
                space=record.space, decisions=record.decisions,
            )  # fmt: skip

    def _module_of(self, record: Record) -> Any:
        if record.trace is None:
            return self.task.mod
        return replay(self.task.mod, record.trace)

    def _progress(self) -> None:
        shared = self.shared
        if shared.on_progress is None:
            return
        elapsed = time.monotonic() - shared.started
        left = math.nan
        if shared.done_trials >= 4:
            remaining = (shared.count - self.index - 1) * shared.budget + shared.budget - self.trials
            left = elapsed / shared.done_trials * remaining
        shared.on_progress(
            Progress(self.task.name, self.index, shared.count, self.trials, shared.budget, self.best, self.default, left)
        )


def restore(search: TaskSearch, records: Sequence[Record]) -> None:
    """Feed a search with the trials of an earlier run of the same task and target."""
    for record in records:
        if record.trace is None or record.space is None or record.decisions is None:
            continue
        if record.space >= len(search.space.spaces):
            continue
        search.restore(record.space, record.decisions, record.latency)


def replay(mod: Any, trace: list[Any]) -> Any:
    """The program that a recorded trace makes of `mod`."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    schedule = Schedule(mod, error_render_level="none")
    Trace.apply_json_to_schedule(trace, schedule)
    return schedule.mod


def _failed(measured: Measured, error: str) -> Measured:
    import msgspec

    return msgspec.structs.replace(measured, latencies=(), error_kind="run", error=error)


def _median(latencies: Sequence[float]) -> float:
    return float(np.median(latencies))


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]


def _write(
    program: Program, tasks: Sequence[Task], results: Sequence[TaskResult], target: Target, folder: RunFolder,
    records: Sequence[Record], notices: list[str],
) -> Path | None:  # fmt: skip
    """Write the stock database, and the compiled library of a whole model."""
    from pretune.compile import compile_program, export_library

    unmeasured = {r.task_id: r.trace for r in results if r.trace is not None and r.best is None}
    write_database(records, tasks, target, folder.database_dir, unmeasured=unmeasured)
    if program.kind != "relax":
        return None
    from tvm.s_tir import meta_schedule as ms

    database = ms.database.JSONDatabase(work_dir=str(folder.database_dir))
    executable = compile_program(program, target, database)
    try:
        return export_library(executable, folder.library_path)
    except EnvironmentFaultError as error:  # No linker here; the database can be applied where there is one.
        notices.append(str(error))
        return None
