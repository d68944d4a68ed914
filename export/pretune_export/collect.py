"""Measure schedules of many tasks: resumable, noise-checked, written as it goes.

The loop, per task: generate its design spaces, measure random candidates, then mutations of the best
seen so far (so that the good end is dense), or candidates a trained model proposes. A batch during which
the machine's speed moved is dropped and measured again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from pretune.errors import PretuneError
from pretune.measure import Pool
from pretune.measure.noise import MAX_DRIFT
from pretune.search.code_size import builds_for_minutes
from pretune.space import Candidate, TaskSpace
from pretune.vector_math import vectorise

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.measure.result import Measured
    from pretune_export.networks import CorpusTask

CHUNK = 64
"""Candidates between two calibrations, at most: so few take less than a minute."""

PATIENCE_S = 0.25
"""Seconds that each candidate may wait for a quiet machine, on average: a label is used many times."""

PENDING = "pending.jsonl"
"""Holds the rows of the batch that is being measured."""


def _say(text: str) -> None:
    print(text, flush=True)


@dataclass
class CollectOptions:
    """How many candidates to measure per task and how to choose them.

    Attributes
    ----------
    random : int
        Random candidates in the first batch of a task.
    mutated : int
        Mutations of the best in each later batch.
    rounds : int
        Batches after the first.
    elite : int
        How many of the best candidates are mutated.
    seed : int
    slow_factor : float
        A candidate this many times slower than the task's best is timed once only.
    serial : bool
        Time every candidate on one thread as well.
    """

    random: int = 24
    mutated: int = 12
    rounds: int = 2
    elite: int = 4
    seed: int = 0
    slow_factor: float = 8.0
    serial: bool = False


@dataclass
class Collector:
    """Measures tasks one by one and appends what it learns to ``out``.

    Parameters
    ----------
    target : tvm.target.Target
    out : pathlib.Path
        Folder; ``measured.jsonl`` gets a line per candidate, ``spaces.jsonl`` one per task, with the
        instructions of its design spaces.
    options : CollectOptions
    pool : Pool
    propose : callable, optional
        ``(task_space, n, rng) -> [(space, row), ...]``: candidates of a model, for every other round.
    say : callable
        Told about progress, a line at a time.

    Attributes
    ----------
    done : set of str
        Ids of the tasks that need no more.
    """

    target: Target
    out: Path
    options: CollectOptions
    pool: Pool
    propose: Callable[..., list[tuple[int, np.ndarray]]] | None = None
    say: Callable[[str], None] = _say
    done: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        for file in self.out.glob("*.jsonl"):
            if not file.read_bytes().endswith(b"\n"):  # Torn by a killed run: the next line is to be whole.
                with file.open("a") as end:
                    end.write("\n")
        for line in read_lines(self.out / "done.jsonl"):
            self.done.add(line["task"])
        if pending := list(read_lines(self.out / PENDING)):  # Of a run that was stopped in a batch.
            known = {_key(row) for row in read_lines(self.out / "measured.jsonl")}
            for row in pending:
                if _key(row) not in known:
                    self.append("measured.jsonl", row)
        (self.out / PENDING).unlink(missing_ok=True)

    def run(self, tasks: Sequence[CorpusTask], deadline: float = float("inf")) -> int:
        """Measure `tasks` until done or until `deadline` (``time.time()``); returns the number of candidates.

        Raises
        ------
        MeasureError
            If nothing can be measured at all. The task is then not taken as done.
        """
        count = 0
        for n, task in enumerate(tasks):
            if task.id in self.done:
                continue
            if time.time() > deadline:
                break
            started = time.time()
            try:
                measured = self.task(task)
            except PretuneError:
                raise  # A dead pool: every other task would fail too.
            except Exception as error:  # One task that TVM cannot handle costs one task.
                self.append("failed.jsonl", {"task": task.id, "error": repr(error)[:500]})
                measured = 0
            self.append("done.jsonl", {"task": task.id, "measured": measured})
            self.done.add(task.id)
            count += measured
            self.say(f"{n + 1}/{len(tasks)} {task.name[:48]} {measured} in {time.time() - started:.1f} s")
        return count

    def task(self, task: CorpusTask) -> int:
        """Measure one task; returns the number of candidates written."""
        options = self.options
        rng = np.random.default_rng([options.seed, int(task.id[:8], 16)])
        mod: Any = tvm.ir.load_json(task.mod)
        space = TaskSpace.generate(mod, self.target)
        if space.is_trivial:
            return 0
        self.append("spaces.jsonl", {"task": task.id, "spaces": [s.insts for s in space.spaces]})
        seen: dict[int, float] = {}
        elite: list[tuple[float, int, np.ndarray]] = []
        written = 0
        for round_ in range(1 + options.rounds):
            if round_ == 0:
                policy, wanted = "random", options.random
                rows = sample(space, 2 * wanted, rng)
            elif self.propose is not None and round_ % 2 == 1:
                policy, wanted = "model", options.mutated
                rows = self.propose(space, wanted, rng)
            else:
                policy, wanted = "mutation", options.mutated
                rows = mutate_elite(space, elite[: options.elite], 4 * wanted, rng)
            batch = materialise(space, rows, wanted, seen)
            if not batch:
                break
            best = min((e[0] for e in elite), default=None)
            results = self.measure(task.id, [c for c, _ in batch], [policy] * len(batch), best)
            for (candidate, row), result in zip(batch, results, strict=True):
                seen[candidate.shash] = result.latency
                if result.ok:
                    elite.append((result.latency, candidate.space, row))
            written += len(batch)
            elite.sort(key=lambda e: e[0])
        return written

    def measure(
        self, task: str, batch: Sequence[Candidate], policies: Sequence[str], best: float | None
    ) -> list[Measured]:
        """Measure candidates of a task, and append a row for each.

        Every `CHUNK` of them is measured between two calibrations. If the machine's speed moved meanwhile,
        those are measured again, up to twice. What a run that is killed has measured is taken over by the
        next one.

        Parameters
        ----------
        task : str
            Its id.
        batch : sequence of Candidate
        policies : sequence of str
            How each of them was chosen.
        best : float or None
            Best latency of the task so far, in seconds.
        """
        results: list[Measured] = []
        for at in range(0, len(batch), CHUNK):
            chunk = slice(at, at + CHUNK)
            results += self._chunk(task, batch[chunk], policies[chunk], best)
            fastest = min(result.latency for result in results)
            best = fastest if best is None else min(best, fastest)
        return results

    def _chunk(
        self, task: str, batch: Sequence[Candidate], policies: Sequence[str], best: float | None
    ) -> list[Measured]:
        # Until the batch is through, its rows say that the machine's speed has not moved: should the run be
        # killed, they are kept.
        def row(i: int, result: Measured) -> dict[str, Any]:
            return {
                "task": task,
                "space": batch[i].space,
                "decisions": [d.tolist() for d in batch[i].decisions],
                "ok": result.ok,
                "latencies": list(result.latencies),
                "serial_latencies": list(result.serial_latencies),
                "error_kind": result.error_kind,
                "build_s": round(result.build_s, 4),
                "device": result.device,
                "policy": policies[i],
                "calibration": [before, after],
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            }

        results: list[Measured] = []
        for attempt in range(3):
            (self.out / PENDING).unlink(missing_ok=True)
            before = after = self.pool.calibrate()
            results = self.pool.measure(
                [vectorise(c.mod, self.target) for c in batch],
                best=best,
                slow_factor=self.options.slow_factor,
                serial=self.options.serial,
                on_result=lambda i, result: self.append(PENDING, row(i, result)),
            )
            after = self.pool.calibrate()
            if abs(after / before - 1) <= MAX_DRIFT or attempt == 2:
                break
            self.say(f"calibration moved by {after / before - 1:+.0%}: {len(batch)} measured again")
        for i, result in enumerate(results):
            self.append("measured.jsonl", row(i, result))
        (self.out / PENDING).unlink(missing_ok=True)
        return results

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append a line to a file of the folder."""
        with (self.out / name).open("a") as file:
            file.write(json.dumps(row) + "\n")


