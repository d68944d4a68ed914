"""Measured datasets as a training run holds them: encoded once, in worker processes, and cached."""

from __future__ import annotations

import hashlib
import json
import pickle
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretune.errors import OptionError
from pretune.features.schema import SCHEMA_VERSION
from pretune_export.config import TrainConfig
from pretune_export.dataset import TaskData, dataset_files, group_candidates, read_parquet
from pretune_export.processes import map_in_processes
from pretune_export.trajectories import Replayer, choose_steps


@dataclass
class Machine:
    """A machine that measured: its hardware vector, cores and instruction set level."""

    vector: np.ndarray
    cores: int
    isa_level: str


@dataclass
class Data:
    """Encoded data: tasks by split, machines by name."""

    train: list[TaskData] = field(default_factory=list)
    validation: list[TaskData] = field(default_factory=list)
    test: list[TaskData] = field(default_factory=list)
    machines: dict[str, Machine] = field(default_factory=dict)


def machine_key(folder: str | Path, name: str) -> str:
    """A machine in a dataset: the same one measures for several targets, each in a dataset of its own."""
    return f"{Path(folder).name}/{name}"


ENCODED_BY = ("seed", "states_per_candidate", "candidates_with_states")
"""What of a configuration the encoded data depends on, beside the datasets."""

ENCODING = 2
"""Changes whenever the same datasets are encoded another way."""


def data_key(config: TrainConfig, datasets: Sequence[str]) -> str:
    """Hash of all that encoded datasets depend on: their files, and how real states are chosen."""
    settings = {name: getattr(config, name) for name in ENCODED_BY}
    digest = hashlib.sha256(json.dumps([settings, SCHEMA_VERSION, ENCODING]).encode())
    for folder in datasets:
        for file in dataset_files(Path(folder)):
            name = file.relative_to(folder).as_posix()
            digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def _prepare(job: tuple[dict, list, dict[str, list[dict]], dict[str, dict], TrainConfig]) -> list[TaskData]:
    """Encode one task's candidates and read real states of some of them. Runs in a worker process."""
    task, spaces, by_machine, machines, config = job
    import tvm

    out = []
    for machine, rows in by_machine.items():
        target = tvm.target.Target(json.loads(machines[machine]["target"]))
        cores = int(machines[machine]["cores"])
        data = group_candidates(task, spaces, rows, machine, cores)
        rng = np.random.default_rng([config.seed, int(task["id"][:8], 16)])
        if config.candidates_with_states:
            mod: Any = tvm.ir.load_json(task["mod"])
            replayer = Replayer(mod, target, cores)
            everyone = [
                (g, i) for g in data.groups for i in range(len(g.latency)) if np.isfinite(g.latency[i])
            ]
            picked = rng.permutation(len(everyone))[: config.candidates_with_states]
            for g, i in (everyone[p] for p in picked):
                decisions = [d[i].tolist() for d in g.decisions]
                wanted = choose_steps(g.insts, config.states_per_candidate, rng)
                for step, state in replayer.states(spaces[g.space], decisions, g.insts, wanted).items():
                    g.states[(i, step)] = state
        out.append(data)
    return out


def load_data(config: TrainConfig, cache: Path | None = None, processes: int = 2) -> Data:
    """Read dataset folders and encode them.

    Parameters
    ----------
    config : TrainConfig
    cache : pathlib.Path, optional
        File that keeps what was encoded; made anew when the datasets or the configuration have changed.
    processes : int

    Raises
    ------
    InputError
        If a folder is no dataset.
    OptionError
        If a task of a test dataset is one of the others' too.
    """
    key = data_key(config, config.datasets) + data_key(config, config.test_datasets)
    data = None
    if cache is not None and cache.exists():
        with cache.open("rb") as file:
            if pickle.load(file) == key:  # our own cache, written below; never published
                data = pickle.load(file)
            else:
                print(f"{cache} is of other data: encoding anew", file=sys.stderr, flush=True)
    if data is None:
        data = _encode(config, processes)
        if cache is not None:
            partial = cache.with_name(cache.name + ".partial")
            with partial.open("wb") as file:
                pickle.dump(key, file)
                pickle.dump(data, file)
            partial.replace(cache)
    levels = config.validation_levels or ([config.isa_level] if config.isa_level else [])
    if levels:
        data.validation = [
            t for t in data.validation if data.machines[t.groups[0].machine].isa_level in levels
        ]
    return data


def _encode(config: TrainConfig, processes: int) -> Data:
    data = Data()
    jobs = []
    for task, spaces, by_machine, machines in _choose_tasks(config):
        for name in by_machine:
            machine = machines[name]
            data.machines[name] = Machine(
                np.array(json.loads(machine["vector"]), np.float32),
                int(machine["cores"]),
                machine["isa_level"],
            )
        jobs.append((task, spaces, by_machine, machines, config))
    for n, made in enumerate(map_in_processes(_prepare, jobs, processes)):
        for task in made:
            if sum(int(np.isfinite(g.latency).sum()) for g in task.groups) < 2:
                continue  # Nothing to rank.
            getattr(data, task.split).append(task)
        if n % 100 == 0:
            print(f"encoded {n}/{len(jobs)} tasks", flush=True)
    for split in (data.train, data.validation, data.test):
        split.sort(key=lambda t: (t.task, t.groups[0].machine))
    return data


Job = tuple[dict, list, dict[str, list[dict]], dict[str, dict]]
"""A task, its design spaces, its rows by machine, and all machines."""


def _read_tasks(folder: str) -> Iterator[Job]:
    """The measured tasks of a dataset folder."""
    tasks, spaces, rows, machines = read_parquet(Path(folder))
    rows = {machine_key(folder, name): members for name, members in rows.items()}
    machines = {machine_key(folder, name): machine for name, machine in machines.items()}
    by_task: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for machine, members in rows.items():
        for row in members:
            by_task[row["task"]][machine].append(row)
    for name, by_machine in by_task.items():
        if name in tasks:
            yield tasks[name], spaces[name], dict(by_machine), machines


def _choose_tasks(config: TrainConfig) -> list[Job]:
    """Tasks of all datasets; none is in two splits."""
    found: list[Job] = []
    ids: dict[str, set[str]] = {"train": set(), "validation": set(), "test": set()}
    roles = {"datasets": config.datasets, "test_datasets": config.test_datasets}
    for role, folder in ((role, folder) for role, folders in roles.items() for folder in folders):
        for job in _read_tasks(folder):
            name, split = job[0]["id"], job[0]["split"]
            if split not in (("test",) if role == "test_datasets" else ("train", "validation")):
                raise OptionError(
                    f"{folder} is in {role}, but its task {name} is of the {split} split; "
                    "test tasks come from: pretune-export suite, all others from: pretune-export corpus"
                )
            ids[split].add(name)
            found.append(job)
    if leaked := sorted(ids["test"] & (ids["train"] | ids["validation"])):
        raise OptionError(
            f"{len(leaked)} tasks of {', '.join(config.test_datasets)} are in a dataset to train on as well, "
            f"such as {leaked[0]}; write that one again: pretune-export dataset --exclude SUITE.py"
        )
    both = ids["train"] & ids["validation"]
    if both:
        print(
            f"{len(both)} training tasks are dropped: other datasets have them for validation",
            file=sys.stderr,
            flush=True,
        )
    return [job for job in found if job[0]["split"] != "train" or job[0]["id"] not in both]
