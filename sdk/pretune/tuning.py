"""The main job: a program in, a tuned one out.

``tune`` reads the program, and for each of its tasks: generates the design spaces, lets the world model rank
many thousands of candidates in latent space, measures the most promising, learns from the latencies, and
repeats. Every latency is on disk before the next candidate starts, so that a run can be stopped at any moment
and resumed.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pretune import env
from pretune.compat import check_versions, setup_tvm
from pretune.errors import (
    EnvironmentFaultError,
    MeasureError,
    NothingTunedError,
    OptionError,
    PretuneError,
    one_line,
)
from pretune.messages import notice

check_versions()

from pretune.hardware import Hardware, detect, hardware_for_target, make_target  # noqa: E402
from pretune.hardware.target import check_runs_here  # noqa: E402
from pretune.hub.sources import find_weights  # noqa: E402
from pretune.intake import Program, Task, load_program, select_tasks  # noqa: E402
from pretune.library import ModelLatency, library_key, time_library  # noqa: E402
from pretune.measure import FarmPool, Pool, RPCAddress, open_pool  # noqa: E402
from pretune.measure.noise import busy_notice, spread  # noqa: E402
from pretune.model import TaskScorer, WorldModel  # noqa: E402
from pretune.records import (  # noqa: E402
    Record,
    RunFolder,
    best_records,
    latest_finals,
    make_record,
    target_key,
    write_database,
)
from pretune.search import Proposal, TaskSearch  # noqa: E402
from pretune.space import TaskSpace, serial  # noqa: E402
from pretune.vector_math import vectorise  # noqa: E402

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.measure import Measured
    from pretune.space import Candidate

FIRST_BATCH, BATCH = 16, 8
"""Trials before the first look at what was learnt, and between two later ones. On eight tasks of
validation networks, 64 trials in steps of 8 ended 6 % better than in steps of 16, one run each."""

FINALISTS = 6
"""Candidates timed in turns with the default schedule before the winner is named."""

FINAL_ROUNDS = 7

SERIAL_BELOW_S, SERIAL_FINALISTS = 20e-6, 3
"""Where the best trial is faster than so many seconds, so many of the best are finalists on one thread too:
MetaSchedule makes every program parallel, and waking threads takes 1 to 3 us. On the 2 cores of the datasets
in ``hub_cards`` one thread won on 22 of the 31 tasks below 3 us, by a quarter, on 4 of the 37 of 3 to 6 us,
and on none above. More cores take longer to wake."""

SERIAL_WORK = 6 * 1024
"""What is chosen without measuring runs on one thread where the elements of its arguments and a 32nd of its
operations are fewer. One thread was up to 1.8 times as fast on 4 of the 7 such tasks of the same datasets,
and at most 0.8 % slower on the others."""

TOO_SLOW = 3.0
"""A default schedule this many times slower than the best trial is not timed with the finalists again: it may
take seconds a call."""

PATIENCE = 60.0
"""Seconds that the untuned program may run: naive code of a large convolution takes longer than a candidate
should."""


BUILD_SLACK, LEAST_BUILD_S = 8.0, 2.0
"""A candidate may take so many times as long to build as the median of its task, and at least these seconds.
Of the 14 614 that were built of 313 tasks (``hub_cards/datasets/cpu-x86-64-v4``), that would have stopped 82:
none was the best of its task, and two were within 10 % of it."""


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
    resumed : int or None
        Tasks that an earlier run had done; None if there was none.
    result : TaskResult or None
        The outcome, once the task is done.
    """

    task: str
    index: int
    tasks: int
    trials: int
    budget: int
    best: float
    default: float
    seconds_left: float
    resumed: int | None = None
    result: TaskResult | None = None


