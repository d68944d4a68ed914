"""Unmeasured trajectories: real states along random schedules, and what is pretrained on them."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import tvm
from click.testing import CliRunner

from pretune.errors import OptionError
from pretune.features import ActionEncoder, encode_state
from pretune.features.program import read_program
from pretune.space import TaskSpace
from programs import TARGET, conv2d_relu, matmul, softmax

torch = pytest.importorskip("torch")

from pretune_export.cli import main  # noqa: E402
from pretune_export.nets import Sizes, WorldModelNet  # noqa: E402
from pretune_export.networks import CorpusTask  # noqa: E402
from pretune_export.pretrain import (  # noqa: E402
    PretrainConfig,
    build,
    evaluate,
    load_pretrained,
    pretrain,
)
from pretune_export.trajectories import (  # noqa: E402
    FINAL,
    GenerateOptions,
    Programs,
    Replayer,
    Trajectories,
    generate,
    load_groups,
    make_batch,
    pad,
)
from pretune_export.trajectories.files import widths_of  # noqa: E402

TARGET_JSON = '{"kind":"llvm","mcpu":"x86-64-v3","num-cores":2}'
CUDA = "nvidia/nvidia-a100"


def corpus_task(mod: tvm.IRModule, split: str, name: str) -> CorpusTask:
    digits = name.encode().hex()[:16].ljust(16, "0")
    return CorpusTask(digits, (name,), (1,), split, name, 1, (), 1e6, 5, str(tvm.ir.save_json(mod)))


def prefix_state(mod, insts, taken, end):
    """The state after the first `end` instructions, replayed on their own."""
    sch = tvm.s_tir.Schedule(mod)
    decisions = [[i, d] for i, d in taken if i < end]
    tvm.s_tir.schedule.Trace.apply_json_to_schedule([insts[:end], decisions], sch)
    return encode_state(sch.mod["main"], cores=2)


def as_json(insts, flat):
    """Flat decisions as TVM's JSON has them."""
    out, at = [], 0
    sampling = [i for i, inst in enumerate(insts) if inst[0].startswith("Sample")]
    for i, width in zip(sampling, widths_of(insts), strict=True):
        values = [int(v) for v in flat[at : at + width]]
        out.append([i, values if insts[i][0] == "SamplePerfectTile" else values[0]])
        at += width
    return out


def test_real_states_follow_the_steps():
    """The state after the last instruction is that of the schedule before postprocessing."""
    mod = conv2d_relu()
    space = TaskSpace.generate(mod, TARGET)
    design = space.spaces[-1]
    encoder = ActionEncoder(read_program(design.program["main"]), design.insts, 2, design.first)
    candidate = space.materialise(len(space.spaces) - 1, design.sample(1, np.random.default_rng(0))[0])
    steps = [s.inst for s in encoder.steps]
    wanted = [s for s, inst in enumerate(steps) if inst >= 0]
    decisions = [d.tolist() for d in candidate.decisions]
    states = Replayer(mod, TARGET, 2).states(design.insts, decisions, steps, [*wanted, FINAL])
    assert set(states) == {*wanted, FINAL}
    np.testing.assert_array_equal(states[FINAL].blocks, encode_state(candidate.mod["main"], cores=2).blocks)
    splits = [s for s in wanted if encoder.steps[s].name == "Split"]
    loops = [int((states[s].loops != 0).any(-1).sum()) for s in splits]
    assert loops == sorted(loops) and loops[0] < loops[-1]  # every split adds loops


