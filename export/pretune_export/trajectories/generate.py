"""Random trajectories of the tasks of a corpus, unmeasured, one file per task and target."""

from __future__ import annotations

import hashlib
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import tvm

from pretune.compat import setup_tvm
from pretune.features import ActionEncoder, State
from pretune.features.program import read_program
from pretune.space import factorisations, sampling_indices, trace_to_json
from pretune_export.networks import CorpusTask

from .files import Programs, Trajectories
from .replay import FINAL, Decide, Replayer, choose_steps

if TYPE_CHECKING:
    from tvm.s_tir import Schedule
    from tvm.target import Target

PROGRESS_S = 30.0
"""Least time between two lines of progress."""


@dataclass(frozen=True)
class GenerateOptions:
    """How much of each task.

    Attributes
    ----------
    per_task : int
        Trajectories of a task; fewer where its design spaces hold no more.
    states : int
        Real intermediate states of a trajectory, at random steps, beside the final one.
    stores : float
        Share of the trajectories whose per-store features are read: they cost as much as all else together.
    cpu_s : int
        CPU seconds after which a task is given up.
    seed : int
    """

    per_task: int = 80
    states: int = 1
    stores: float = 0.25
    cpu_s: int = 120
    seed: int = 0


def random_decisions(insts: Sequence[Any], rng: np.random.Generator) -> Decide:
    """Uniform decisions, as `DesignSpace.sample` draws them, without its probes.

    The extent of a tiled loop is read off the schedule, so that tiles apply where it depends on earlier
    decisions. Compute locations, which depend on everything before, are left to TVM.
    """
    kinds = [str(inst.kind.name) for inst in insts]
    attrs = [list(inst.attrs) for inst in insts]

    def decide(sch: Schedule, position: int, inputs: list[Any]) -> Any:
        if kinds[position] == "SampleCategorical":
            return int(rng.integers(len(attrs[position][0])))
        if kinds[position] == "SamplePerfectTile":
            loop: Any = sch.get(inputs[0])
            extent = getattr(loop.extent, "value", 0)
            parts, innermost = (int(a) for a in attrs[position])
            options = factorisations(extent, parts, innermost) if extent else ()
            if len(options):
                return options[rng.integers(len(options))].tolist()
        return None

    return decide


def sample_task(
    task: CorpusTask, target: Target, kind: str, cores: int, options: GenerateOptions
) -> Trajectories:
    """Random trajectories of one task, in turn from each of its design spaces, none twice.

    Parameters
    ----------
    task : CorpusTask
    target : tvm.target.Target
    kind : str
        ``"cpu"`` or ``"cuda"``.
    cores : int
        Cores of the target.
    options : GenerateOptions
    """
    from tvm.s_tir import meta_schedule as ms

    mod: Any = tvm.ir.load_json(task.mod)
    rng = np.random.default_rng([options.seed, int(task.id[:8], 16), int(_key(target), 16)])
    replayer = Replayer(mod, target, cores)
    blocks = read_program(mod["main"])
    traces: list[Any] = [sch.trace for sch in replayer.context.generate_design_space()]
    spaces = [trace_to_json(trace)[0] for trace in traces]
    steps = [[s.inst for s in ActionEncoder(blocks, insts, cores).steps] for insts in spaces]
    tvm_insts = [list(trace.insts) for trace in traces]
    decide = [random_decisions(insts, rng) for insts in tvm_insts]
    sampling = [sampling_indices(insts) for insts in spaces]
    extractor = ms.feature_extractor.PerStoreFeature()
    seen: set[tuple[int, bytes]] = set()
    space, decisions, valid, states_of, step, stores_of = [], [], [], [], [], []
    states: list[State] = []
    stores = [np.zeros((0, 2 * extractor.feature_vector_length), np.float32)]
    for attempt in range(2 * options.per_task):
        if len(space) == options.per_task:
            break
        k = attempt % len(spaces)
        wanted = choose_steps(steps[k], options.states, rng)
        after = {steps[k][s]: s for s in wanted if s != FINAL}
        sch, programs = replayer.replay(tvm_insts[k], decide[k], after, seed=attempt + 1)
        if sch is None:
            continue
        taken = _decisions_of(sch.trace, sampling[k])
        fits = replayer.postprocess(sch)
        if fits is None or (k, taken.tobytes()) in seen:
            continue
        seen.add((k, taken.tobytes()))
        n = len(space)
        space.append(k)
        decisions.append(taken)
        valid.append(fits)
        states += [replayer.encode(programs[i]) for i in after] + [replayer.encode(sch.mod)]
        step += wanted
        states_of += [n] * len(wanted)
        if rng.random() < options.stores:
            (rows,) = extractor.extract_from(replayer.context, [ms.MeasureCandidate(sch, [])])
            stores.append(np.concatenate([rows.numpy().max(0), rows.numpy().sum(0)])[None])
            stores_of.append(n)
    if not space:
        raise RuntimeError("TVM refuses all of its random schedules")
    about = {name: getattr(task, name) for name in ("id", "name", "split", "networks", "mod")}
    return Trajectories(
        about, str(target), kind, cores, spaces, np.array(space, np.int16), decisions,
        np.array(valid), np.array(states_of, np.int32), np.array(step, np.int16), Programs.of(states),
        np.array(stores_of, np.int32), np.concatenate(stores).astype(np.float16),
    )  # fmt: skip


