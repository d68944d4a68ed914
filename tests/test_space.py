"""Design spaces as tables of options."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, topi

from pretune.space import TaskSpace, factorisations
from programs import TARGET, conv2d_relu, matmul, softmax, transpose


@pytest.mark.parametrize(
    ("extent", "parts", "limit"), [(1, 4, 64), (12, 2, 64), (96, 3, 8), (13, 4, 4), (60, 4, 0)]
)
def test_factorisations_are_all_of_them(extent, parts, limit):
    got = {tuple(row) for row in factorisations(extent, parts, limit)}
    divisors = [d for d in range(1, extent + 1) if extent % d == 0]
    want = {
        row for row in itertools.product(divisors, repeat=parts)
        if np.prod(row) == extent and (limit <= 0 or row[-1] <= limit)
    }  # fmt: skip
    assert got == want


def test_long_tables_are_thinned_and_stay_valid():
    rows = factorisations(2**20 * 3**4, 4, 64)
    assert 1000 < len(rows) <= 16384
    assert (rows.astype(np.int64).prod(axis=1) == 2**20 * 3**4).all()


@pytest.mark.parametrize("program", [matmul, conv2d_relu, softmax])
def test_materialised_candidates_took_the_decisions(program):
    space = TaskSpace.generate(program(), TARGET)
    rng = np.random.default_rng(0)
    built, same = 0, 0
    for k, design in enumerate(space.spaces):
        for row in design.sample(4, rng):
            candidate = space.materialise(k, row)
            if candidate is None:
                continue
            built += 1
            wanted = [s.options[r] for s, r in zip(design.slots, row, strict=True)]
            # TVM may correct a compute location, which depends on the other decisions; it must say so.
            differing = [
                s.kind
                for s, a, b in zip(design.slots, candidate.decisions, wanted, strict=True)
                if (a != b).any()
            ]
            assert set(differing) <= {"SampleComputeLocation"}
            same += not differing
            insts, _decisions = candidate.trace_json
            assert any(inst[0] == "EnterPostproc" for inst in insts)
    assert built >= len(space.spaces) * 2 and same >= built // 5


def test_generation_is_reproducible():
    a, b = (TaskSpace.generate(conv2d_relu(), TARGET) for _ in range(2))
    assert [d.insts for d in a.spaces] == [d.insts for d in b.spaces]
    assert all(
        np.array_equal(x.options, y.options)
        for c, d in zip(a.spaces, b.spaces, strict=True)
        for x, y in zip(c.slots, d.slots, strict=True)
    )


def test_mutation_changes_at_least_one_open_slot_and_stays_in_range():
    design = TaskSpace.generate(matmul(), TARGET).spaces[0]
    rng = np.random.default_rng(3)
    parents = design.sample(300, rng)
    children = design.mutate(parents, rng)
    sizes = np.array([len(s.options) for s in design.slots])
    assert ((children >= 0) & (children < sizes)).all()
    # A redraw may hit the old option; most do not.
    assert (children != parents).any(axis=1).mean() > 0.8


def test_a_transpose_has_nothing_to_decide():
    space = TaskSpace.generate(transpose(), TARGET)
    assert space.is_trivial
    assert space.materialise(0, np.zeros(0, np.int32)) is not None


def test_a_strided_convolution_can_copy_its_input_first():
    """The copy is part of the trace: stock TVM replays it, and what it computes stays right."""
    from tvm.s_tir import Schedule
    from tvm.s_tir.schedule import Trace

    from pretune.measure import MeasurePool
    from pretune.space.packing import initial_program

    mod = conv2d_relu(32, 16, 28, stride=2)
    space = TaskSpace.generate(mod, TARGET)
    packed = [k for k, design in enumerate(space.spaces) if design.first]
    assert 0 < len(packed) < len(space.spaces)
    k = packed[-1]
    design = space.spaces[k]
    tvm.ir.assert_structural_equal(initial_program(mod, json.loads(json.dumps(design.insts))), design.program)
    rows = design.sample(20, np.random.default_rng(0))
    candidate = next(c for row in rows if (c := space.materialise(k, row)) is not None)
    again = Schedule(mod)
    Trace.apply_json_to_schedule(json.loads(json.dumps(candidate.trace_json)), again)
    tvm.ir.assert_structural_equal(again.mod, candidate.mod)
    with MeasurePool(TARGET, workers=1) as pool:
        assert pool.compare(mod, candidate.mod) is None


def packed_spaces(mod):
    """Of design spaces that copy an operand first: what makes the copy, and loops blocks are moved under."""
    spaces = [design for design in TaskSpace.generate(mod, TARGET).spaces if design.first]
    moves = [[i[1][1] for i in d.insts if i[0] == "ReverseComputeAt"] for d in spaces]
    return [[i[0] for i in d.insts[: d.first]] for d in spaces], moves


def strided(follow, size=28):
    """A strided convolution, then what `follow` makes of its output: the function's further tensors."""
    x, w = te.placeholder((1, 16, size, size), "float32", "X"), te.placeholder((16, 16, 3, 3), "float32", "W")
    y = topi.nn.conv2d(x, w, 2, 1, 1, "NCHW")
    return tvm.IRModule({"main": te.create_prim_func([x, w, *follow(y)]).with_attr("global_symbol", "main")})


