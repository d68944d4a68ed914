"""Encodings: the symbolic view of a trace must agree with the programs that TVM makes of it."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import tvm

from pretune.features import ActionEncoder, encode_state
from pretune.features.nest import Component, Env, Nest, NestLoop, const
from pretune.features.program import PARALLEL, Access, Buffer, read_program
from pretune.features.schema import (
    ACTION,
    ACTION_TYPES,
    ANNOTATION,
    NEST,
    STATE_BLOCK,
    STATE_LOOP,
    SUMMARY,
    TOGETHER,
)
from pretune.features.state import MAX_LOOPS
from pretune.features.summary import UNROLLED, summarise, together, unroll
from pretune.space import TaskSpace
from programs import TARGET, conv2d_relu, matmul, mean, softmax

POSTPROC = ACTION_TYPES.index("Postproc")
EXACT = (
    "points", "tile_3", "traffic_3", "vector", "accumulators", "inner_reduction", "parallel",
    "grain", "inner_0", "inner_1", "unrolled", "in_registers", "register_traffic",
    "body_traffic", "registers", "accumulated", "loads_0", "loads_1", "loads_2", "rolled_reduce",
)  # fmt: skip
REAL = {"vector": "vector_real", "parallel": "parallel_real"}
"""What the postprocessors decide, and where it stands in the rows of the program they have made."""


def nests(encoder, candidate):
    """Features of the costliest block's nest: from decisions alone, and of the scheduled program."""
    actions, _summary = encoder.encode([d[None] for d in candidate.decisions])
    main = [a[0] for s, a in zip(encoder.steps, actions, strict=True) if s.type_id == POSTPROC][-1]
    state = encode_state(candidate.mod["main"], cores=2)
    real = next(
        row for b, row in zip(read_program(candidate.mod["main"]), state.blocks, strict=True)
        if b.is_reduce and not b.name.endswith("_init")
    )  # fmt: skip
    return main, real


def scheduled(mod, each, *, packed=False):
    """Up to `each` candidates of every design space, or of the packed ones, with their encoders."""
    space = TaskSpace.generate(mod, TARGET)
    rng = np.random.default_rng(0)
    for k, design in enumerate(space.spaces):
        if packed and not design.first:
            continue
        encoder = ActionEncoder(read_program(design.program["main"]), design.insts, 2, design.first)
        for row in design.sample(each, rng):
            candidate = space.materialise(k, row)
            if candidate is not None:
                yield encoder, candidate


@pytest.mark.parametrize("mod", [matmul(512, 512, 512), conv2d_relu(64, 64, 56)], ids=["matmul", "conv2d"])
def test_the_symbolic_nest_is_the_real_one(mod):
    """The costliest block's nest, computed from decisions alone, against the scheduled program's own.

    Large programs, so that no cache-sized tile reaches the fused parallel loop, whose parts the real program
    no longer shows.
    """
    compared = 0
    for encoder, candidate in scheduled(mod, 6):
        main, real = nests(encoder, candidate)
        where = candidate.space, candidate.decisions
        for name in EXACT:
            i = NEST.index(name)
            assert main[i] == pytest.approx(real[STATE_BLOCK.index(name)], abs=1e-4), (name, *where)
        for name, made in REAL.items():
            i = NEST.index(name)
            assert main[i] == pytest.approx(real[STATE_BLOCK.index(made)], abs=1e-4), (name, *where)
        compared += 1
    assert compared >= 6


@pytest.mark.parametrize(
    ("mod", "share"), [(mean(), 1.0), (softmax(128, 128), 0.85)], ids=["mean", "softmax"]
)
def test_the_nests_of_split_reductions_are_the_real_ones(mod, share):
    """Partial results, what combines them, and what is computed under the loops of either or stands alone.

    Of softmax, a tile within a fused parallel loop is not always told exactly.
    """
    names = (
        "points", "vector", "parallel", "accumulators", "unrolled", "in_registers", "registers",
        "accumulated", "rolled", "rolled_reduce", "rolled_contiguous_0",
    )  # fmt: skip
    right: dict[str, list[bool]] = {name: [] for name in names}
    compared = set()
    for encoder, candidate in scheduled(mod, 8):
        blocks = read_program(candidate.mod["main"])
        state = encode_state(candidate.mod["main"], cores=2)
        real = {b.name.removesuffix("_update"): s for b, s in zip(blocks, state.blocks, strict=True)}
        env = Env([d[None] for d in candidate.decisions], 1)
        for nest in encoder._final:
            if nest.name not in real:
                continue  # inlined
            compared.add(nest.name)
            features = np.empty((1, len(NEST)), dtype=np.float32)
            encoder._describe_nest(features, nest, env, unrolled=True)
            for what, results in right.items():
                made = real[nest.name][STATE_BLOCK.index(REAL.get(what, what))]
                results.append(abs(features[0, NEST.index(what)] - made) < 1e-3)
    assert any(name.endswith("_rf") for name in compared)
    assert all(len(results) >= 40 and np.mean(results) >= share for results in right.values()), {
        what: np.mean(results) for what, results in right.items()
    }


