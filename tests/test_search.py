"""What the search does not propose: candidates that LLVM would take minutes to build."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te

from pretune.hardware import detect, hardware_for_target
from pretune.model import TaskScorer, WorldModel, load_weights
from pretune.search import TaskSearch, task_search
from pretune.search.code_size import LANE_COST, MOST_CODE, code_size
from pretune.space import TaskSpace
from programs import TARGET, softmax


def transposed_twice(n: int, *, kind: str, limit: int) -> tvm.IRModule:
    """B = A + 1, C = transpose(B): the inner loop of C as given, the outer one unrolled up to `limit`."""
    a = te.placeholder((n, n), "float32", "A")
    b = te.compute((n, n), lambda i, j: a[i, j] + 1.0, "B")
    c = te.compute((n, n), lambda i, j: b[j, i], "C")
    schedule = s_tir.Schedule(te.create_prim_func([a, c]))
    outer, inner = schedule.get_loops(schedule.get_sblock("C"))
    schedule.annotate(outer, "pragma_auto_unroll_max_step", limit)
    schedule.annotate(outer, "pragma_unroll_explicit", 1)
    if kind == "vectorized":
        schedule.vectorize(inner)
    return schedule.mod


def test_code_that_is_written_down_is_counted():
    # B itself is one step: a load, an addition, a store. C costs 1 a step.
    for limit, steps in ((0, 1), (15, 1), (16, 16), (255, 16), (256, 256)):
        assert code_size(transposed_twice(16, kind="serial", limit=limit)["main"]) == 2.0 + steps
    vectors = transposed_twice(16, kind="vectorized", limit=16)
    assert code_size(vectors["main"]) == 2.0 + LANE_COST * 16 * 16


@pytest.mark.parametrize("most", [MOST_CODE, 600.0])
def test_the_search_proposes_none_of_much_code(weights, monkeypatch, most):
    space = TaskSpace.generate(softmax(), TARGET)
    rng = np.random.default_rng(0)
    drawn = [(k, design.sample(1, rng)[0]) for _ in range(8) for k, design in enumerate(space.spaces)]
    made = [c for c in (space.materialise(k, row) for k, row in drawn) if c is not None]
    assert max(code_size(candidate.mod["main"]) for candidate in made) > 600.0  # there are such
    monkeypatch.setattr(task_search, "MOST_CODE", most)
    scorer = TaskScorer(WorldModel(load_weights(weights), 1), space, hardware_for_target(TARGET, detect()))
    proposals = TaskSearch(space, scorer).propose(12)
    sizes = [code_size(proposal.candidate.mod["main"]) for proposal in proposals]
    assert len(sizes) == 12 and max(sizes) <= most