def _decisions_of(trace: Any, sampling: list[int]) -> np.ndarray:
    """The decisions a replay took, end to end: int32."""
    insts, decisions = trace.insts, trace.decisions
    values: list[int] = []
    for i in sampling:
        value = decisions[insts[i]]
        values += [int(v) for v in value] if hasattr(value, "__len__") else [int(value)]
    return np.array(values, np.int32)


def _key(target: Target) -> str:
    return hashlib.sha256(str(target).encode()).hexdigest()[:8]


def generate(
    tasks: Sequence[CorpusTask], target: Target, kind: str, cores: int, out: Path,
    options: GenerateOptions, processes: int = 1, deadline: float = float("inf"),
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
) -> int:  # fmt: skip
    """Write the trajectories of each task to a file of its own in `out`; files that are there stay.

    Every task has a process of its own: one that crashes, hangs or fails costs that task.

    Parameters
    ----------
    tasks : sequence of CorpusTask
    target : tvm.target.Target
    kind, cores, options
        As for `sample_task`.
    out : pathlib.Path
    processes : int
        Tasks at the same time.
    deadline : float
        `time.time` after which no task is started.
    say : callable
        Takes lines of progress.

    Returns
    -------
    int
        Trajectories of these tasks that are in `out` now.
    """
    out.mkdir(parents=True, exist_ok=True)
    setup_tvm(target)  # paid once: the processes below are forks
    context = multiprocessing.get_context("fork")
    paths = {task.id: out / f"{task.id}-{kind}-{_key(target)}.parquet" for task in tasks}
    todo = [task for task in tasks if not paths[task.id].exists()]
    running: dict[int, tuple[CorpusTask, ForkProcess]] = {}
    done, failed, began = len(tasks) - len(todo), 0, time.time()
    total = sum(pq.read_metadata(paths[t.id]).num_rows for t in tasks if paths[t.id].exists())
    said = began
    queue, known, spent = iter(todo), total, _cpu_s()

    def progress() -> None:
        each = (_cpu_s() - spent) / max(total - known, 1)
        say(
            f"{done}/{len(tasks)} tasks, {total} trajectories, {failed} tasks failed, "
            f"{time.time() - began:.0f} s, {1e3 * each:.0f} ms of CPU time each"
        )

    while True:
        while len(running) < processes and time.time() < deadline and (task := next(queue, None)) is not None:
            args = (task, target, kind, cores, options, paths[task.id])
            child = context.Process(target=_work, args=args, daemon=True)
            child.start()
            running[child.sentinel] = task, child
        if not running:
            break
        for sentinel in multiprocessing.connection.wait(list(running)):
            assert isinstance(sentinel, int)
            task, child = running.pop(sentinel)
            child.join()
            if child.exitcode == 0:
                done += 1
                total += pq.read_metadata(paths[task.id]).num_rows
            else:
                failed += 1
                if child.exitcode != 1:  # 1: the process has said why itself
                    say(f"warning: task {task.id} ({task.name}) is skipped: {_why(child.exitcode, options)}")
        if time.time() - said > PROGRESS_S:
            said = time.time()
            progress()
    progress()
    return total


def _cpu_s() -> float:
    """CPU seconds of the processes that have ended."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _why(code: int | None, options: GenerateOptions) -> str:
    if code == -signal.SIGXCPU:
        return f"not done within {options.cpu_s} s of CPU time"
    return f"its process ended with {code}"


def _work(
    task: CorpusTask, target: Target, kind: str, cores: int, options: GenerateOptions, path: Path
) -> None:
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    limit = int(used) + options.cpu_s
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    # TVM's C++ side writes warnings to the standard error.
    saved = os.dup(2)
    with Path(os.devnull).open("wb") as sink:
        os.dup2(sink.fileno(), 2)
    try:
        sample_task(task, target, kind, cores, options).write(path)
    except Exception as error:
        os.dup2(saved, 2)
        text = " ".join(str(error).split())[:300]
        print(f"warning: task {task.id} ({task.name}) is skipped: {text}", file=sys.stderr, flush=True)
        os._exit(1)