def with_choice(
    tasks: Iterable[CorpusTask], target: Target, least: float, limit: int | None
) -> list[CorpusTask]:
    """The first tasks whose design spaces hold at least so many schedules, up to `limit` of them."""

    def size(task: CorpusTask) -> float:
        mod: Any = tvm.ir.load_json(task.mod)
        try:
            return TaskSpace.generate(mod, target).size
        except Exception:  # a schedule rule that does not fit; the type varies with TVM's version
            return 0

    return list(itertools.islice((task for task in tasks if size(task) >= least), limit))


def sample(space: TaskSpace, n: int, rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
    """Random candidates as (space, option indices), spread evenly over the design spaces."""
    out = []
    for i in range(n):
        k = i % len(space.spaces)
        out.append((k, space.spaces[k].sample(1, rng)[0]))
    return out


def mutate_elite(
    space: TaskSpace, elite: list[tuple[float, int, np.ndarray]], n: int, rng: np.random.Generator
) -> list[tuple[int, np.ndarray]]:
    """Mutations of the best candidates."""
    out = []
    for i in range(n if elite else 0):
        _latency, k, row = elite[i % len(elite)]
        out.append((k, space.spaces[k].mutate(row[None], rng)[0]))
    return out


def materialise(
    space: TaskSpace, rows: list[tuple[int, np.ndarray]], wanted: int, seen: dict[int, float]
) -> list[tuple[Candidate, np.ndarray]]:
    """Materialise up to `wanted` candidates whose programs are new."""
    batch: list[tuple[Candidate, np.ndarray]] = []
    hashes = set(seen)
    for k, row in rows:
        if len(batch) >= wanted:
            break
        candidate = space.materialise(k, row)
        if candidate is None or candidate.shash in hashes:
            continue
        if not builds_for_minutes(candidate.mod, space.target):
            hashes.add(candidate.shash)
            batch.append((candidate, row))
    return batch


def _key(row: dict[str, Any]) -> tuple[str, int, str]:
    """Which candidate a row is of."""
    return row["task"], row["space"], json.dumps(row["decisions"])


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a file that a `Collector` wrote; none if there is no file."""
    if not path.exists():
        return
    with path.open() as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):  # A torn last line of a killed run.
                yield json.loads(line)


def read_collected(
    folders: Sequence[Path], max_drift: float | None = None
) -> tuple[dict[str, list], list[dict[str, Any]]]:
    """Design spaces by task id, and rows, of one or more folders that a `Collector` wrote.

    Batches during which the machine's speed moved by more than `max_drift` (`MAX_DRIFT`) are left out. A run
    that was stopped in the middle of a task leaves rows that the next one measures again: of the same
    candidate, the last row is kept.
    """
    most = MAX_DRIFT if max_drift is None else max_drift
    spaces: dict[str, list] = {}
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for folder in folders:
        for line in read_lines(folder / "spaces.jsonl"):
            spaces[line["task"]] = line["spaces"]
        for row in read_lines(folder / "measured.jsonl"):
            if row["task"] in spaces and drift(row) <= most:
                rows[_key(row)] = row
    return spaces, list(rows.values())


def drift(row: dict[str, Any]) -> float:
    """By what share the machine's speed moved while a row of a `Collector` was measured."""
    before, after = row["calibration"]
    return abs(after / before - 1)


def serial_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the same candidates did on one thread, of rows that were timed so; failures stay failures."""
    if not any(row.get("serial_latencies") for row in rows):
        return []
    return [
        {**row, "latencies": row["serial_latencies"]}
        for row in rows
        if row.get("serial_latencies") or (not row["ok"] and "serial_latencies" in row)
    ]


def model_proposals(weights: Path, hardware: Any) -> Callable[..., list[tuple[int, np.ndarray]]]:
    """A `Collector.propose` that lets a model choose: its search's candidates, one in four at random."""
    from pretune.model import TaskScorer, WorldModel, load_weights
    from pretune.search import TaskSearch

    model = WorldModel(load_weights(weights), hardware.cores)

    def propose(space: TaskSpace, n: int, rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
        search = TaskSearch(space, TaskScorer(model, space, hardware), seed=int(rng.integers(1 << 31)))
        chosen = [(p.candidate.space, p.row) for p in search.propose(n - n // 4)]
        return chosen + sample(space, 2 * n, rng)

    return propose
