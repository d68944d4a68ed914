"""The first measurements, from before there was a collector: their machine, and their files."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import tvm

from pretune.errors import InputError
from pretune.hardware import Hardware
from pretune.intake import make_task
from pretune.space import split_trace
from pretune_export.networks import CorpusTask
from pretune_export.networks.corpus import join

FIRST_TARGET = {"kind": "llvm", "mcpu": "znver4", "num-cores": 2}
"""Target of the first measurements, by their README."""

FIRST_MACHINE = Hardware(
    vendor="amd", model_name="AMD EPYC, family 25 model 17", microarch="znver4", arch="x86_64",
    isa=("avx", "avx2", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512vnni", "fma"),
    isa_level="x86-64-v4", vector_bits=512, cores=2, l1d_bytes=32 << 10, l2_bytes=1 << 20, l3_bytes=32 << 20,
    clock_ghz=2.6, memory_bytes=24 << 30,
)  # fmt: skip
"""The machine of the first measurements, by their README, with Zen 4's caches; its clock is a guess."""


FIRST_VALIDATION = ("mbv3", "inception")
"""Their families that the corpus keeps for validation."""


def read_shared(folder: Path) -> tuple[list[CorpusTask], dict[str, list], list[dict[str, Any]]]:
    """Read the first measurements (``tasks.jsonl.gz``, ``measurements.jsonl.gz``) into our rows.

    Their traces carry instructions and decisions together; design spaces are told apart by instructions.
    Tasks get the identities that the corpus would give them. Why a candidate failed and how fast the machine
    was is not known: errors are ``"unknown"``, calibrations empty.
    """

    def lines(name: str) -> list[dict]:
        with gzip.open(folder / name, "rt") as file:
            return [json.loads(line) for line in file]

    tasks: dict[str, CorpusTask] = {}
    ids: dict[str, str] = {}
    for t in lines("tasks.jsonl.gz"):
        mod: Any = tvm.ir.load_json(t["mod"])
        try:
            task = make_task(t["name"], mod["main"])
        except InputError:  # The product would not tune it.
            continue
        ids[t["id"]] = task.task_id
        split = "validation" if t["net"] in FIRST_VALIDATION else "train"
        line = CorpusTask(
            task.task_id, (t["net"],), (1,), split, t["name"], 1, task.args, task.flops, -1, t["mod"]
        )
        tasks[line.id] = join(tasks.get(line.id), line, t["net"], split)
    spaces: dict[str, list] = defaultdict(list)
    keys: dict[str, dict[str, int]] = defaultdict(dict)
    rows = []
    for m in lines("measurements.jsonl.gz"):
        task_id = ids.get(m["task"])
        if task_id is None or not m.get("trace"):
            continue
        try:
            body, decisions = split_trace(*m["trace"])
        except ValueError:
            continue
        # Replayed traces may number their variables alike but carry constants; the text tells spaces apart.
        found = keys[task_id].setdefault(json.dumps(body), len(spaces[task_id]))
        if found == len(spaces[task_id]):
            spaces[task_id].append(body)
        latencies = m.get("res") or []
        ok = bool(m.get("ok")) and bool(latencies)
        rows.append(
            {
                "task": task_id,
                "space": found,
                "decisions": decisions,
                "ok": ok,
                "latencies": latencies,
                "error_kind": "" if ok else "unknown",
                "policy": "random",
                "calibration": [],
                "time": "2026-11-30",
            }
        )
    return list(tasks.values()), dict(spaces), rows