def test_what_follows_a_packed_convolution_follows_either_tile_or_neither():
    prefixes, moved = packed_spaces(strided(lambda y: [topi.nn.relu(topi.add(y, 1.0))]))
    assert [len(loops) for loops in moved] == [0, 1, 1] and moved[1] != moved[2]
    assert all("TransformLayout" in prefix and prefix.count("ComputeInline") == 2 for prefix in prefixes)


def test_an_output_keeps_its_shape_where_the_convolution_is_read_too():
    mod = strided(lambda y: [y, topi.nn.relu(y)])
    prefixes, _moved = packed_spaces(mod)
    assert prefixes and not any("TransformLayout" in prefix for prefix in prefixes)


@pytest.mark.parametrize(("produce", "inlined"), [(topi.exp, False), (topi.negative, True)])
def test_a_costly_producer_is_not_repeated_for_every_place_of_the_kernel(produce, inlined):
    from pretune.space.packing import find_packing

    x, w = te.placeholder((1, 16, 29, 29), "float32", "X"), te.placeholder((16, 16, 3, 3), "float32", "W")
    made = produce(x)
    c, i, j = (te.reduce_axis((0, n), name) for name, n in (("c", 16), ("i", 3), ("j", 3)))
    y = te.compute(
        (1, 16, 14, 14),
        lambda n, f, h, v: te.sum(made[n, c, 2 * h + i, 2 * v + j] * w[f, c, i, j], axis=[c, i, j]),
        "Y",
    )
    mod = tvm.IRModule({"main": te.create_prim_func([x, w, y]).with_attr("global_symbol", "main")})
    packing = find_packing(mod, 8)
    assert packing is not None and (packing.producer is not None) == inlined


@pytest.mark.parametrize(
    "mod", [matmul(), softmax(), conv2d_relu(size=32)], ids=["matmul", "softmax", "conv2d"]
)
def test_nothing_is_copied_where_vectors_are_full_and_contiguous(mod):
    assert all(design.first == 0 for design in TaskSpace.generate(mod, TARGET).spaces)


def test_traces_of_copied_operands_are_scored_alike_wherever_they_come_from():
    from pretune.hardware import detect, hardware_for_target
    from pretune.model import TaskScorer, TraceScorer, WorldModel, load_weights

    mod = conv2d_relu(32, 16, 28, stride=2)
    space = TaskSpace.generate(mod, TARGET)
    hardware = hardware_for_target(TARGET, detect())
    model = WorldModel(load_weights(Path(__file__).parents[1] / "hub_cards" / "cpu-x86-64-v4"), 1)
    k = len(space.spaces) - 1
    row = next(r for r in space.spaces[k].sample(20, np.random.default_rng(0)) if space.materialise(k, r))
    candidate = space.materialise(k, row)
    taken = [s.find(d) for s, d in zip(space.spaces[k].slots, candidate.decisions, strict=True)]
    score, _features = TaskScorer(model, space, hardware).score(k, np.array([taken], np.int32))
    again, _embedding = TraceScorer(mod, model, hardware).score([candidate.trace_json])
    np.testing.assert_allclose(score, again, atol=1e-5)