@pytest.mark.parametrize("target", [TARGET, CUDA], ids=["cpu", "cuda"])
def test_stored_states_are_those_of_the_traces(tmp_path, target):
    """Each state equals that of replaying the stored decisions up to the step, alone."""
    mod = conv2d_relu()
    target = tvm.target.Target(target)
    options = GenerateOptions(per_task=6, states=2, stores=1.0)
    task = corpus_task(mod, "train", "conv")
    kind = "cpu" if target.kind.name == "llvm" else "cuda"
    assert generate([task], target, kind, 2, tmp_path, options, say=str) == 6
    (path,) = tmp_path.glob("*.parquet")
    found = Trajectories.read(path)
    assert len(found) == 6 and len(np.unique(found.space)) > 1
    assert list(found.stores_of) == list(range(6)) and np.isfinite(found.stores).all()
    assert (found.stores.max(0) > found.stores.min(0)).sum() > 50
    blocks = read_program(mod["main"])
    block_at = np.cumsum([0, *found.programs.block_count])
    loop_at = np.cumsum([0, *found.programs.loop_count])
    compared = 0
    for i in np.flatnonzero(found.step != FINAL):
        n = found.states_of[i]
        insts = found.spaces[found.space[n]]
        end = ActionEncoder(blocks, insts, 2).steps[found.step[i]].inst + 1
        want = prefix_state(mod, insts, as_json(insts, found.decisions[n]), end)
        rows = slice(block_at[i], block_at[i + 1])
        np.testing.assert_array_equal(found.programs.blocks[rows], want.blocks.astype(np.float16))
        loops = found.programs.loops[loop_at[rows.start] : loop_at[rows.stop]]
        np.testing.assert_array_equal(loops, want.loops[want.loops.any(-1)].astype(np.float16))
        compared += 1
    assert compared == 12
    for n in np.flatnonzero(found.valid):
        insts = found.spaces[found.space[n]]
        splits = np.cumsum(widths_of(insts))[:-1]
        decisions = [d.tolist() for d in np.split(found.decisions[n], splits)]
        state = Replayer(mod, target, 2).states(insts, decisions, [], [FINAL])[FINAL]
        last = np.flatnonzero(found.states_of == n)[-1]
        rows = slice(block_at[last], block_at[last + 1])
        assert found.step[last] == FINAL
        np.testing.assert_array_equal(found.programs.blocks[rows], state.blocks.astype(np.float16))


def test_generating_resumes_and_a_task_that_fails_costs_one_task(tmp_path, capfd):
    tasks = [
        corpus_task(matmul(32, 32, 32), "train", "first"),
        CorpusTask("f" * 16, (), (), "train", "broken", 1, (), 0.0, 1, '{"not": "a module"}'),
        corpus_task(softmax(), "train", "second"),
    ]
    options = GenerateOptions(per_task=3, stores=0.0)
    lines: list[str] = []
    assert generate(tasks, TARGET, "cpu", 2, tmp_path, options, processes=2, say=lines.append) == 6
    assert "2/3 tasks, 6 trajectories, 1 tasks failed" in lines[-1]
    assert "broken" in capfd.readouterr().err
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.parquet")}
    assert len(before) == 2
    assert generate(tasks, TARGET, "cpu", 2, tmp_path, options, say=lines.append) == 6
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.glob("*.parquet")} == before
    assert generate(tasks[:1], TARGET, "cpu", 2, tmp_path / "late", options, deadline=0.0, say=str) == 0


def invoke(*args):
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """A few trajectories of four tasks, one of them for validation."""
    folder = tmp_path_factory.mktemp("shards")
    tasks = [
        corpus_task(matmul(64, 64, 64), "train", "a"),
        corpus_task(matmul(32, 128, 48), "train", "b"),
        corpus_task(conv2d_relu(), "train", "c"),
        corpus_task(matmul(48, 48, 96), "validation", "d"),
    ]
    corpus = folder / "corpus.jsonl"
    corpus.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))
    counts = ("--per-task", 12, "--states", 2, "--stores", 0.5)
    assert invoke("trajectories", corpus, folder, "--target", TARGET_JSON, *counts) == 48
    return folder


