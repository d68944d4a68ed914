"""What a fine-tuning run is about: its settings, the weights it starts from, its tasks and their splits."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pretune import env
from pretune.errors import InputError, OptionError, WeightsError
from pretune.hub.sources import consider, find_weights, load_offer, offers_here, parse_repo
from pretune.intake import load_program
from pretune.intake.task import sort_tasks
from pretune.model.weights import installed_software, misfits, shipped_folder
from pretune.records.folder import write_atomic
from pretune_export.config import TrainConfig
from pretune_export.dataset import read_tasks
from pretune_export.finetune.register import withdraw
from pretune_export.networks import CorpusTask, load_corpus
from pretune_export.networks.corpus import corpus_task, join, pick, write_corpus

if TYPE_CHECKING:
    from tvm.target import Target

    from pretune.hardware import Hardware
    from pretune.hub.sources import Considered, Offer
    from pretune.intake import Task
    from pretune.model import Weights
    from pretune.model.weights import Config

HELD_OUT, VALIDATION = 0.2, 0.1
"""Shares of the tasks that judge the result, and that choose the epoch."""

FEWEST_TASKS = 3
"""One to train on, one to choose the epoch by, one to judge by."""

SCHEDULES = 16
"""Measured of a task at least: more tasks are worth more than more schedules of each."""

TRIALS_PER_S = 2.0
"""Guess at what is measured a second, by which a budget of time is turned into a number of tasks."""

MEASURE, TRAIN = 0.6, 0.3
"""Shares of a budget of time. What is left is for exporting and judging."""

ENOUGH_NETWORKS = 5
"""With so many, whole networks are held out; with fewer, tasks of each."""

FINE_TUNING: dict[str, Any] = {
    "epochs": 16,
    "least_steps": 200,
    "tasks_per_batch": 8,
    "candidates_per_task": 40,
    "learning_rate": 5e-4,
    "weight_decay": 3e-2,
    "regression": 1.0,
    # The decoder of the base weights is not kept, and a new one would only shake the encoder.
    "decode": 0.0,
    "average": 0.95,
    "base_share": 0.5,
    "states_per_candidate": 1,
    "candidates_with_states": 10,
    "validate_every": 1,
}
"""How training differs from that of the base weights: gentle, and over soon."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a run into a folder is asked for; the same again resumes it.

    Attributes
    ----------
    target : str
        As JSON.
    farm : bool
        Whether devices of a farm measure, and not this machine.
    inputs : tuple of str
        Programs whose tasks are measured; none: a spread of the shipped datasets.
    shapes : dict of str to tuple of int
        Shapes of inputs with dynamic dimensions.
    trials : int or None
        Schedules to measure in all, training and held-out tasks together.
    seconds : float or None
        Time for everything, in place of `trials`.
    base : str
        The weights that were asked for; empty: the nearest.
    """

    target: str
    farm: bool = False
    inputs: tuple[str, ...] = ()
    shapes: dict[str, tuple[int, ...]] = {}
    trials: int | None = None
    seconds: float | None = None
    base: str = ""
    seed: int = 0

    def less_than(self, other: Settings) -> bool:
        """Whether the other has a larger budget of the same kind."""
        ours, theirs = (s.trials or s.seconds or 0 for s in (self, other))
        return (self.trials is None) == (other.trials is None) and ours < theirs

    @property
    def expected(self) -> int:
        """Schedules to plan for."""
        return self.trials or int((self.seconds or 0) * MEASURE * TRIALS_PER_S)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What ``plan.json`` holds; the base weights are in ``base/`` beside it, the tasks in ``tasks.jsonl.gz``.

    Attributes
    ----------
    base_name, base_why : str
        The weights, and why these.
    base_repo : str
        Where they are on the hub, as far as that is known.
    digests : tuple of str
        The `digest` of each program, since what `Settings.inputs` names may change.
    """

    settings: Settings
    base_name: str
    base_why: str
    base_repo: str
    digests: tuple[str, ...] = ()