@dataclass
class TaskResult:
    """The outcome of one task.

    Attributes
    ----------
    default, best : float or None
        Latencies in seconds of the untuned and of the chosen schedule, the fastest of some turns; None if not
        measured.
    chosen_by : str
        ``"search"``; ``"default"`` if nothing beat the untuned schedule; ``"only"`` where the design space
        holds one candidate; ``"model"`` for the first choice of an unmeasured run; ``"failed"``.
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
    trials : int
        Budget per task.
    library_key : str
        What the library was made of, see `pretune.library.library_key`.
    model : ModelLatency or None
        Latencies of a whole model, untuned and of the library; None if not measured.
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
    trials: int = 0
    library_key: str = ""
    model: ModelLatency | None = None

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
            "trials": self.trials,
            "library": str(self.library) if self.library else None,
            "library_key": self.library_key,
            "model": {**asdict(self.model), "speedup": self.model.speedup} if self.model else None,
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
    pull: bool = False,
    seed: int = 0,
    rpc: RPCAddress | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TuneResult:
    """Tune a program.

    Parameters
    ----------
    source : str, Path or object
        An ``.onnx``, ``.pt2``, ``.py`` or ``.json`` file, or such a program as an object; see
        `pretune.intake.load_program`.
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
        Weights folder, or a repository on the hub as ``ORG/NAME`` or ``ORG/NAME@REVISION``; by default those
        on this machine that cover the hardware best.
    pull : bool
        Whether weights that are needed but not here may be downloaded, see
        `pretune.hub.sources.find_weights`.
    seed : int
        Seed of all sampling.
    rpc : RPCAddress, optional
        Measure on the devices of a farm, which `target` describes, in place of this machine.
    on_progress : callable, optional
        Called after every trial.

    Returns
    -------
    TuneResult

    Raises
    ------
    InputError, TargetError, WeightsError, OutputError, OptionError
        For what was given.
    HubError
        If weights are to be pulled, and cannot be.
    MeasureError
        If measuring cannot go on; what was measured is kept in `out`.
    NothingTunedError
        If every task failed; the message is the first failure.
    """
    if trials < 0:
        raise OptionError(f"trials must be 0 or more, not {trials}; try --trials 64")
    started = time.monotonic()
    machine = detect()
    made = make_target(target, machine)
    if trials and rpc is None:
        check_runs_here(made, machine)
    hardware = hardware_for_target(made, machine, here=rpc is None)
    chosen = find_weights(hardware, weights, pull=pull)
    program = load_program(source, target=made, shapes=shapes)
    tasks = select_tasks(program.tasks, op)
    with RunFolder(out) as folder, contextlib.ExitStack() as stack:
        pool = stack.enter_context(open_pool(made, rpc)) if trials else None
        setup_tvm(made)
        model = WorldModel(chosen, env.num_threads() or machine.cores)
        records = folder.log.load()
        run = Run(made, hardware, model, pool, folder, trials, seed, on_progress, records, len(tasks))
        earlier = folder.read_result()
        run.resumed = _resumed(tasks, run, earlier)
        if chosen.notice:
            run.notices.append(chosen.notice)
        results = [run.task(i, task) for i, task in enumerate(tasks)]
        notices = list(run.notices)
        if busy := busy_notice(run.spreads):
            notices.append(busy)
        used = f"{chosen.config.name} ({chosen.why})"
        result = TuneResult(
            program.name, str(made), used, hardware, results, folder.path, None, 0.0, notices, trials
        )
        failure = None
        try:
            unmeasured = {r.task_id: r.trace for r in results if r.trace is not None and r.best is None}
            write_database(run.records, tasks, made, folder.database_dir, unmeasured=unmeasured)
            if program.kind == "relax":
                _finish_model(program, run, earlier, result)
        except Exception as error:  # a full disk, say: what was found is told first, if it still can be
            failure = error
            notices.append(one_line(error))
        result.seconds = time.monotonic() - started
        folder.write_result(result.to_dict())
        if failure is not None:
            raise failure
    if all(r.chosen_by == "failed" for r in results):
        first = results[0]
        raise NothingTunedError(f"none of {len(results)} tasks could be tuned; {first.name}: {first.error}")
    return result


def load(weights: str | Path | None = None, *, target: Any = "native", pull: bool = False) -> WorldModel:
    """The world model for a target; see `tune` for `weights` and `pull`."""
    machine = detect()
    hardware = hardware_for_target(make_target(target, machine), machine)
    chosen = find_weights(hardware, weights, pull=pull)
    if chosen.notice:
        notice(chosen.notice)
    return WorldModel(chosen, env.num_threads() or machine.cores)


@dataclass
class Run:
    """What the tasks of a run share. `tune` makes one; a benchmark makes its own to tune tasks one by one.

    Attributes
    ----------
    pool : Pool or None
        None measures nothing, and takes the model's first choice.
    folder : RunFolder or None
        Where records go; needed with a pool.
    budget : int
        Trials per task.
    records : list of Record
        What earlier runs measured; what this one measures is appended.
    count : int
        Number of tasks.
    resumed : int or None
        Tasks that an earlier run had done; None if there was none.
    spreads : list of list of float
        Of the trials that this run measured, by task: how far repeats differ.
    """

    target: Target
    hardware: Hardware
    model: WorldModel
    pool: Pool | None
    folder: RunFolder | None
    budget: int
    seed: int
    on_progress: Callable[[Progress], None] | None
    records: list[Record]
    count: int
    notices: list[str] = field(default_factory=list)
    resumed: int | None = None
    spreads: list[list[float]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    done_trials: int = 0
    searched: int = 0

    def task(self, index: int, task: Task) -> TaskResult:
        """Tune one task; whatever goes wrong costs this task only."""
        result = TaskResult(task.task_id, task.name, task.weight)
        self.report(index, task)
        try:
            space = TaskSpace.generate(task.mod, self.target)
            if space.is_trivial:
                self._only_candidate(space, task, result)
            elif self.pool is None:
                self._first_choice(space, task, result)
            else:
                _TaskRun(self, index, task, space, result).run()
        except PretuneError:
            raise  # A full disk or a dead pool ends the run; what was measured is on disk.
        except Exception as error:
            if env.debug():
                raise
            result.error = one_line(error)
        self.report(index, task, result.trials, result.best or math.inf, result.default or math.inf, result)
        return result

    def report(
        self,
        index: int,
        task: Task,
        trials: int = 0,
        best: float = math.inf,
        default: float = math.inf,
        result: TaskResult | None = None,
    ) -> None:
        """Tell whoever shows progress where this task is."""
        if self.on_progress is None:
            return
        left = math.nan
        if self.done_trials >= 4:
            # Tasks to come are searched or have nothing to decide in the proportion of those so far.
            share = self.searched / (index + 1)
            here = 0 if result is not None else max(0, self.budget - trials)
            remaining = (self.count - index - 1) * share * self.budget + here
            left = (time.monotonic() - self.started) / self.done_trials * remaining
        where = (task.name, index, self.count, trials, self.budget)
        self.on_progress(Progress(*where, best, default, left, self.resumed, result))

    def _only_candidate(self, space: TaskSpace, task: Task, result: TaskResult) -> None:
        candidate = None
        if space.spaces:
            candidate = space.materialise(0, np.zeros(len(space.spaces[0].slots), np.int32))
        result.chosen_by = "only" if candidate else "default"
        result.trace = _unmeasured(task, candidate) if candidate else None

    def _first_choice(self, space: TaskSpace, task: Task, result: TaskResult) -> None:
        search = TaskSearch(space, TaskScorer(self.model, space, self.hardware), seed=self.seed)
        proposals = search.propose(1, greedy=True)
        if not proposals:
            raise RuntimeError("no candidate of the design space could be built")
        result.chosen_by, result.trace = "model", _unmeasured(task, proposals[0].candidate)


class _TaskRun:
    """Search, measure and decide one task."""

    def __init__(self, run: Run, index: int, task: Task, space: TaskSpace, result: TaskResult) -> None:
        assert run.pool is not None and run.folder is not None
        self.shared, self.pool, self.folder = run, run.pool, run.folder
        self.index, self.task, self.space, self.result = index, task, space, result
        self.key = target_key(run.target)
        self.best = self.default = math.inf
        self.trials = 0
        self.spreads: list[float] = []
        run.spreads.append(self.spreads)

    def run(self) -> None:
        shared = self.shared
        shared.searched += 1
        measured = [r for r in self._mine() if r.kind == "trial"]
        self.trials = sum(1 for r in measured if r.trace is not None)
        self.best = min((r.latency for r in measured), default=math.inf)
        if not any(r.trace is None for r in measured):
            with patient(self.pool):
                self._measure([None], [self.task.mod])
        self.default = min((r.latency for r in self._mine() if r.trace is None), default=math.inf)
        if self.trials < shared.budget:
            scorer = TaskScorer(shared.model, self.space, shared.hardware)
            search = TaskSearch(self.space, scorer, seed=shared.seed)
            restore(search, measured)
            self._search(search, _programs(self.task, measured))
        self.result.trials = self.trials
        self._note_failures()
        self._decide()

    def _search(self, search: TaskSearch, known: set[int]) -> None:
        """Propose, measure, learn, until the trials are spent. `known` programs were measured before."""
        while self.trials < self.shared.budget:
            size = BATCH if self.trials else FIRST_BATCH
            proposals = search.propose(min(size, self.shared.budget - self.trials))
            if not proposals:
                break  # Every candidate of a small design space has been measured.
            proposals = [p for p in proposals if p.candidate.shash not in known]
            latencies = self._measure(proposals, [self._built(p.candidate.mod) for p in proposals])
            search.update(proposals, latencies)

    def _note_failures(self) -> None:
        """Say so when many trials failed: what they would have found is missing."""
        kinds = Counter(
            r.error_kind for r in self._mine() if r.kind == "trial" and r.trace is not None and not r.ok
        )
        if 4 * kinds.total() >= self.trials > 0:
            listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            self._note(f"{self.task.name}: {kinds.total()} of {self.trials} trials failed ({listed})")

    def _mine(self) -> list[Record]:
        return [r for r in self.shared.records if r.task_id == self.task.task_id and r.target_key == self.key]

    def _measure(self, proposals: Sequence[Proposal | None], mods: list[Any]) -> list[float]:
        """Measure candidates (None: the default schedule); each is recorded before the next one is timed."""
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
            if len(measured.latencies) > 1:
                self.spreads.append(spread(measured.latencies))
            if candidate is not None:
                self.trials += 1
                self.shared.done_trials += 1
            else:
                self.default = measured.latency
            self.shared.report(self.index, self.task, self.trials, self.best, self.default)

        best = self.best if math.isfinite(self.best) else None
        built = [r.build_s for r in self._mine() if r.kind == "trial" and r.trace is not None and r.ok]
        with limits(self.pool, build=build_deadline(built, self.pool.build_timeout)):
            self.pool.measure(mods, best=best, on_result=on_result)
        return latencies

    def _built(self, mod: Any) -> Any:
        """A candidate as it is compiled; the untuned program is compiled as stock TVM does it."""
        return vectorise(mod, self.shared.target)

    def _record(self, measured: Measured, **fields: Any) -> None:
        self._keep(self._made(measured, **fields))

    def _made(self, measured: Measured, **fields: Any) -> Record:
        shared = self.shared
        fields |= {"hardware": shared.hardware, "seed": shared.seed}
        return make_record(self.task, shared.target, measured, **fields)

    def _keep(self, *records: Record) -> None:
        self.folder.log.append(*records)
        self.shared.records.extend(records)

    def _decide(self) -> None:
        """Time the finalists in turns with the default until one whose outputs are right has won."""
        result = self.result
        while True:
            mine = self._mine()
            ranked = best_records(mine, self.task.task_id, self.key)
            if not ranked:
                raise RuntimeError(_why_nothing(mine))
            winner = ranked[0]
            # Where all finalists failed, the trials behind them rank first: those were neither timed in turns
            # nor checked. Each turn disqualifies some, so this ends, at the latest with the default alone.
            if winner in latest_finals(mine) or all(record.trace is None for record in ranked):
                break
            self._finals(ranked)
        # A default far behind has been measured, but not as a finalist.
        default = next((r for r in [*ranked, *mine] if r.trace is None and r.ok), None)
        # By the fastest round, as they were ranked: what else runs on the machine only adds to a latency.
        result.best = winner.latency
        result.default = default.latency if default is not None else None
        result.trace = winner.trace
        result.chosen_by = "default" if winner.trace is None else "search"

    def _finals(self, ranked: list[Record]) -> None:
        """Write a final record for each finalist; one whose outputs are wrong is recorded as failed."""
        default = [r for r in ranked if r.trace is None and r.latency < TOO_SLOW * ranked[0].latency]
        finalists = [r for r in ranked if r.trace is not None][:FINALISTS]
        finalists += self._serial(finalists) + default
        mods = [
            self.task.mod if r.trace is None else self._built(replay(self.task.mod, r.trace))
            for r in finalists
        ]
        timed = self.pool.interleave(mods, rounds=FINAL_ROUNDS)
        for i in sorted(range(len(finalists)), key=lambda i: timed[i].latency):
            if finalists[i].trace is None:
                break  # The default is the winner.
            if not timed[i].ok:
                continue
            wrong = self._check(mods[i])
            if wrong is None:
                break  # Only a winner needs checking; slower ones are never used.
            trial = f"{self.task.name}: trial {finalists[i].trial}"
            self._note(f"{trial} computes something else and was dropped ({wrong})")
            timed[i] = _failed(timed[i], wrong)
        # Written at once, failures first and then the winner: a run that is killed meanwhile leaves no
        # finalist that was not checked without the checked one before it.
        order = sorted(range(len(finalists)), key=lambda i: (timed[i].ok, timed[i].latency))
        self._keep(*(self._final(finalists[i], timed[i]) for i in order))

    def _serial(self, finalists: list[Record]) -> list[Record]:
        """The best few without parallel loops, where these may cost more than they save."""
        if not finalists or finalists[0].latency > SERIAL_BELOW_S:
            return []
        known = {record.trace_key for record in [*finalists, *self._mine()]}
        made = [
            msgspec.structs.replace(record, trace=serial(record.trace))
            for record in finalists[:SERIAL_FINALISTS]
            if record.trace is not None
        ]
        return [record for record in made if record.trace_key not in known]

    def _final(self, record: Record, measured: Measured) -> Record:
        return self._made(
            measured, kind="final", trace=record.trace, chosen_by=record.chosen_by, trial=record.trial,
            space=record.space, decisions=record.decisions,
        )  # fmt: skip

    def _check(self, mod: Any) -> str | None:
        """What is wrong with a candidate's outputs; None if nothing is."""
        if not math.isfinite(self.default):
            self._note(f"{self.task.name}: outputs were not compared, for the untuned program does not run")
            return None
        try:
            with patient(self.pool):
                return self.pool.compare(self.task.mod, mod)
        except MeasureError as error:  # The untuned program failed. If it is the pool, the next call says so.
            self._note(f"{self.task.name}: outputs were not compared: {one_line(error)}")
            return None

    def _note(self, text: str) -> None:
        self.result.notes.append(text)
        self.shared.notices.append(text)


