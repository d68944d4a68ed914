"""The same start with stock MetaSchedule. Imports nothing of pretune that touches TVM."""

from __future__ import annotations

import json
import time
from typing import Any

BATCH = 64


def first_batch(start: float) -> None:
    """Generate a design space and score the first batch with stock parts; print seconds by stage as JSON."""
    stages: dict[str, float] = {}

    def done(stage: str) -> None:
        stages[stage] = round(time.perf_counter() - start - sum(stages.values()), 3)

    from tvm import te, tirx
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.utils import cpu_count
    from tvm.target import Target

    done("imports")
    n = 512
    a: Any = te.placeholder((n, n), "float32", name="A")
    b: Any = te.placeholder((n, n), "float32", name="B")
    k = te.reduce_axis((0, n), "k")
    c: Any = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "C")
    d: Any = te.compute((n, n), lambda i, j: te.max(c[i, j], tirx.const(0, "float32")), "D")
    func: Any = te.create_prim_func([a, b, d])
    context = ms.TuneContext(
        mod=func,
        target=Target({"kind": "llvm", "num-cores": cpu_count(logical=False)}),
        space_generator="post-order-apply",
        search_strategy="evolutionary",
        num_threads="physical",
        rand_state=1,
    )
    space = context.generate_design_space()
    done("design space")
    model: Any = ms.cost_model.XGBModel()
    context.pre_tuning(
        max_trials=BATCH,
        num_trials_per_iter=BATCH,
        design_spaces=space,
        database=ms.database.MemoryDatabase(),
        cost_model=model,
    )
    candidates = context.generate_measure_candidates()
    done("ranking")
    assert candidates is not None and len(candidates) == BATCH
    print(json.dumps(stages), flush=True)
