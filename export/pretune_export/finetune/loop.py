"""The run: plan, measure, train, export, judge, register. Each phase finds what it has done on disk."""

from __future__ import annotations

import contextlib
import json
import math
import re
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretune import env
from pretune.bench.common import Bench
from pretune.compat import setup_tvm
from pretune.errors import EnvironmentFaultError, MeasureError, OptionError, PretuneError
from pretune.finetuning import FineTuneProgress, FineTuneResult
from pretune.hardware import Hardware, detect, hardware_for_target, make_target
from pretune.hardware.target import check_runs_here
from pretune.measure import Pool, RPCAddress, open_pool
from pretune.measure.noise import MAX_DRIFT
from pretune.messages import explain_os_errors, notice
from pretune.model import WorldModel, load_weights
from pretune.records import RunFolder
from pretune.records.folder import write_atomic
from pretune_export.collect import PATIENCE_S, CollectOptions, Collector, drift, read_collected, read_lines
from pretune_export.config import TrainConfig
from pretune_export.dataset import describe_machine, write_parquet
from pretune_export.finetune.judge import SEARCH_TASKS, better, rank_held_out, search_held_out
from pretune_export.finetune.measure import Budget, Measurer
from pretune_export.finetune.plan import MEASURE, TRAIN, Plan, Settings, fine_tuning, make_plan
from pretune_export.finetune.register import export, finish, name_of, register, used_by, withdraw
from pretune_export.networks import CorpusTask
from pretune_export.quality import ENOUGH
from pretune_export.train import run_key, train

if TYPE_CHECKING:
    from tvm.target import Target

Report = Callable[[FineTuneProgress], None]

BUILD_TIMEOUT, RUN_TIMEOUT = 8.0, 8.0
"""Seconds that a candidate may take to build, and to be timed."""


def run(
    programs: Sequence[Any],
    *,
    target: Any,
    shapes: Mapping[str, Sequence[int]] | None,
    trials: int | None,
    seconds: float | None,
    base: str,
    out: Path,
    search: bool,
    seed: int,
    rpc: RPCAddress | None,
    on_progress: Report,
) -> FineTuneResult:
    """`pretune.finetune`, once its options have been read."""
    machine = detect()
    made = make_target(target, machine)
    if rpc is None:
        check_runs_here(made, machine)
    hardware = hardware_for_target(made, machine, here=rpc is None)
    setup_tvm(made)
    names = tuple(str(p) if isinstance(p, str | Path) else type(p).__name__ for p in programs)
    settings = Settings(
        target=str(made), farm=rpc is not None, inputs=names, trials=trials, seconds=seconds, base=base,
        seed=seed, shapes={name: tuple(map(int, shape)) for name, shape in (shapes or {}).items()},
    )  # fmt: skip
    with RunFolder(out) as folder:
        measured = folder.path / "collected" / "measured.jsonl"
        with _explain(folder.path, measured):
            plan, tasks = make_plan(
                folder.path, settings, made, hardware, programs=programs,
                say=lambda text: on_progress(FineTuneProgress("planning", text=text, message=True)),
            )  # fmt: skip
            earlier = folder.read_result()
            if "kept" in earlier and (earlier["search"] is not None or not search):
                return FineTuneResult.from_dict(earlier)
            result = _Run(folder.path, plan, tasks, made, machine, hardware, rpc, on_progress).all(search)
            if not result.kept and earlier.get("registered"):
                result.notices.append(withdraw(Path(earlier["registered"]), result.weights))
            folder.write_result(result.to_dict())
            return result


@contextlib.contextmanager
def _explain(out: Path, measured: Path) -> Iterator[None]:
    """Whatever ends the run, say what is kept."""
    try:
        with explain_os_errors(out):
            yield
    except KeyboardInterrupt:
        notice(_kept(measured))
        raise
    except MeasureError as error:
        raise MeasureError(f"{error}; {_kept(measured)}") from error
    except PretuneError:
        raise
    except (MemoryError, RuntimeError) as error:
        # torch's have no type of their own.
        if isinstance(error, RuntimeError) and not re.search("(can't allocate|out of) memory", str(error)):
            raise
        raise EnvironmentFaultError(f"out of memory; {_kept(measured)}") from error


def _kept(measured: Path) -> str:
    count = sum(1 for _ in read_lines(measured))
    return f"{measured} keeps the {count} schedules measured so far; the same command resumes"