def _unmeasured(task: Task, candidate: Candidate) -> list[Any]:
    """The trace of a candidate that is chosen without measuring."""
    work = sum(math.prod(shape) for shape, _ in task.args) + task.flops / 32
    return serial(candidate.trace_json) if work < SERIAL_WORK else candidate.trace_json


def build_deadline(seconds: Sequence[float], most: float) -> float:
    """Seconds that the next candidate of a task may take to build.

    Parameters
    ----------
    seconds : sequence of float
        What those candidates of the task took that were built.
    most : float
        The answer as long as they are few, and its upper bound.
    """
    if len(seconds) < FIRST_BATCH // 2:
        return most
    return min(most, max(LEAST_BUILD_S, BUILD_SLACK * statistics.median(seconds)))


@contextlib.contextmanager
def limits(pool: Pool, *, build: float | None = None, run: float | None = None) -> Iterator[None]:
    """Give candidates other deadlines meanwhile, in seconds."""
    usual = pool.build_timeout, pool.run_timeout
    pool.build_timeout, pool.run_timeout = build or usual[0], run or usual[1]
    try:
        yield
    finally:
        pool.build_timeout, pool.run_timeout = usual


def patient(pool: Pool) -> AbstractContextManager[None]:
    """Let the untuned program run longer than a candidate may."""
    return limits(pool, run=max(pool.run_timeout, PATIENCE))