def test_the_symbolic_nest_of_a_packed_program_is_nearly_always_the_real_one():
    """Where two axes became one, ``x // 28`` and ``x % 28`` make what a tile touches hard to tell exactly."""
    right: dict[str, list[bool]] = {name: [] for name in ("vector", "parallel", "accumulators", "unrolled")}
    for encoder, candidate in scheduled(conv2d_relu(64, 64, 56, stride=2), 8, packed=True):
        main, real = nests(encoder, candidate)
        for name, results in right.items():
            made = real[STATE_BLOCK.index(REAL.get(name, name))]
            results.append(abs(main[NEST.index(name)] - made) < 1e-3)
    assert all(len(results) >= 12 and np.mean(results) >= 0.8 for results in right.values()), right


def body(nest, limit):
    """What `unroll` says of a nest without decisions, by name."""
    values = unroll(summarise(nest, Env([], 1)), limit)[0]
    return dict(zip(NEST[UNROLLED], values.tolist(), strict=True))


def test_lanes_that_are_not_consecutive_are_loaded_one_by_one():
    """4 rows of 32 columns in registers, two for each row; one operand stays, the other goes on by two."""
    a, b, c = (Buffer(n, shape, 4.0, "global", True) for n, shape in
               (("a", (4, 64)), ("b", (64, 64)), ("c", (4, 32))))  # fmt: skip
    row, column, k = ({axis: 1.0} for axis in range(3))
    accesses = [Access(c, True, [row, column]), Access(b, False, [k, {1: 2.0}]), Access(a, False, [row, k])]
    order = [(2, 64), (0, 4), (1, 32)]
    loops = [NestLoop([Component(axis, const(extent), axis == 2)]) for axis, extent in order]
    axes = [(const(4), False), (const(32), False), (const(64), True)]
    found = body(Nest("c", axes, accesses, [1.0, 1.0] + [0.0] * 6, loops), 64.0)
    assert found["registers"] == pytest.approx(np.log2(8) / 8)
    assert found["accumulated"] == found["rolled"] == pytest.approx(np.log2(64) / 8)
    assert found["rolled_reduce"] and not found["rolled_lanes"]
    # A vector operation of 16 lanes each: 8 in all.
    loads = [8, 63, 4]
    assert [found[f"loads_{i}"] for i in range(3)] == pytest.approx([np.log2(n / 8) / 8 for n in loads])


def test_what_is_left_of_the_innermost_loops():
    """A product of 5 rows without vectors: LLVM unrolls short reductions, and turns the columns into lanes.

    Once TVM has unrolled the columns, the loop that is left is the outer one of the reduction, whose
    accumulators are as many as the columns.
    """
    a, b, c = (Buffer(n, shape, 4.0, "global", True) for n, shape in
               (("a", (5, 576)), ("b", (576, 64)), ("c", (5, 64))))  # fmt: skip
    row, column, k = ({axis: 1.0} for axis in range(3))
    accesses = [Access(c, True, [row, column]), Access(a, False, [row, k]), Access(b, False, [k, column])]
    extents = [(const(5), False), (const(64), False), (const(576), True)]
    order = [(0, 5), (2, 288), (1, 64), (2, 2)]
    loops = [NestLoop([Component(axis, const(extent), axis == 2)]) for axis, extent in order]
    nest = Nest("c", extents, accesses, [1.0, 1.0] + [0.0] * 6, loops)
    assert summarise(nest, Env([], 1)).vector == 1.0
    lanes, product = body(nest, 0.0), body(nest, 512.0)
    assert lanes["unrolled"] == 0 and product["unrolled"] == pytest.approx(np.log2(128) / 8)
    assert lanes["rolled"] == lanes["rolled_lanes"] == pytest.approx(np.log2(64) / 8)
    assert lanes["rolled_lanes_fit"] and not lanes["rolled_reduce"] and lanes["registers"] == 0
    # The write, then the larger read: both go on by one element; the other one stays.
    assert [lanes[f"rolled_contiguous_{i}"] for i in range(3)] == [1, 1, 0]
    assert [lanes[f"rolled_broadcast_{i}"] for i in range(3)] == [0, 0, 1]
    assert product["rolled"] == pytest.approx(np.log2(288) / 8) and product["rolled_reduce"]
    assert product["rolled_lanes"] == 0
    assert product["registers"] == pytest.approx(np.log2(64) / 8)
    # 128 products are summed up in 64 places, out of two elements of one operand and 128 of the other.
    assert [product[f"loads_{i}"] for i in range(3)] == pytest.approx([-1 / 8, 0, -6 / 8])
    assert lanes["accumulated"] == pytest.approx(np.log2(2) / 8)
    assert product["accumulated"] == pytest.approx(np.log2(576) / 8)