class _Clock:
    """Seconds by phase, of all runs into a folder; on disk after every step, since a run may be killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
        self._phase, self._since = "", time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase, self._since = name, time.monotonic()
        try:
            yield
        finally:
            self.tick()

    def tick(self) -> None:
        now = time.monotonic()
        spent = self.seconds.get(self._phase, 0.0) + now - self._since
        self.seconds[self._phase], self._since = round(spent, 2), now
        write_atomic(self._path, self.seconds)


@dataclass
class _Run:
    """What the phases share."""

    out: Path
    plan: Plan
    tasks: list[CorpusTask]
    target: Target
    machine: Hardware
    hardware: Hardware
    rpc: RPCAddress | None
    report: Report

    def __post_init__(self) -> None:
        self.clock = _Clock(self.out / "clock.json")
        self.notices: list[str] = []
        self.base, self.weights = self.out / "base", self.out / "weights"
        self.training = self.out / "training"

    def all(self, search: bool) -> FineTuneResult:
        """All phases."""
        with self.clock.phase("measuring"):
            schedules = self._measure()
        config = self._config()
        with self.clock.phase("training"):
            self._train(config)
        with self.clock.phase("judging"):
            rankings = self._rank(config)
            quality = rankings["after"]["mean"]
            export(config, self.training, self.weights, name_of(self.hardware), quality)
        found = None
        if search:
            with self.clock.phase("searching"):
                found = self._search()
        with self.clock.phase("judging"):
            kept, why = better(rankings, found)
            self._finish(rankings, found, schedules)
            registered, use = None, ""
            if kept:
                registered = register(self.weights, name_of(self.hardware))
                use = used_by(registered, self.hardware, self._options())
        memory = {
            name: round(resource.getrusage(who).ru_maxrss / 1024)
            for name, who in (("own", resource.RUSAGE_SELF), ("child", resource.RUSAGE_CHILDREN))
        }
        return FineTuneResult(
            kept, why, self.weights, registered, self.plan.base_name, str(self.target),
            rankings["before"]["mean"], rankings["after"]["mean"], found, schedules,
            dict(Counter(task.split for task in self.tasks)), self.clock.seconds, memory, self.notices, use,
        )  # fmt: skip

    def _options(self) -> list[str]:
        """Options of ``pretune tune`` without which it tunes for other hardware than this run."""
        options = ["--rpc-tracker"] if self.rpc else []
        if str(self.target) != str(make_target(None, self.machine)):
            options.insert(0, "--target")
        return options

    def _left(self, share: float, *phases: str) -> float:
        """``time.time()`` when a share of the budget of time is used up by some phases."""
        if self.plan.settings.seconds is None:
            return math.inf
        spent = sum(self.clock.seconds.get(phase, 0.0) for phase in phases)
        return time.time() + share * self.plan.settings.seconds - spent

    def _measure(self) -> int:
        """Measure, and write the datasets; returns how many schedules there are."""
        done = self.out / "measured.json"
        if done.exists():
            found = json.loads(done.read_text())
            self.notices += found["notices"]
            return found["schedules"]
        first: tuple[float, int] | None = None
        trials = self.plan.settings.trials
        until = self._left(MEASURE, "measuring")

        def on_batch(index: int, count: int, name: str) -> None:
            nonlocal first
            self.clock.tick()
            now = time.monotonic()
            # After earlier runs, and after the first batch, which waits for workers.
            first = first or (now, count)
            left = until - time.time() if trials is None else math.nan
            if trials is not None and count > first[1]:
                left = (now - first[0]) / (count - first[1]) * (trials - count)
            text = f"{count}{f'/{trials}' if trials else ''} schedules  {name}"
            self.report(FineTuneProgress("measuring", index, len(self.tasks), text, left))

        model = WorldModel(load_weights(self.base), env.num_threads() or self.machine.cores)
        with self._pool() as pool:
            # That a batch is measured again need not be told: `_write_datasets` counts what stays suspect.
            collector = Collector(
                self.target, self.out / "collected", CollectOptions(), pool, say=lambda _text: None
            )
            self.report(FineTuneProgress("measuring", len(collector.done), len(self.tasks)))
            measurer = Measurer(collector, model, self.hardware, self.plan.settings.seed, on_batch)
            count = measurer.run(self.tasks, Budget(trials, until))
        self.notices += measurer.failed
        if len(measurer.failed) == len(self.tasks):
            raise MeasureError(
                f"no task could be measured; the first of {len(self.tasks)}: {measurer.failed[0]}"
            )
        self._write_datasets(collector.out)
        write_atomic(done, {"schedules": count, "notices": self.notices})
        return count

    def _pool(self) -> Pool:
        return open_pool(
            self.target, self.rpc, build_timeout=BUILD_TIMEOUT, run_timeout=RUN_TIMEOUT, patience=PATIENCE_S
        )

    def _write_datasets(self, collected: Path) -> None:
        # What was still suspect after three attempts is kept: dropping it may leave a task with nothing.
        spaces, rows = read_collected([collected], max_drift=math.inf)
        steady = sum(drift(row) <= MAX_DRIFT for row in rows)
        if steady < len(rows):
            self.notices.append(
                f"{len(rows) - steady} of {len(rows)} schedules were timed while the machine's speed moved; "
                "stop what else runs, and fine-tune anew, if the result is not good"
            )
        days = {row["time"][:10] for row in rows}
        name = f"{self.hardware.microarch}-{self.hardware.cores}"
        described = describe_machine(self.hardware, name=name, target=str(self.target), days=days)
        for folder, splits in (("dataset", ("train", "validation")), ("dataset-test", ("test",))):
            tasks = [task for task in self.tasks if task.split in splits]
            known = {task.id for task in tasks}
            own = [row for row in rows if row["task"] in known]
            measured = Counter(row["task"] for row in own)
            ran = Counter(row["task"] for row in own if row["ok"])
            for split in splits:
                mine = [task.id for task in tasks if task.split == split]
                if not any(measured[task] >= ENOUGH and ran[task] > 1 for task in mine):
                    raise OptionError(
                        f"no {split} task has {ENOUGH} measured schedules; the same command with a larger "
                        "--trials or --budget goes on from what was measured"
                    )
            write_parquet(self.out / folder, tasks, spaces, own, described)

    def _config(self) -> TrainConfig:
        return fine_tuning(
            self.base,
            datasets=[str(self.out / "dataset")],
            test_datasets=[str(self.out / "dataset-test")],
            seed=self.plan.settings.seed,
            threads=env.num_threads() or self.machine.cores,
        )

    def _train(self, config: TrainConfig) -> None:
        """Train, once: were it to go on after time was up, what was exported would not be its best."""
        done, key = self.training / "done.json", run_key(config)
        if done.exists() and json.loads(done.read_bytes()).get("key") == key:
            return
        shutil.rmtree(self.weights, ignore_errors=True)  # of another pretune, which trained otherwise
        deadline = self._left(TRAIN, "training")
        self.report(FineTuneProgress("training", text="reading what was measured"))
        now = best = -1.0
        first: tuple[int, float] | None = None  # epochs of earlier runs, and when this one began

        def on_epoch(line: dict[str, Any]) -> None:
            nonlocal now, best, first
            self.clock.tick()
            epoch = line["epoch"]
            first = first or (epoch - 1, time.time() - line["seconds"])
            each = (time.time() - first[1]) / (epoch - first[0])
            left = min(each * (line["epochs"] - epoch), deadline - time.time())
            text = f"loss {line['rank']:.3f}"
            if "validation_top1" in line:
                now = line["validation_top1"]
                best = max(best, now)
            if now >= 0:
                text += f"  validation top-1 {now:.3f} (best {best:.3f})"
            self.report(FineTuneProgress("training", epoch, line["epochs"], text, left))

        self.training.mkdir(exist_ok=True)
        with self._quiet():
            found = train(
                config,
                self.training,
                cache=self.training / "encoded.pickle",
                deadline=deadline,
                on_epoch=on_epoch,
            )
        write_atomic(done, {**found, "key": key})

    def _rank(self, config: TrainConfig) -> dict[str, Any]:
        self.report(FineTuneProgress("judging", text="ranking the held-out tasks"))
        with self._quiet():
            found = rank_held_out(config, self.training, self.base)
        change = " -> ".join(f"{found[name]['mean']['top1']:.3f}" for name in ("before", "after"))
        self.report(FineTuneProgress("judging", text=f"held-out top-1 {change}", message=True))
        return found

    def _search(self) -> dict[str, Any] | None:
        threads = env.num_threads() or self.machine.cores
        before, after = (
            Bench(self.machine, self.target, self.hardware, threads, weights, WorldModel(weights, threads))
            for weights in (load_weights(self.base), load_weights(self.weights))
        )
        with self._pool() as pool:
            found = search_held_out(
                [task for task in self.tasks if task.split == "test"],
                before,
                after,
                pool,
                self.out / "search",
                seed=self.plan.settings.seed,
                until=self._left(1.0, *self.clock.seconds),
                on_task=lambda n, name: self.report(FineTuneProgress("searching", n, SEARCH_TASKS, name)),
            )
        if found is None:
            self.notices.append("no short search: no time was left, or no held-out task gave latencies")
        return found

    def _finish(self, rankings: dict[str, Any], search: dict[str, Any] | None, schedules: int) -> None:
        """Write card and manifest."""
        plan = self.plan
        provenance = json.loads((self.weights / "manifest.json").read_text())["provenance"]
        budget = f"--trials {plan.settings.trials}"
        if plan.settings.seconds is not None:
            budget = f"--budget {plan.settings.seconds:.0f}s"
        provenance["command"] = f"pretune finetune {budget}"
        provenance["fine_tuned"] = {
            "base": plan.base_name,
            "base_repo": plan.base_repo,
            "schedules": schedules,
            "tasks": dict(Counter(task.split for task in self.tasks)),
            "before": rankings["before"]["mean"],
            "search": {k: v for k, v in search.items() if k != "rows"} if search else None,
        }
        finish(self.weights, rankings["after"], provenance)

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """What training prints goes to a file: the progress says what matters."""
        with (self.training / "output.log").open("a") as log, contextlib.redirect_stdout(log):
            yield