def make_plan(
    folder: Path,
    settings: Settings,
    target: Target,
    hardware: Hardware,
    *,
    programs: Sequence[Any],
    say: Callable[[str], None],
) -> tuple[Plan, list[CorpusTask]]:
    """Plan a run, or read the plan of the run that is to be resumed.

    Parameters
    ----------
    folder : pathlib.Path
        Of the run.
    programs : sequence
        What `settings.inputs` names; see `pretune.intake.load_program`.
    say : callable
        Told what was decided.

    Raises
    ------
    OptionError
        If the folder holds a run with other settings or programs, or there are too few tasks or trials.
    WeightsError
        If there is no base to start from.
    """
    file, tasks_file = folder / "plan.json", folder / "tasks.jsonl.gz"
    if file.exists():
        plan = msgspec.json.decode(file.read_bytes(), type=Plan)
        more = plan.settings.less_than(settings)
        budget = {"trials": settings.trials, "seconds": settings.seconds} if more else {}
        plan = msgspec.structs.replace(plan, settings=msgspec.structs.replace(plan.settings, **budget))
        different = _differences(plan.settings, settings)
        if not different:
            loaded = load_tasks(programs, target, settings.shapes)
            pairs = zip(settings.inputs, plan.digests, loaded, strict=False)
            different = [f"{name} had other tasks" for name, old, one in pairs if digest(one) != old]
        if different:
            raise OptionError(
                f"{folder} holds a run with other settings ({', '.join(different)}); "
                "give the same to resume it, or another folder with --out"
            )
        if more:
            say(
                "the budget is larger than before: more schedules of the same tasks are measured; "
                f"what came of those so far is in {folder / 'earlier'}"
            )
            _put_away(folder, say)
            write_atomic(file, msgspec.to_builtins(plan))
        return plan, list(load_corpus(tasks_file))
    if settings.expected < FEWEST_TASKS * SCHEDULES:
        raise OptionError(
            f"{settings.expected} schedules are too few to fine-tune on; give at least "
            f"--trials {FEWEST_TASKS * SCHEDULES}, or a longer --budget"
        )
    loaded = load_tasks(programs, target, settings.shapes)
    base = choose_base(hardware, settings.base)
    say(f"starting from {base.weights.config.name} ({base.why})")
    if loaded:
        tasks = split(limit(tasks_of_programs(loaded, target), settings, say))
    else:
        tasks = spread(dataset_tasks(base.weights.path), settings.expected)
    check_tasks(tasks)
    copy = folder / "base"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(base.weights.path, copy)
    write_corpus(tasks_file, in_turn(tasks, settings.seed))
    plan = Plan(
        settings=settings, base_name=base.weights.config.name, base_why=base.why, base_repo=base.repo,
        digests=tuple(map(digest, loaded)),
    )  # fmt: skip
    write_atomic(file, msgspec.to_builtins(plan))
    return plan, list(load_corpus(tasks_file))


def _put_away(folder: Path, say: Callable[[str], None]) -> None:
    """Put away what came of the measurements so far: it is made anew of these and of more."""
    result = folder / "result.json"
    if result.exists() and (registered := json.loads(result.read_bytes()).get("registered")):
        say(withdraw(Path(registered), folder / "weights"))
    clock = folder / "clock.json"
    if clock.exists():
        spent = json.loads(clock.read_bytes())
        write_atomic(clock, {phase: spent[phase] for phase in spent if phase == "measuring"})
    earlier = folder / "earlier"
    if result.exists():  # if not, what is there is of a run that was killed in here
        shutil.rmtree(earlier, ignore_errors=True)
    earlier.mkdir(exist_ok=True)
    for name in ("result.json", "weights"):
        if (folder / name).exists():
            (folder / name).rename(earlier / name)
    for name in ("measured.json", "collected/done.jsonl"):
        (folder / name).unlink(missing_ok=True)
    for name in ("training", "search"):
        shutil.rmtree(folder / name, ignore_errors=True)


def fine_tuning(base: Path, **about: Any) -> TrainConfig:
    """The configuration that fine-tunes the weights in a folder; `about` are other fields of it."""
    return TrainConfig(**{**FINE_TUNING, "base": str(base), **about})


def _differences(before: Settings, now: Settings) -> list[str]:
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(now)
    return [f"{name}: {old[name]}" for name in old if old[name] != new[name]]