def test_loops_of_partial_results_are_split_and_moved_as_tvm_does():
    """Each part of a split loop goes on from what is inside it, whatever stands between them.

    The loops of the moved block are fewer than what is known of them: those that it would share further in.
    """
    from tvm.s_tir import Schedule

    from pretune.space import trace_to_json

    mod = mean(8, 4096)
    sch = Schedule(mod)
    total = sch.get_sblock("total")
    _outer, inner = sch.split(sch.get_loops(total)[-1], [None, 16])
    partial = sch.rfactor(inner, 2)
    sch.compute_at(partial, sch.get_loops(total)[0])
    _shared, places, rest = sch.get_loops(partial)
    a, c = sch.split(rest, [None, 32])
    x, y = sch.split(places, [None, 4])
    sch.reorder(x, a, y, c)
    encoder = ActionEncoder(read_program(mod["main"]), trace_to_json(sch.trace)[0], cores=2)
    rows = encode_state(sch.mod["main"], cores=2).blocks
    real = {block.name: row for block, row in zip(read_program(sch.mod["main"]), rows, strict=True)}
    compared = [nest for nest in encoder._final if nest.is_reduce]
    assert len(compared) == 2
    for nest in compared:
        features = np.empty((1, len(NEST)), dtype=np.float32)
        encoder._describe_nest(features, nest, Env([], 1), unrolled=True)
        np.testing.assert_allclose(features[0], real[nest.name][: len(NEST)], atol=1e-5)


def addition(*shape):
    """The nest of a block that adds to each element one of its row."""
    axes = {axis: 1.0 for axis in range(len(shape))}
    whole, rows = ([{axis: 1.0} for axis in axes][:dims] for dims in (len(shape), len(shape) - 1))
    a, b, c = (Buffer(n, size, 4.0, "global", True) for n, size in
               (("a", shape), ("b", shape[:-1]), ("c", shape)))  # fmt: skip
    accesses = [Access(c, True, whole), Access(a, False, whole), Access(b, False, rows)]
    loops = [NestLoop([Component(axis, const(extent), False)]) for axis, extent in enumerate(shape)]
    extents = [(const(extent), False) for extent in shape]
    return Nest("c", extents, accesses, [1.0] + [0.0] * 7, loops)


def test_where_all_loops_become_one_the_body_is_a_vector():
    """A parallel loop around four vectors of 16 lanes, whatever the loops were, and nothing to unroll."""
    summary = summarise(addition(32, 128), Env([], 1), parallel_limit=32.0)
    summary.features[:, UNROLLED] = unroll(summary, 512.0)
    found = dict(zip(NEST, summary.features[0].tolist(), strict=True))
    assert found["vector"] == pytest.approx(np.log2(64) / 8)
    assert found["parallel"] == pytest.approx(np.log2(32 * 128 / 64) / 8)
    assert found["registers"] == pytest.approx(np.log2(4) / 8)
    # What is added to the row is one element: a load for the four.
    assert [found[f"loads_{i}"] for i in range(3)] == pytest.approx([0, 0, -2 / 8])
    for name in ("unrolled", "in_registers", "accumulated", "rolled", "rolled_lanes"):
        assert found[name] == 0, name