def _programs(task: Task, records: Sequence[Record]) -> set[int]:
    """Structural hashes of the programs measured before: other decisions may lead to the same program."""
    from tvm_ffi import structural_hash

    known: set[int] = set()
    for record in records:
        # A record of another TVM may not replay here; measuring it again is no harm.
        with contextlib.suppress(Exception):
            if record.trace is not None:
                known.add(structural_hash(replay(task.mod, record.trace)))
    return known


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


def _why_nothing(records: Sequence[Record]) -> str:
    """Why no schedule of a task can be chosen."""
    if any(record.kind == "final" for record in records):
        return "no schedule gives the outputs of the untuned program"
    return next((record.error for record in records if not record.ok), "nothing could be measured")


def _failed(measured: Measured, error: str) -> Measured:
    return msgspec.structs.replace(measured, latencies=(), error_kind="run", error=error)


def _resumed(tasks: Sequence[Task], run: Run, earlier: Mapping[str, Any]) -> int | None:
    """How many tasks an earlier run had done; None if it measured none of them.

    Parameters
    ----------
    earlier : mapping
        Its ``result.json``; a run that was stopped leaves none.
    """
    key = target_key(run.target)
    mine = {
        task.task_id: [r for r in run.records if r.task_id == task.task_id and r.target_key == key]
        for task in tasks
    }
    if not run.budget or not any(mine.values()):
        return None
    done: set[str] = set()
    if earlier.get("target") == str(run.target) and earlier.get("trials", 0) >= run.budget:
        done = {t["task_id"] for t in earlier.get("tasks", ()) if t["chosen_by"] != "failed"}
    for task, records in mine.items():
        trials = sum(r.kind == "trial" and r.trace is not None for r in records)
        if trials >= run.budget and latest_finals(records):
            done.add(task)
    return sum(task.task_id in done for task in tasks)


