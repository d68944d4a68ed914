"""MetaSchedule's own features of measured candidates, for the baselines.

Its cost model describes a scheduled program by one vector per store statement (``PerStoreFeature``:
arithmetic, loop annotations, memory accesses, an arithmetic intensity curve). That takes the program that
a candidate builds, so every trace is replayed and postprocessed in TVM, 2 to 25 ms each.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from pretune.compat import setup_tvm
from pretune.space import sampling_indices
from pretune_export.dataset import Group, TaskData

WIDTH = 164
"""Numbers in the vector of one store statement, with TVM's default settings."""

Stores = Mapping[str, np.ndarray]
"""Features by candidate (`candidate_keys`): float32 ``[stores, WIDTH]``; no rows if TVM refuses a replay."""


@dataclass(frozen=True)
class _Job:
    """Candidates of one task whose features are wanted: instructions and decisions by key."""

    task: str
    mod: str
    target: str
    candidates: dict[str, tuple[list[Any], list[list[int]]]]


def candidate_keys(group: Group) -> list[str]:
    """What a candidate's program depends on, hashed: task, design space, decisions; not the machine."""
    start = hashlib.blake2b(json.dumps([group.task, group.instructions]).encode(), digest_size=12)
    keys = []
    decisions = np.concatenate([np.zeros((len(group.latency), 0), np.int32), *group.decisions], axis=1)
    for row in np.ascontiguousarray(decisions, np.int32):
        digest = start.copy()
        digest.update(row.tobytes())
        keys.append(digest.hexdigest())
    return keys


def load_stores(
    tasks: Iterable[TaskData], targets: Mapping[str, str], folder: Path, processes: int = 2
) -> Stores:
    """Per-store features of all candidates of `tasks`, extracted where `folder` does not have them yet.

    Parameters
    ----------
    tasks : iterable of TaskData
    targets : mapping of str to str
        Target of each machine, as JSON. A candidate that several machines measured is extracted once.
    folder : pathlib.Path
        Keeps what was extracted.
    processes : int
    """
    folder = folder / tvm.__version__
    folder.mkdir(parents=True, exist_ok=True)
    jobs: dict[str, _Job] = {}
    for task in tasks:
        for group in task.groups:
            job = jobs.setdefault(task.task, _Job(task.task, task.mod, targets[group.machine], {}))
            for i, key in enumerate(candidate_keys(group)):
                decisions = [slot[i].tolist() for slot in group.decisions]
                job.candidates.setdefault(key, (group.instructions, decisions))
    stores: dict[str, np.ndarray] = {}
    missing = []
    for job in jobs.values():
        known = _read(folder / f"{job.task}.npz")
        stores |= {key: known[key] for key in job.candidates.keys() & known.keys()}
        wanted = {key: value for key, value in job.candidates.items() if key not in known}
        if wanted:
            missing.append(_Job(job.task, job.mod, job.target, wanted))
    if not missing:
        return stores
    with multiprocessing.get_context("spawn").Pool(min(processes, len(missing))) as pool:
        for n, (task, found) in enumerate(pool.imap_unordered(_extract, missing)):
            path = folder / f"{task}.npz"
            _write(path, _read(path) | found)
            stores |= found
            if n % 100 == 0:
                print(f"per-store features of {n}/{len(missing)} tasks", file=sys.stderr, flush=True)
    return stores


def _extract(job: _Job) -> tuple[str, dict[str, np.ndarray]]:
    """Replay the candidates of one task and read their features. Runs in a worker process."""
    target = tvm.target.Target(json.loads(job.target))
    setup_tvm(target)
    from tvm.s_tir import Schedule
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate
    from tvm.s_tir.schedule import Trace

    mod: Any = tvm.ir.load_json(job.mod)
    context = ms.TuneContext(mod=mod, target=target, space_generator="post-order-apply", num_threads=1)
    generator: Any = context.space_generator
    postprocs = list(generator.postprocs)
    extractor = ms.feature_extractor.PerStoreFeature()
    found = {}
    for key, (instructions, decisions) in job.candidates.items():
        found[key] = np.zeros((0, WIDTH), np.float32)
        taken = []
        for i, values in zip(sampling_indices(instructions), decisions, strict=True):
            plain = instructions[i][0] in ("SamplePerfectTile", "SamplePartitionedTile")
            taken.append([i, values if plain else values[0]])
        try:
            sch = Schedule(mod, error_render_level="none")
            Trace.apply_json_to_schedule([instructions, taken], sch)
            sch.enter_postproc()
            if all(postproc.apply(sch) for postproc in postprocs):
                (features,) = extractor.extract_from(context, [MeasureCandidate(sch, [])])
                found[key] = features.numpy().astype(np.float32).reshape(-1, WIDTH)
        except Exception:
            continue  # TVM refuses the replay: the candidate stays without features.
    return job.task, found


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.exists():
        return {}
    with np.load(path) as file:
        parts = np.split(file["rows"], np.cumsum(file["counts"])[:-1])
        return dict(zip(file["keys"].tolist(), parts, strict=True))


def _write(path: Path, found: Mapping[str, np.ndarray]) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            keys=np.array(list(found)),
            counts=np.array([len(rows) for rows in found.values()]),
            rows=np.concatenate(list(found.values())),
        )
    partial.replace(path)