def test_the_body_ends_at_a_loop_that_holds_another_block():
    whole, inner, innermost = addition(32, 8, 4), addition(32, 8, 4), addition(32, 8, 4)
    inner.cuts, innermost.cuts = [const(0)], [const(1)]
    nests = {nest: summarise(nest, Env([], 1), vector_limit=1.0) for nest in (whole, inner, innermost)}
    sizes = {nest: unroll(summary, 64.0)[0, 0] * 8 for nest, summary in nests.items()}
    assert [2 ** sizes[nest] for nest in (whole, inner, innermost)] == [32, 32, 4]
    rolled = {nest: unroll(s, 64.0)[0, NEST[UNROLLED].index("rolled")] for nest, s in nests.items()}
    assert [rolled[nest] for nest in (whole, inner, innermost)] == pytest.approx([5 / 8, 0, 0])


@pytest.mark.parametrize("mod", [softmax(128, 128), conv2d_relu(64, 64, 56)], ids=["softmax", "conv2d"])
def test_launches_are_the_parallel_loops_of_the_real_program(mod):
    at = SUMMARY.index("launches")
    found, real = [], []
    for encoder, candidate in scheduled(mod, 6):
        _actions, summary = encoder.encode([d[None] for d in candidate.decisions])
        found.append(round(summary[0, at] * 4))
        loops = (loop for block in read_program(candidate.mod["main"]) for loop in block.loops)
        real.append(len({loop.var for loop in loops if loop.kind == PARALLEL and loop.extent > 1}))
    assert found == real
    assert len(found) >= 12 and len(set(found)) > 1


def test_work_and_bytes_of_all_blocks_are_summed():
    """Twice the same block, on two cores: each has 64 vectors of 64 lanes, of 32 rows."""
    nest = addition(32, 128)
    features = summarise(nest, Env([], 1), cores=2, parallel_limit=32.0).features
    one, two = (
        dict(zip(TOGETHER, together([features] * n, [-1.0, 0.0][:n], 2)[0].tolist(), strict=True))
        for n in (1, 2)
    )
    work = 32 * 128 * nest.cost
    assert [8 * one[name] for name in ("all_work", "lane_work", "thread_work")] == pytest.approx(
        np.log2([work, work / 16, work / 32]), abs=1e-2
    )
    assert 8 * one["bytes_7"] == pytest.approx(np.log2(2 * 4 * 32 * 128 + 4 * 32), abs=0.1)
    for name in ("all_work", "lane_work", "thread_work", "bytes_0", "bytes_7"):
        assert 8 * (two[name] - one[name]) == pytest.approx(1.0, abs=1e-2)
    # The second is computed under the parallel loop of the first.
    assert one["launches"] == two["launches"] == 0.25
    assert (one["main_share"], two["main_share"]) == pytest.approx((1.0, 0.5))


@pytest.mark.parametrize("program", [matmul, conv2d_relu, softmax])
def test_a_batch_is_encoded_as_each_candidate_alone(program):
    mod = program()
    rng = np.random.default_rng(1)
    for design in TaskSpace.generate(mod, TARGET).spaces[:6]:
        encoder = ActionEncoder(read_program(design.program["main"]), design.insts, 2, design.first)
        decisions = design.decisions(design.sample(5, rng))
        actions, summary = encoder.encode(decisions)
        assert summary.shape == (5, len(SUMMARY))
        for i in range(5):
            one, alone = encoder.encode([d[i : i + 1] for d in decisions])
            np.testing.assert_allclose(summary[i], alone[0], atol=1e-6)
            for batch, single in zip(actions, one, strict=True):
                assert batch.shape[1] == len(ACTION)
                np.testing.assert_allclose(batch[i if len(batch) > 1 else 0], single[0], atol=1e-6)


def test_different_decisions_give_different_actions():
    mod = matmul()
    design = TaskSpace.generate(mod, TARGET).spaces[0]
    encoder = ActionEncoder(read_program(mod["main"]), design.insts, cores=2)
    rows = np.unique(design.sample(200, np.random.default_rng(0)), axis=0)
    actions, _ = encoder.encode(design.decisions(rows))
    whole = np.concatenate([a for a in actions if len(a) == len(rows)], axis=1)
    assert len(np.unique(whole.round(5), axis=0)) == len(rows)


def test_state_shapes_and_sensitivity():
    mod = conv2d_relu()
    space = TaskSpace.generate(mod, TARGET)
    before = encode_state(mod["main"], cores=2)
    assert before.blocks.shape[1] == len(STATE_BLOCK)
    assert before.loops.shape[1:] == (MAX_LOOPS, len(STATE_LOOP))
    row = space.spaces[0].sample(1, np.random.default_rng(0))[0]
    after = encode_state(space.materialise(0, row).mod["main"], cores=2)
    assert np.isfinite(after.blocks).all() and np.isfinite(after.loops).all()
    assert before.blocks.shape != after.blocks.shape or not np.allclose(before.blocks, after.blocks)


