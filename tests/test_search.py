"""What the search does not propose: candidates that LLVM would take minutes to build."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import s_tir, te

from pretune.hardware import detect, hardware_for_target
from pretune.model import TaskScorer, WorldModel, load_weights
from pretune.search import TaskSearch
from pretune.search import code_size as code_size_module
from pretune.search.code_size import FAR_COST, MOST_CODE, VECTOR_COST, code_size
from pretune.space import TaskSpace
from programs import TARGET, conv2d_relu, softmax


def transposed(n: int, *, kind: str, limit: int) -> tvm.IRModule:
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
    def size(kind: str, limit: int) -> float:
        return code_size(transposed(16, kind=kind, limit=limit)["main"])

    # B is one step that costs 2, with its addition; a step of C costs 1.
    for limit, steps in ((0, 1), (15, 1), (16, 16), (255, 16), (256, 256)):
        assert size("serial", limit) == 2.0 + steps
    assert size("vectorized", 16) == pytest.approx(2.0 + 16 * 16 * (VECTOR_COST + FAR_COST))


@pytest.mark.parametrize("most", [MOST_CODE, 600.0])
def test_the_search_proposes_none_of_much_code(weights, monkeypatch, most):
    space = TaskSpace.generate(softmax(), TARGET)
    rng = np.random.default_rng(0)
    drawn = [(k, design.sample(1, rng)[0]) for _ in range(8) for k, design in enumerate(space.spaces)]
    made = [c for c in (space.materialise(k, row) for k, row in drawn) if c is not None]
    assert max(code_size(candidate.mod["main"]) for candidate in made) > 600.0  # there are such
    monkeypatch.setattr(code_size_module, "MOST_CODE", most)
    scorer = TaskScorer(WorldModel(load_weights(weights), 1), space, hardware_for_target(TARGET, detect()))
    proposals = TaskSearch(space, scorer).propose(12)
    sizes = [code_size(proposal.candidate.mod["main"]) for proposal in proposals]
    assert len(sizes) == 12 and max(sizes) <= most


def test_a_design_space_that_is_refused_leaves_the_others(weights, monkeypatch):
    """As where TVM can build nothing of what the model likes best."""
    space = TaskSpace.generate(softmax(), TARGET)
    scorer = TaskScorer(WorldModel(load_weights(weights), 1), space, hardware_for_target(TARGET, detect()))
    (first,) = TaskSearch(space, scorer).propose(1, greedy=True)
    materialise = space.materialise

    def refuse(k: int, row: np.ndarray):
        return None if k == first.candidate.space else materialise(k, row)

    monkeypatch.setattr(space, "materialise", refuse)
    (second,) = TaskSearch(space, scorer).propose(1, greedy=True)
    assert second.candidate.space != first.candidate.space
    assert len(TaskSearch(space, scorer).propose(16)) == 16


@pytest.mark.parametrize("liked", [False, True])
def test_the_first_batch_has_what_packs_an_operand_and_what_does_not(weights, monkeypatch, liked):
    """However sure the ranker is: it may be wrong about all of either kind."""
    space = TaskSpace.generate(conv2d_relu(32, 32, 28, stride=2), TARGET)
    packs = [bool(design.first) for design in space.spaces]
    assert set(packs) == {False, True}
    scorer = TaskScorer(WorldModel(load_weights(weights), 1), space, hardware_for_target(TARGET, detect()))
    score_all = scorer.score_all

    def one_sided(rows):
        found = zip(score_all(rows), packs, strict=True)
        return [(score - 50.0 * (kind != liked), features) for (score, features), kind in found]

    monkeypatch.setattr(scorer, "score_all", one_sided)
    kinds = [packs[p.candidate.space] for p in TaskSearch(space, scorer).propose(16)]
    assert kinds.count(liked) == 14 and kinds.count(not liked) == 2
    (first,) = TaskSearch(space, scorer).propose(1, greedy=True)
    assert packs[first.candidate.space] == liked
