"""Choose the schedules of each task by what the base model knows and does not know, and measure them."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm

from pretune.errors import PretuneError, one_line
from pretune.model import TaskScorer
from pretune.search import TaskSearch
from pretune.space import Candidate, TaskSpace
from pretune_export.collect import Collector, materialise, mutate_elite, read_lines, sample
from pretune_export.networks import CorpusTask

if TYPE_CHECKING:
    from pretune.hardware import Hardware
    from pretune.model import WorldModel

BATCH = 8
"""Schedules of a task measured before the model is corrected by them: half of what most tasks have."""

RANDOM = 1 / 3
"""Share of a training task's schedules that is drawn at random, so that the bad end is known as well."""

ELITE = 4


class Chooser:
    """Chooses schedules of one task, and learns from their latencies.

    Of a training task, most are those of the product's own search: tens of thousands of random and evolved
    candidates are scored, and those taken whose expected speed and uncertainty under the posterior
    (`pretune.search.adapt`) are highest, apart from each other. That is where the base model is wrong at a
    cost. Of a held-out task they are random ones and mutations of the best: no model that is judged by them
    has chosen them.

    Parameters
    ----------
    space : TaskSpace
    scorer : TaskScorer or None
        None for a held-out task.
    rng : numpy.random.Generator
    """

    def __init__(self, space: TaskSpace, scorer: TaskScorer | None, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng
        self.search = TaskSearch(space, scorer, seed=int(rng.integers(1 << 31))) if scorer else None
        self._seen: dict[int, float] = {}
        self._elite: list[tuple[float, int, np.ndarray]] = []

    @property
    def best(self) -> float | None:
        """Best latency so far, in seconds."""
        return self._elite[0][0] if self._elite else None

    def choose(self, n: int) -> dict[str, list[Candidate]]:
        """Up to `n` candidates whose programs are new, by how they were chosen."""
        chosen: dict[str, list[Candidate]] = {}
        if self.search is not None:
            proposed = self.search.propose(n - round(RANDOM * n))
            chosen["model"] = [p.candidate for p in proposed if p.candidate.shash not in self._seen]
        elif self._elite:
            rows = mutate_elite(self.space, self._elite[:ELITE], 4 * n, self.rng)
            chosen["mutation"] = self._new(rows, n // 2, chosen)
        left = n - sum(map(len, chosen.values()))
        chosen["random"] = self._new(sample(self.space, 2 * left, self.rng), left, chosen)
        return {policy: batch for policy, batch in chosen.items() if batch}

    def learn(self, candidate: Candidate, latency: float) -> None:
        """Take in a measured candidate; seconds, infinite for one that failed."""
        self._seen[candidate.shash] = latency
        decisions = [d.tolist() for d in candidate.decisions]
        if self.search is not None:
            self.search.restore(candidate.space, decisions, latency)
        row = self.space.spaces[candidate.space].find(decisions)
        if row is not None and math.isfinite(latency):
            self._elite.append((latency, candidate.space, row))
            self._elite.sort(key=lambda item: item[0])

    def restore(self, line: dict[str, Any]) -> None:
        """Take in what an earlier run has measured: a line of a `Collector`."""
        row = self.space.spaces[line["space"]].find(line["decisions"])
        candidate = self.space.materialise(line["space"], row) if row is not None else None
        if candidate is not None:
            self.learn(candidate, min(line["latencies"], default=math.inf))

    def _new(
        self, rows: list[tuple[int, np.ndarray]], n: int, chosen: dict[str, list[Candidate]]
    ) -> list[Candidate]:
        taken = dict.fromkeys((c.shash for batch in chosen.values() for c in batch), math.inf)
        return [candidate for candidate, _row in materialise(self.space, rows, n, self._seen | taken)]


@dataclass
class Budget:
    """What may still be measured: a number of schedules, or until some moment."""

    trials: int | None = None
    until: float = math.inf

    def share(self, spent: int, tasks: int) -> Budget:
        """What one of the last so many tasks may have, where those before it had so many schedules."""
        if self.trials is not None:
            return Budget(max(0, math.ceil((self.trials - spent) / tasks)))
        now = time.time()
        return Budget(until=now + max(0.0, self.until - now) / tasks)

    def room(self, spent: int) -> int:
        """Schedules that the next batch may have."""
        if self.trials is not None:
            return max(0, min(BATCH, self.trials - spent))
        return BATCH if time.time() < self.until else 0


@dataclass
class Measurer:
    """Measures tasks one after the other, each with its share of what is left of the budget.

    A run that was stopped goes on where it was: neither a task nor a schedule is measured again.

    Attributes
    ----------
    on_batch : callable
        ``(tasks done, schedules measured, task's name)``, called after each batch.
    failed : list of str
        What TVM could not handle, a line for each task.
    total : int
        Schedules measured, in earlier runs too.
    """

    collector: Collector
    model: WorldModel
    hardware: Hardware
    seed: int
    on_batch: Callable[[int, int, str], None]
    failed: list[str] = field(default_factory=list)
    total: int = 0

    def run(self, tasks: Sequence[CorpusTask], budget: Budget) -> int:
        """Measure; returns the number of schedules that were measured, in earlier runs too.

        Raises
        ------
        MeasureError
            If nothing can be measured at all. The task is then not taken as done.
        """
        known: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in read_lines(self.collector.out / "measured.jsonl"):
            known[line["task"]].append(line)
        self.total = sum(map(len, known.values()))
        spent = 0
        for n, task in enumerate(tasks):
            own = known[task.id]
            share = budget.share(spent, len(tasks) - n)
            spent += len(own)
            if task.id in self.collector.done or not share.room(len(own)):
                continue  # It has its share, if it was killed just before it was done; or nothing is left.
            before = self.total
            try:
                self._task(n, task, own, share)
            except (PretuneError, OSError, MemoryError):
                raise  # A dead pool, a full disk: every other task would fail too.
            except Exception as error:  # One task that TVM cannot handle costs one task.
                self.failed.append(f"{task.name}: {one_line(error)}")
                self.collector.append("failed.jsonl", {"task": task.id, "error": repr(error)[:500]})
            spent += self.total - before
            self.collector.append("done.jsonl", {"task": task.id})
            self.collector.done.add(task.id)
        return self.total

    def _task(self, n: int, task: CorpusTask, known: list[dict[str, Any]], share: Budget) -> None:
        """Measure one task, of which some schedules are `known`."""
        mod: Any = tvm.ir.load_json(task.mod)
        space = TaskSpace.generate(mod, self.collector.target)
        if space.is_trivial:
            return
        self.collector.append("spaces.jsonl", {"task": task.id, "spaces": [s.insts for s in space.spaces]})
        scorer = TaskScorer(self.model, space, self.hardware) if task.split == "train" else None
        # A resumed search draws anew: what it drew before is known, and would only be skipped.
        chooser = Chooser(space, scorer, np.random.default_rng([self.seed, int(task.id[:8], 16), len(known)]))
        for line in known:
            chooser.restore(line)
        count = len(known)
        while room := share.room(count):
            chosen = chooser.choose(room)
            if not chosen:
                break  # Every schedule of a small design space has been measured.
            batch = [candidate for some in chosen.values() for candidate in some]
            policies = [policy for policy, some in chosen.items() for _candidate in some]
            results = self.collector.measure(task.id, batch, policies, chooser.best)
            for candidate, result in zip(batch, results, strict=True):
                chooser.learn(candidate, result.latency)
            count += len(batch)
            self.total += len(batch)
            self.on_batch(n, self.total, task.name)