# -- base ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Base:
    """Weights to start from, why these, and their repository on the hub."""

    weights: Weights
    why: str
    repo: str


def choose_base(hardware: Hardware, explicit: str = "") -> Base:
    """Choose the weights to start from.

    Parameters
    ----------
    hardware : Hardware
        As the target restricts it.
    explicit : str
        A folder, the name of a target, or a repository as ``ORG/NAME[@REVISION]``. Without one, the weights
        that cover the hardware best are taken; if none do, the nearest: what they know of programs and
        schedules holds elsewhere too, and the ranker has the hardware vector to tell machines apart.

    Raises
    ------
    WeightsError
        If there are none, or those given are unusable.
    """
    offers = [offer for offer in offers_here() if offer.config is not None]
    if explicit and (Path(explicit).is_dir() or "/" in explicit):
        weights = find_weights(hardware, explicit)
        repo = _repo_of_folder(weights.path) if Path(explicit).is_dir() else parse_repo(explicit)[0]
        return Base(weights, "asked for", repo)
    if explicit:
        for offer in offers:
            if offer.name == explicit:
                return Base(load_offer(offer, "asked for"), "asked for", _repo(offer))
        raise WeightsError(
            f"--base {explicit}: no folder, and no weights of that name are on this machine; "
            "see: pretune hub ls, and: pretune hub pull"
        )
    software = installed_software()
    usable = [item for item in consider(hardware, offers) if not misfits(config_of(item), software)]
    # The best first; but of another kind of machine, only if there are no others.
    usable.sort(key=lambda item: config_of(item).covers.kind != hardware.kind)
    if not usable:
        raise WeightsError(
            "no weights to start from on this machine; pull some (pretune hub ls, pretune hub pull)"
        )
    offer, why = usable[0].offer, usable[0].verdict.described
    return Base(load_offer(offer, why), why, _repo(offer))


def config_of(item: Considered) -> Config:
    """Configuration of weights that can be read."""
    assert item.offer.config is not None
    return item.offer.config


def _repo(offer: Offer) -> str:
    """The repository of weights; of a user's own, that of the weights which those were fine-tuned from."""
    return offer.repo or _repo_of_folder(offer.path)