def _finish_model(program: Program, run: Run, earlier: Mapping[str, Any], result: TuneResult) -> None:
    """Compile a whole model with the database and time it, unless an earlier run did, of the very same."""
    assert run.folder is not None
    path, database = run.folder.library_path, run.folder.database_dir
    result.library_key = library_key(program, run.target, database)
    if earlier.get("library_key") == result.library_key and path.exists():
        result.library = path
        if found := earlier.get("model"):
            result.model = ModelLatency(found["untuned"], found["tuned"])
    else:
        result.library = _compile(program, run.target, database, path, result.notices)
    if result.library is None or result.model is not None or run.pool is None:
        return
    if isinstance(run.pool, FarmPool):
        result.notices.append("the whole model was not timed, since its devices are on a farm")
        return
    try:
        result.model = time_library(program, run.target, path, run.pool.num_threads)
    except Exception as error:
        if env.debug():
            raise
        result.notices.append(f"the whole model was not timed: {one_line(error)}")


def _compile(program: Program, target: Target, database: Path, path: Path, notices: list[str]) -> Path | None:
    """Compile a whole model into a library; None, and a notice, if it cannot be."""
    from tvm.s_tir import meta_schedule as ms

    from pretune.compile import compile_program, export_library

    try:
        records = ms.database.JSONDatabase(work_dir=str(database))
        return export_library(compile_program(program, target, records), path)
    except EnvironmentFaultError as error:  # It does not link here; the database serves where it does.
        notices.append(str(error))
    except PretuneError:
        raise
    except Exception as error:  # What was measured is worth keeping, whatever TVM makes of the whole program.
        if env.debug():
            raise
        notices.append(f"TVM cannot compile the whole program, so there is no model.so: {one_line(error)}")
    return None
