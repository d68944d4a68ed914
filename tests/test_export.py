"""The training side end to end on a few tiny tasks: collect, dataset, train, evaluate, export, card."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
from click.testing import CliRunner

from programs import TARGET, conv2d_relu, matmul

torch = pytest.importorskip("torch")

TARGET_JSON = '{"kind":"llvm","mcpu":"x86-64-v3","num-cores":2}'


def corpus_line(mod, name, split, network):
    from pretune.intake import make_task

    task = make_task(name, mod["main"])
    return {
        "id": task.task_id, "name": name, "split": split, "networks": [network], "flops": task.flops,
        "shapes": [[list(s), d] for s, d in task.args], "mod": str(tvm.ir.save_json(task.mod)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Everything `pretune-export` makes of four tasks."""
    from pretune_export.cli import main

    root = tmp_path_factory.mktemp("export")
    lines = [
        corpus_line(matmul(32, 48, 64), "a", "train", "one"),
        corpus_line(matmul(64, 32, 16), "b", "train", "two"),
        corpus_line(conv2d_relu(4, 8, 10), "c", "train", "two"),
        corpus_line(matmul(48, 48, 48), "d", "validation", "three"),
    ]
    (root / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "config.toml").write_text(
        f'datasets = ["{root}/data"]\nepochs = 2\ntasks_per_batch = 2\ncandidates_with_states = 4\n'
        "states_per_candidate = 1\nvalidate_every = 1\nthreads = 1\n"
    )
    commands = [
        ["collect", f"{root}/corpus.jsonl", f"{root}/c", "--target", TARGET_JSON,
         "--random", "8", "--mutated", "2", "--rounds", "1"],
        ["dataset", f"{root}/c", "--corpus", f"{root}/corpus.jsonl", "--out", f"{root}/data",
         "--machine", "here", "--target", TARGET_JSON],
        ["make", f"{root}/config.toml", f"{root}/run", f"{root}/cpu-x86-64-v3"],
    ]  # fmt: skip
    outputs = []
    for command in commands:
        result = CliRunner().invoke(main, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        outputs.append(result.output)
    return root, outputs


def test_collecting_again_measures_nothing(made):
    from pretune_export.cli import main

    root, _ = made
    before = (root / "c" / "measured.jsonl").read_text()
    assert len(before.splitlines()) >= 32
    command = ["collect", f"{root}/corpus.jsonl", f"{root}/c", "--target", TARGET_JSON]
    assert CliRunner().invoke(main, command, catch_exceptions=False).output.strip() == "0"
    assert (root / "c" / "measured.jsonl").read_text() == before


def test_the_dataset_gives_back_what_was_collected(made):
    from pretune_export.dataset import read_parquet

    root, _ = made
    tasks, spaces, rows, machines = read_parquet(root / "data")
    lines = [json.loads(line) for line in (root / "c" / "measured.jsonl").read_text().splitlines()]
    by_key = {(r["task"], r["space"], json.dumps(r["decisions"])): r for r in lines}
    assert len(rows["here"]) >= 8 and set(machines) == {"here"}
    for row in rows["here"]:
        line = by_key[row["task"], row["space"], json.dumps(row["decisions"])]
        assert row["latencies"] == pytest.approx(line["latencies"], rel=1e-6)
        assert row["task"] in tasks and row["space"] < len(spaces[row["task"]])


def test_real_states_follow_the_steps(made):
    """The state after the last instruction is that of the schedule before postprocessing."""
    from pretune.features import ActionEncoder, encode_state
    from pretune.features.program import read_program
    from pretune.space import TaskSpace
    from pretune_export.trajectories import FINAL, Replayer

    mod = conv2d_relu()
    space = TaskSpace.generate(mod, TARGET)
    design = space.spaces[-1]
    encoder = ActionEncoder(read_program(mod["main"]), design.insts, cores=2)
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


def test_the_sdk_runs_what_was_exported(made):
    from pretune.hardware import detect, hardware_for_target
    from pretune.model import TaskScorer, WorldModel, load_weights
    from pretune.space import TaskSpace
    from pretune_export.onnx import check_parity, load_net

    root, _ = made
    folder = root / "cpu-x86-64-v3"
    weights = load_weights(folder)
    assert weights.config.measured_on[0].schedules >= 8
    assert check_parity(load_net(folder), folder) < 1e-4
    space = TaskSpace.generate(matmul(), TARGET)
    scorer = TaskScorer(WorldModel(weights, 1), space, hardware_for_target(TARGET, detect()))
    score, features = scorer.score(0, space.spaces[0].sample(16, np.random.default_rng(0)))
    assert np.isfinite(score).all() and np.isfinite(features).all()


def test_torch_and_onnx_score_a_trajectory_alike(made):
    """The rollout in torch, as trained, against the one the SDK runs."""
    from pretune.model import WorldModel, load_weights
    from pretune_export.onnx import load_net
    from pretune_export.train import TrainConfig, load_data, make_batch

    root, _ = made
    data = load_data(TrainConfig(datasets=[]), root / "run" / "encoded.pickle")
    net = load_net(root / "cpu-x86-64-v3")
    batch = make_batch([data.train[0]], data.machines, 100, np.random.default_rng(0), states=False)
    with torch.no_grad():
        z0 = net.encoder(*batch.initial)
        z = net.rollout(z0[batch.task], batch.types, batch.actions, batch.mask)[-1]
        want = net.ranker(z, batch.summary, batch.hardware)[0].numpy()
    model = WorldModel(load_weights(root / "cpu-x86-64-v3"), 1)
    start = model.encode(data.train[0].initial)
    np.testing.assert_allclose(start, z0[0].numpy(), atol=1e-4)
    for i in range(len(want)):
        steps = [
            (int(batch.types[i, t]), batch.actions[i, t : t + 1].numpy())
            for t in range(batch.types.shape[1])
            if batch.mask[i, t]
        ]
        zT = model.rollout(start, steps)
        got = model.rank(zT, batch.summary[i : i + 1].numpy(), batch.hardware[i].numpy())[0]
        assert got[0] == pytest.approx(want[i], abs=1e-3)


def test_the_card_is_one_the_hub_reads(made):
    from huggingface_hub import ModelCard

    root, _ = made
    card = ModelCard((root / "cpu-x86-64-v3" / "README.md").read_text())
    evaluation = json.loads((root / "run" / "evaluation.json").read_text())
    results = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert results["top1"] == pytest.approx(evaluation["mean"]["top1"], abs=1e-3)
    assert card.data.license == "apache-2.0" and "tvm" in card.data.tags


def test_the_manifest_lists_every_file(made):
    root, _ = made
    folder = root / "cpu-x86-64-v3"
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    real = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert listed == real


def test_the_ranking_loss_prefers_the_right_order():
    from pretune_export.train import ranking_loss

    target = torch.tensor([0.0, -0.5, -2.0, 0.0, -1.0])
    task = torch.tensor([0, 0, 0, 1, 1])
    right = ranking_loss(target.clone(), target, task, 0.3)
    wrong = ranking_loss(-target, target, task, 0.3)
    assert right < 0.5 * wrong
    # Scores of one task say nothing about another's.
    shifted = target + torch.tensor([0.0, 0.0, 0.0, 9.0, 9.0])
    assert ranking_loss(shifted, target, task, 0.3) == pytest.approx(float(right), abs=1e-5)


def test_shared_measurements_are_read(tmp_path):
    """The first measurements come as traces; a replayed decision must land in the right slot."""
    import gzip

    from pretune.space import TaskSpace
    from pretune_export.dataset import group_candidates, read_shared

    mod = matmul()
    space = TaskSpace.generate(mod, TARGET)
    rng = np.random.default_rng(0)
    lines, wanted = [], []
    for k, design in enumerate(space.spaces):
        candidate = space.materialise(k, design.sample(1, rng)[0])
        wanted.append([d.tolist() for d in candidate.decisions])
        lines.append(
            {"task": "t", "trace": candidate.trace_json, "ok": 1, "res": [0.001 * (k + 1)], "cal": 0.004}
        )
    task = {"id": "t", "net": "n", "name": "m", "shapes": [], "mod": str(tvm.ir.save_json(mod))}
    for name, rows in (("tasks", [task]), ("measurements", lines)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    tasks, spaces, rows = read_shared(tmp_path)
    assert [r["decisions"] for r in rows] == wanted
    data = group_candidates(tasks[0], spaces["t"], rows, "machine", 2)
    assert sorted(float(x) for g in data.groups for x in g.latency) == [
        0.001 * (k + 1) for k in range(len(lines))
    ]