def _repo_of_folder(folder: Path) -> str:
    """The repository that a folder of weights belongs to or descends from; empty if nobody published it."""
    shipped = shipped_folder()
    if shipped is not None and folder.resolve().parent == shipped.resolve():
        return f"{env.hub_org()}/{folder.name}"
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        return str(manifest["provenance"]["fine_tuned"]["base_repo"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


# -- tasks ---------------------------------------------------------------------------------------------------


Named = tuple[str, tuple["Task", ...]]
"""A program's name and its tasks."""


def load_tasks(sources: Iterable[Any], target: Target, shapes: Mapping[str, Sequence[int]]) -> list[Named]:
    """Name and tasks of each program, as `pretune.intake.load_program` reads them; its tensors are let go."""
    programs = (load_program(source, target=target, shapes=shapes) for source in sources)
    return [(program.name, program.tasks) for program in programs]


def digest(program: Named) -> str:
    """Of a program's tasks, which other values of its weights do not change."""
    ids = sorted(task.task_id for task in program[1])
    return hashlib.sha256(" ".join(ids).encode()).hexdigest()[:16]


def tasks_of_programs(programs: Iterable[Named], target: Target) -> list[CorpusTask]:
    """Tasks of programs that have something to decide, heaviest first; a program is a network."""
    tasks: dict[str, Task] = {}
    lines: dict[str, CorpusTask] = {}
    for name, members in programs:
        for task in members:
            line = corpus_task(task, name, "train", target)
            if line.decisions > 0:
                tasks[line.id] = task
                lines[line.id] = join(lines.get(line.id), line, name, "train")
    return [lines[task.task_id] for task in sort_tasks(tasks.values())]


def dataset_tasks(base: Path) -> list[CorpusTask]:
    """Tasks of the datasets that came with pretune, or lie beside the base weights.

    Raises
    ------
    InputError
        If there are none.
    """
    shipped = shipped_folder()
    folders = [folder / "datasets" for folder in (shipped, base.parent) if folder is not None]
    found: dict[str, CorpusTask] = {}
    for file in sorted({file for folder in folders for file in folder.glob("*/tasks.parquet")}):
        for name, row in read_tasks(file.parent).items():
            line = msgspec.convert(
                {**row, "id": name, "weight": sum(row["weights"]), "decisions": -1}
                | {"shapes": json.loads(row["shapes"])},
                CorpusTask,
            )
            # What one dataset holds out is held out.
            if name not in found or SPLITS.index(line.split) > SPLITS.index(found[name].split):
                found[name] = line
    if not found:
        raise InputError(
            "no datasets come with this installation, so there are no tasks to choose from; name programs of "
            "yours: pretune finetune --tasks model.onnx"
        )
    return list(found.values())


SPLITS = ("train", "validation", "test")


def limit(tasks: list[CorpusTask], settings: Settings, say: Callable[[str], None]) -> list[CorpusTask]:
    """As many of the tasks, heaviest first, as the budget is enough for."""
    most = settings.expected // SCHEDULES
    if len(tasks) <= most:
        return tasks
    say(f"the budget is enough for the {most} heaviest of {len(tasks)} tasks")
    return tasks[:most]


def counts(total: int) -> tuple[int, int]:
    """How many of so many are for validation and for the test."""
    test = max(2 if total >= 6 else 1, round(HELD_OUT * total))
    return max(1, round(VALIDATION * total)), test


def split(tasks: list[CorpusTask]) -> list[CorpusTask]:
    """Set tasks aside for validation and for the test: those of whole networks, where there are enough.

    What is held out depends on names alone, so a second run over the same tasks, which may start from the
    weights of the first, holds out the same.
    """
    networks = {network for task in tasks for network in task.networks}
    if len(networks) >= ENOUGH_NETWORKS:
        role = _roles(networks)
        # A task that several networks have is held out only if all of them are.
        found = [min((role[network] for network in task.networks), key=SPLITS.index) for task in tasks]
        if {*found} == {*SPLITS}:
            return _with_splits(tasks, found)
    role = _roles(task.id for task in tasks)
    return _with_splits(tasks, [role[task.id] for task in tasks])


def _roles(names: Iterable[str]) -> dict[str, str]:
    order = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    validation, test = counts(len(order))
    return {
        name: "test" if i < test else "validation" if i < test + validation else "train"
        for i, name in enumerate(order)
    }


def _with_splits(tasks: list[CorpusTask], splits: list[str]) -> list[CorpusTask]:
    return [msgspec.structs.replace(t, split=name) for t, name in zip(tasks, splits, strict=True)]


def spread(tasks: list[CorpusTask], schedules: int) -> list[CorpusTask]:
    """A mixed choice of the datasets' tasks, in their own splits: the base has not seen the held-out ones."""
    if "test" not in {task.split for task in tasks}:
        tasks = split(tasks)
    total = min(len(tasks), max(FEWEST_TASKS, schedules // SCHEDULES))
    validation, test = counts(total)
    wanted = {"train": total - validation - test, "validation": validation, "test": test}
    return [
        task
        for name, count in wanted.items()
        for task in pick([task for task in tasks if task.split == name], count)
    ]


def in_turn(tasks: list[CorpusTask], seed: int) -> list[CorpusTask]:
    """The order to measure in: wherever it ends, each split has its share."""
    order = random.Random(seed)
    place: dict[str, float] = {}
    for name in SPLITS:
        own = [task.id for task in tasks if task.split == name]
        order.shuffle(own)
        place |= {task: (i + 0.5) / len(own) for i, task in enumerate(own)}
    return sorted(tasks, key=lambda task: (place[task.id], task.id))


def check_tasks(tasks: list[CorpusTask]) -> None:
    """Check that there is something to train on, to choose by and to judge by.

    Raises
    ------
    OptionError
        If not.
    """
    if missing := [name for name in SPLITS if not any(task.split == name for task in tasks)]:
        raise OptionError(
            f"{len(tasks)} tasks to tune leave none for the {missing[0]} split, and at least {FEWEST_TASKS} "
            "are needed; name more programs with --tasks, or leave it out for the shipped ones"
        )