def test_padded_programs_are_the_states(shards):
    """What the encoder is given equals the padding of `pretune.features.State` itself, to half precision."""
    found = Trajectories.read(sorted(shards.glob("*.parquet"))[0])
    rng = np.random.default_rng(0)
    rows = rng.permutation(len(found.step))
    blocks, loops, mask = pad(found.programs.take(rows))
    again = Programs.join([found.programs.take(rows[:3]), found.programs.take(rows[3:])])
    assert all(torch.equal(a, b) for a, b in zip(pad(again), (blocks, loops, mask), strict=True))
    design = Replayer(tvm.ir.load_json(found.task["mod"]), TARGET, 2)
    for i in range(4):
        n = found.states_of[rows[i]]
        if found.step[rows[i]] != FINAL:
            continue
        insts = found.spaces[found.space[n]]
        cuts = np.cumsum(widths_of(insts))[:-1]
        decisions = [d.tolist() for d in np.split(found.decisions[n], cuts)]
        state = design.states(insts, decisions, [], [FINAL])[FINAL]
        count = len(state.blocks)
        assert int(mask[i].sum()) == count
        np.testing.assert_array_equal(blocks[i, :count], state.blocks.astype(np.float16))
        depth = loops.shape[2]
        assert not state.loops[:, depth:].any()
        np.testing.assert_array_equal(loops[i, :count], state.loops[:, :depth].astype(np.float16))


def test_a_batch_leads_each_trajectory_to_its_states(shards):
    groups = [g for file in sorted(shards.glob("*.parquet"))[:3] for g in load_groups(file)]
    batch = make_batch(groups, 4, np.random.default_rng(0))
    assert len(batch.group) == sum(min(len(g), 4) for g in groups)
    assert batch.final.sum() == len(batch.group)
    last = batch.mask.sum(1)[batch.state_at[batch.final, 0]] - 1
    assert torch.equal(batch.state_at[batch.final, 1], last)
    g = groups[1]
    rows = torch.nonzero(batch.group == 1).squeeze(1)
    assert torch.equal(batch.types[rows[0], : len(g.types)], torch.from_numpy(g.types))
    assert not batch.mask[rows, len(g.types) :].any()


def test_pretraining_learns_resumes_and_hands_over(shards, tmp_path):
    settings = {"epochs": 20, "groups_per_batch": 4, "per_group": 8, "learning_rate": 5e-3, "threads": 1}
    config = PretrainConfig(**settings)
    whole = pretrain(config, shards, tmp_path / "whole", processes=1)["cpu"]
    assert whole["tasks"] == 1 and np.isfinite(list(whole["rollout"].values())).all()

    pretrain(config, shards, tmp_path / "parts", processes=1, deadline=0.0)  # one batch
    (tmp_path / "config.toml").write_text("\n".join(f"{name} = {v}" for name, v in settings.items()))
    parts = invoke("pretrain", tmp_path / "config.toml", shards, tmp_path / "parts", "--processes", 1)
    assert parts["batches"] == parts["of"] and parts["cpu"] == whole

    groups = [g for file in sorted(shards.glob("*.parquet")) for g in load_groups(file)]
    train, held_out = ([g for g in groups if g.split == split] for split in ("train", "validation"))
    torch.manual_seed(1)
    net = WorldModelNet()
    model = build(net, train, np.random.default_rng(0))
    before = evaluate(model, train, config)["cpu"]
    path = tmp_path / "whole" / "pretrained.pt"
    load_pretrained(path, net)
    assert evaluate(model, held_out, config)["cpu"]["rollout"] == whole["rollout"]
    model.nest.load_state_dict(torch.load(path, weights_only=True)["nest"])
    after = evaluate(model, train, config)["cpu"]
    assert after["nest"] > before["nest"] + 0.2 and after["nest_real"] > before["nest_real"] + 0.2
    with pytest.raises(OptionError, match="sizes"):
        load_pretrained(path, WorldModelNet(Sizes(latent=32)))