def test_an_unknown_instruction_is_encoded_and_logged_once(caplog):
    mod = matmul()
    design = TaskSpace.generate(mod, TARGET).spaces[0]
    insts = json.loads(json.dumps(design.insts))
    block = insts[0][3][0]
    insts.insert(2, ["FoldTheTime", [block], [3], []])
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            encoder = ActionEncoder(read_program(mod["main"]), insts, cores=2)
    assert sum("FoldTheTime" in r.message for r in caplog.records) == 1
    step = next(s for s in encoder.steps if s.name == "FoldTheTime")
    assert step.type_id == ACTION_TYPES.index("other")
    actions, _ = encoder.encode(design.decisions(design.sample(3, np.random.default_rng(0))))
    assert all(np.isfinite(a).all() for a in actions)


def test_what_a_generic_instruction_makes_can_be_referred_to(caplog, monkeypatch):
    from pretune.features import actions

    monkeypatch.setattr(actions, "_unresolved", set())
    mod = matmul()
    design = TaskSpace.generate(mod, TARGET).spaces[0]
    insts = json.loads(json.dumps(design.insts))
    block = insts[0][3][0]
    insts += [
        ["GetLoops", [block], [], ["l90", "l91", "l92"]],
        ["Blockize", ["l91"], [1], ["b90"]],
        ["Annotate", ["b90", 3], ["some_key"], []],
        ["GetSBlock", [], ["root", "main"], ["b91"]],
        ["GetChildBlocks", ["l92"], [], ["b92"]],
        ["Annotate", ["b92", 3], ["some_key"], []],
        ["Annotate", ["b91", 3], ["some_key"], []],
    ]
    with caplog.at_level(logging.INFO):
        encoder = ActionEncoder(read_program(mod["main"]), insts, cores=2)
    assert not caplog.records
    names = [step.name for step in encoder.steps]
    decisions = design.decisions(design.sample(1, np.random.default_rng(0)))
    rows = [a[0] for a in encoder.encode(decisions)[0]]
    at = names.index("Blockize")
    share = len(ACTION) - len(ANNOTATION) - 1
    assert [rows[at + k][share] > 0 for k in (1, 2, 3)] == [True, True, False]  # the last is the root

    insts += [["Annotate", ["b99", 3], ["some_key"], []]] * 2
    with caplog.at_level(logging.INFO):
        ActionEncoder(read_program(mod["main"]), insts, cores=2)
    assert [r.message.split()[1] for r in caplog.records] == ["Annotate"]


def test_every_instruction_of_a_cuda_space_has_a_type():
    """Design spaces for CUDA are generated and encoded without a GPU."""
    from pretune.features.schema import QUERIES

    target = tvm.target.Target("nvidia/nvidia-a100")
    mod = matmul(256, 256, 256)
    names = set()
    for design in TaskSpace.generate(mod, target).spaces:
        encoder = ActionEncoder(read_program(mod["main"]), design.insts, cores=108)
        actions, summary = encoder.encode(design.decisions(design.sample(8, np.random.default_rng(0))))
        assert all(np.isfinite(a).all() for a in actions) and np.isfinite(summary).all()
        names |= {inst[0] for inst in design.insts}
    assert names - set(ACTION_TYPES) - set(QUERIES) - {n for n in names if n.startswith("Sample")} == set()


def test_candidates_that_agree_are_summarised_once():
    mod = softmax()
    design = TaskSpace.generate(mod, TARGET).spaces[0]
    encoder = ActionEncoder(read_program(design.program["main"]), design.insts, 2, design.first)
    rows = design.sample(300, np.random.default_rng(0))
    decisions = design.decisions(rows)
    plain, shared = Env(decisions, 300), Env(decisions, 300, rows)
    few = {step.slots: shared.distinct(step.slots)[0].n for step in encoder.steps}
    assert min(few.values()) < 30
    for step in encoder.steps:
        np.testing.assert_array_equal(step.features(shared), step.features(plain))
        some, which = shared.distinct(step.slots)
        if which is not None:
            np.testing.assert_array_equal(step.features(some)[which], step.features(plain))
    np.testing.assert_array_equal(encoder.summarise(shared), encoder.summarise(plain))
