"""The training side end to end on a few tiny tasks: collect, dataset, train, evaluate, export, card."""

from __future__ import annotations

import gzip
import json
import shutil
import sys

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest
import tvm

from commands import config_of, invoke
from pretune.measure.noise import MAX_DRIFT
from programs import TARGET, conv2d_relu, matmul

torch = pytest.importorskip("torch")

TARGET_JSON = '{"kind":"llvm","mcpu":"x86-64-v3","num-cores":2}'


def corpus_task(mod, name, split, network):
    from pretune.intake import make_task
    from pretune_export.networks import CorpusTask

    task = make_task(name, mod["main"])
    text = str(tvm.ir.save_json(task.mod))
    return CorpusTask(task.task_id, (network,), (1,), split, name, 1, task.args, task.flops, 1, text)


def write_corpus(path, *tasks):
    path.write_bytes(b"".join(msgspec.json.encode(task) + b"\n" for task in tasks))


@pytest.fixture(scope="module")
def made(tmp_path_factory, any_drift):
    """The folder of everything `pretune-export` makes of five tasks."""
    root = tmp_path_factory.mktemp("export")
    write_corpus(
        root / "corpus.jsonl",
        corpus_task(matmul(32, 48, 64), "a", "train", "lenet@32"),
        corpus_task(matmul(64, 32, 16), "b", "train", "two"),
        corpus_task(conv2d_relu(4, 8, 10), "c", "train", "two"),
        corpus_task(matmul(48, 48, 48), "d", "validation", "three"),
    )
    write_corpus(root / "suite.jsonl", corpus_task(matmul(16, 48, 80), "e", "test", "head"))
    (root / "config.toml").write_text(
        f'datasets = ["{root}/data"]\ntest_datasets = ["{root}/data-test"]\n'
        "epochs = 2\ntasks_per_batch = 2\ncandidates_with_states = 4\n"
        "states_per_candidate = 1\nvalidate_every = 1\nthreads = 1\n"
    )
    for name, data in (("corpus", "data"), ("suite", "data-test")):
        file = f"{root}/{name}.jsonl"
        counts = ("--random", 8, "--mutated", 2, "--rounds", 1)
        threads = ("--serial",) if name == "suite" else ()
        invoke("collect", file, root / "c", "--target", TARGET_JSON, *counts, *threads)
        parts = ("--corpus", file, "--out", root / data, "--machine", "here", "--target", TARGET_JSON)
        invoke("dataset", root / "c", *parts)
    invoke("make", root / "config.toml", root / "run", root / "cpu-x86-64-v3")
    return root


def test_collecting_again_measures_nothing(made):
    before = (made / "c" / "measured.jsonl").read_text()
    assert len(before.splitlines()) >= 32
    again = invoke("collect", made / "corpus.jsonl", made / "c", "--target", TARGET_JSON)
    assert again.stdout.strip() == "0"
    assert (made / "c" / "measured.jsonl").read_text() == before


def test_a_dead_pool_leaves_the_tasks_to_do(made, tmp_path, monkeypatch):
    from pretune.errors import MeasureError
    from pretune.measure import MeasurePool
    from pretune_export.collect import CollectOptions, Collector
    from pretune_export.networks import load_corpus

    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with MeasurePool(TARGET) as pool:
        collector = Collector(TARGET, tmp_path / "c", CollectOptions(), pool)
        with pytest.raises(MeasureError):
            collector.run(list(load_corpus(made / "corpus.jsonl")))
    assert not (tmp_path / "c" / "done.jsonl").exists()
    assert not (tmp_path / "c" / "failed.jsonl").exists()


def test_a_task_measured_twice_is_read_once(tmp_path, monkeypatch):
    """As after a run that was stopped in the middle of a task, and in the middle of a line."""
    from pretune_export.collect import CollectOptions, Collector, read_collected

    def row(latency, decision, drift=1.0):
        return json.dumps(
            {"task": "t", "space": 0, "decisions": [[decision]], "latencies": [latency],
             "calibration": [1.0, drift]}
        )  # fmt: skip

    monkeypatch.setattr("pretune_export.collect.MAX_DRIFT", MAX_DRIFT)
    (tmp_path / "spaces.jsonl").write_text(json.dumps({"task": "t", "spaces": [[]]}) + "\n")
    (tmp_path / "measured.jsonl").write_text("\n".join([row(1.0, 1), row(2.0, 2), row(3.0, 3)[:20]]))
    collector = Collector(TARGET, tmp_path, CollectOptions(), pool=None)
    for again in (row(4.0, 1), row(5.0, 2, drift=1.5)):
        collector.append("measured.jsonl", json.loads(again))
    spaces, rows = read_collected([tmp_path])
    assert spaces == {"t": [[]]}
    # The last of the first candidate counts; of the second, the one that did not see the machine slow.
    assert [(r["decisions"], r["latencies"]) for r in rows] == [([[1]], [4.0]), ([[2]], [2.0])]


def test_the_dataset_gives_back_what_was_collected(made):
    from pretune_export.dataset import read_parquet

    tasks, spaces, rows, machines = read_parquet(made / "data")
    lines = [json.loads(line) for line in (made / "c" / "measured.jsonl").read_text().splitlines()]
    by_key = {(r["task"], r["space"], json.dumps(r["decisions"])): r for r in lines}
    assert len(rows["here"]) >= 8 and set(machines) == {"here"}
    for row in rows["here"]:
        line = by_key[row["task"], row["space"], json.dumps(row["decisions"])]
        assert row["latencies"] == pytest.approx(line["latencies"], rel=1e-6)
        assert row["task"] in tasks and row["space"] < len(spaces[row["task"]])
    machine = machines["here"]
    assert (machine["kind"], machine["arch"], machine["isa_level"]) == ("cpu", "x86_64", "x86-64-v3")


def test_what_ran_on_one_thread_too_is_a_machine_of_one_core(made):
    from pretune_export.dataset import read_parquet

    _tasks, _spaces, rows, machines = read_parquet(made / "data-test")
    assert {name: m["cores"] for name, m in machines.items()} == {"here": "2", "here-serial": "1"}
    lines = [json.loads(line) for line in (made / "c" / "measured.jsonl").read_text().splitlines()]
    serial = {json.dumps(r["decisions"]): r["serial_latencies"] for r in lines if r["serial_latencies"]}
    assert serial and len(rows["here-serial"]) >= len(serial)
    for row in rows["here-serial"]:
        want = serial.get(json.dumps(row["decisions"]), [])
        assert row["latencies"] == pytest.approx(want, rel=1e-6)


def rewrite(made, out, name, keep, change_space=False, **changes):
    """Write those tasks of the collected folder that are called `keep`, as measured by machine `name`."""
    from pretune_export.collect import read_collected
    from pretune_export.dataset import FIRST_MACHINE, describe_machine, write_parquet
    from pretune_export.networks import load_corpus

    spaces, rows = read_collected([made / "c"])
    tasks = [t for t in load_corpus(made / "corpus.jsonl") if t.name in keep]
    tasks = [msgspec.structs.replace(t, **changes) for t in tasks]
    known = {t.id for t in tasks}
    if change_space:
        spaces = {task: [each[:-1] for each in all_] for task, all_ in spaces.items()}
    machine = describe_machine(FIRST_MACHINE, name=name, target=TARGET_JSON, days=["2026-11-30"])
    write_parquet(out, tasks, spaces, [r for r in rows if r["task"] in known], machine)
    return {t.name: t.id for t in tasks}


def test_machines_share_a_dataset(made, tmp_path):
    from pretune_export.dataset import read_parquet

    ids = rewrite(made, tmp_path, "first", "ab")
    ids |= rewrite(made, tmp_path, "second", "bc")
    tasks, spaces, rows, machines = read_parquet(tmp_path)
    assert set(machines) == {"first", "second"}
    assert set(tasks) == set(spaces) == set(ids.values())
    assert {r["task"] for r in rows["first"]} == {ids["a"], ids["b"]}
    assert {r["task"] for r in rows["second"]} == {ids["b"], ids["c"]}
    # What a machine measures again takes the place of what it measured before.
    rewrite(made, tmp_path, "first", "a", change_space=True)
    assert set(read_parquet(tmp_path)[0]) == set(ids.values())
    # Whoever has other design spaces of a task adds them.
    rewrite(made, tmp_path, "second", "a")
    tasks, spaces, rows, machines = read_parquet(tmp_path)
    first, second = ({r["space"] for r in rows[name]} for name in ("first", "second"))
    assert set(tasks) == {ids["a"]} and not first & second
    assert [spaces[ids["a"]][k] for k in sorted(first)] == [spaces[ids["a"]][k][:-1] for k in sorted(second)]
    rewrite(made, tmp_path, "first", "b")
    rewrite(made, tmp_path, "second", "c")
    assert set(read_parquet(tmp_path)[0]) == {ids["b"], ids["c"]}


def test_what_is_collected_later_is_added(made, tmp_path):
    from pretune_export.dataset import read_parquet

    out = tmp_path / "data"
    parts = ("--corpus", made / "corpus.jsonl", "--out", out, "--machine", "here", "--target", TARGET_JSON)
    for _twice in range(2):
        invoke("dataset", made / "c", *parts, "--append")
    want = read_parquet(made / "data")
    assert len(list((out / "shards").iterdir())) == 2 and read_parquet(out) == want
    assert json.loads(invoke("compact", out).stdout) == {"here": len(want[2]["here"])}
    assert not list((out / "shards").iterdir()) and read_parquet(out) == want


def test_test_tasks_are_trained_on_nowhere(made, tmp_path):
    from pretune.errors import OptionError
    from pretune_export.encoded import load_data

    rewrite(made, tmp_path / "leak", "here", "b", split="test")
    with pytest.raises(OptionError, match=r"1 tasks of .*leak are in a dataset to train on as well"):
        load_data(config_of(made, test_datasets=[f"{tmp_path}/leak"]))
    with pytest.raises(OptionError, match=r"leak is in datasets, but its task .* is of the test split"):
        load_data(config_of(made, datasets=[f"{tmp_path}/leak"]))
    with pytest.raises(OptionError, match="data is in test_datasets, but its task"):
        load_data(config_of(made, datasets=[], test_datasets=[f"{made}/data"]))


def test_what_another_dataset_validates_with_is_not_trained_on(made, tmp_path, capsys):
    from pretune_export.encoded import _choose_tasks

    ids = rewrite(made, tmp_path, "second", "ad", split="train")
    chosen = _choose_tasks(config_of(made, datasets=[f"{made}/data", str(tmp_path)], test_datasets=[]))
    found = sorted((task["split"], task["id"]) for task, *_rest in chosen)
    assert ("train", ids["d"]) not in found and ("validation", ids["d"]) in found
    assert found.count(("train", ids["a"])) == 2  # one for each dataset
    assert "1 training tasks are dropped" in capsys.readouterr().err


def test_one_machine_measures_for_several_targets(made, tmp_path):
    """In each dataset it goes by the same name, and has the hardware vector of the target."""
    from pretune_export.encoded import load_data

    other = tmp_path / "other"
    shutil.copytree(made / "data", other)
    file = other / "measured-here.parquet"
    table = pq.read_table(file)
    vector = json.dumps([0.25] * 16).encode()
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"pretune.vector": vector}), file)
    config = config_of(made, datasets=[f"{made}/data", str(other)], test_datasets=[])
    found = load_data(config, tmp_path / "encoded.pickle")
    assert (found.machines["other/here"].vector == 0.25).all()
    assert (found.machines["data/here"].vector != 0.25).any()
    assert {task.groups[0].machine for task in found.train} == set(found.machines)


def test_a_run_of_other_data_starts_anew(made, tmp_path, capsys):
    from pretune.errors import OptionError
    from pretune_export.encoded import load_data
    from pretune_export.train import load_best, train

    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(made / "data", data)
    shutil.copytree(made / "run", run)
    same = config_of(made, threads=2, test_datasets=[])
    load_best(run, same)
    train(config_of(made), run, cache=run / "encoded.pickle")
    assert "anew" not in capsys.readouterr().err
    assert len((run / "log.jsonl").read_text().splitlines()) == 2

    config = config_of(made, datasets=[str(data)], test_datasets=[], epochs=1)
    with pytest.raises(OptionError, match="of another configuration or other data"):
        load_best(run, config)
    rewrite(made, data, "second", "a")
    train(config, run, cache=run / "encoded.pickle")
    said = capsys.readouterr().err
    assert "encoded.pickle is of other data: encoding anew" in said and "training anew" in said
    assert len((run / "log.jsonl").read_text().splitlines()) == 1
    load_best(run, config)
    assert set(load_data(config, run / "encoded.pickle").machines) == {"data/here", "data/second"}
    assert capsys.readouterr().err == ""


def test_the_sdk_runs_what_was_exported(made):
    from pretune.hardware import detect, hardware_for_target
    from pretune.model import TaskScorer, WorldModel, load_weights
    from pretune.space import TaskSpace
    from pretune_export.nets import load_net
    from pretune_export.onnx import check_parity

    folder = made / "cpu-x86-64-v3"
    weights = load_weights(folder)
    assert weights.config.measured_on[0].schedules >= 8
    covers = weights.config.covers
    assert (covers.kind, covers.arch, covers.isa_level) == ("cpu", "x86_64", "x86-64-v3")
    assert check_parity(load_net(folder), folder) < 1e-4
    space = TaskSpace.generate(matmul(), TARGET)
    scorer = TaskScorer(WorldModel(weights, 1), space, hardware_for_target(TARGET, detect()))
    score, features = scorer.score(0, space.spaces[0].sample(16, np.random.default_rng(0)))
    assert np.isfinite(score).all() and np.isfinite(features).all()


def test_folded_networks_compute_the_same():
    from pretune.features.schema import ACTION, SUMMARY
    from pretune.hardware.hardware import VECTOR_SIZE
    from pretune_export.folded import folded
    from pretune_export.nets import Sizes, WorldModelNet

    torch.manual_seed(0)
    sizes = Sizes()
    net = WorldModelNet(sizes).eval()
    for inputs in (net.action.input, net.ranker.input):
        width = len(inputs.mean)
        spread = 3 * torch.rand(width) ** 4  # some hardly vary
        inputs.fit(torch.randn(width) + spread * torch.randn(500, width))
    z = torch.randn(64, sizes.latent)
    inputs = {
        "action": (torch.tensor([3]), 10 * torch.randn(64, len(ACTION))),  # much of it is cut
        "transition": (z, torch.randn(64, sizes.transition_hidden)),
        "ranker": (z, 10 * torch.randn(64, len(SUMMARY)), torch.rand(1, VECTOR_SIZE)),
    }
    parts = folded(net)
    assert set(parts) == set(inputs)
    with torch.no_grad():
        for name, part in parts.items():
            torch.testing.assert_close(
                part(*inputs[name]), getattr(net, name)(*inputs[name]), rtol=1e-4, atol=1e-4
            )


def test_torch_and_onnx_score_a_trajectory_alike(made):
    """The rollout in torch, as trained, against the one the SDK runs."""
    from pretune.model import WorldModel, load_weights
    from pretune_export.batches import make_batch
    from pretune_export.encoded import load_data
    from pretune_export.nets import load_net

    data = load_data(config_of(made), made / "run" / "encoded.pickle")
    net = load_net(made / "cpu-x86-64-v3")
    batch = make_batch([data.train[0]], data.machines, 100, np.random.default_rng(0), states=False)
    with torch.no_grad():
        z0 = net.encoder(*batch.initial)
        z = net.rollout(z0[batch.origin], batch.types, batch.actions, batch.mask)[-1]
        want = net.ranker(z, batch.summary, batch.hardware)[0].numpy()
    model = WorldModel(load_weights(made / "cpu-x86-64-v3"), 1)
    start = model.encode(data.train[0].groups[0].initial)
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

    card = ModelCard((made / "cpu-x86-64-v3" / "README.md").read_text())
    evaluation = json.loads((made / "run" / "evaluation.json").read_text())
    assert evaluation["main"] == "test" and list(evaluation["test"]["networks"]) == ["head"]
    assert list(evaluation["validation"]["networks"]) == ["three"]
    assert evaluation["mean"] == evaluation["test"]["mean"]
    results = {r.metric_type: r.metric_value for r in card.data.eval_results}
    assert results["top1"] == pytest.approx(evaluation["mean"]["top1"], abs=1e-3)
    assert card.data.license == "apache-2.0" and "tvm" in card.data.tags
    text = " ".join(card.text.split())
    assert "layers of 1 networks and of 1 layer kinds of a first set." in text
    assert "Validation networks chose the epoch, so their figures flatter" in text
    command = f"pretune-export make {made}/config.toml RUN {made}/cpu-x86-64-v3"
    assert f"Trained by `{command}`" in text


def test_the_manifest_lists_every_file(made):
    folder = made / "cpu-x86-64-v3"
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    real = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"manifest.json"}
    assert listed == real


def test_the_ranking_loss_prefers_the_right_order():
    from pretune_export.losses import ranking_loss

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
    from pretune_export.dataset import group_candidates, read_parquet, read_shared

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
    failed = space.materialise(0, space.spaces[0].sample(1, rng)[0])
    lines.append({**lines[0], "trace": failed.trace_json, "ok": 0, "res": [], "err": "timeout"})
    wanted.append([d.tolist() for d in failed.decisions])
    assert wanted[-1] != wanted[0]
    task = {"id": "t", "net": "n", "name": "m", "shapes": [], "mod": str(tvm.ir.save_json(mod))}
    for name, rows in (("tasks", [task]), ("measurements", lines)):
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    (task,), spaces, rows = read_shared(tmp_path)
    assert task.id == corpus_task(mod, "m", "train", "n").id  # as everywhere else
    assert [r["decisions"] for r in rows] == wanted
    assert [r["error_kind"] for r in rows] == [""] * (len(rows) - 1) + ["unknown"]

    invoke("convert", tmp_path, tmp_path / "data")
    tasks, spaces, by_machine, _machines = read_parquet(tmp_path / "data")
    rows = by_machine["znver4-first"]
    assert [r["decisions"] for r in rows] == wanted and all(r["calibration"] == [] for r in rows)
    data = group_candidates(tasks[task.id], spaces[task.id], rows, "znver4-first", 2)
    latencies = sorted(float(x) for g in data.groups for x in g.latency)
    assert latencies == pytest.approx([0.001 * (k + 1) for k in range(len(wanted) - 1)] + [np.inf])


SUITE = """
import torch

class Linear:
    def __init__(self, *sizes):
        self.sizes = sizes
    def build(self):
        n, k, m = self.sizes
        return torch.nn.Linear(k, m), (torch.randn(n, k),)

SUBGRAPHS = {"one": Linear(4, 64, 48), "other": Linear(4, 96, 32), "twin": Linear(4, 64, 48)}
"""


def test_a_suite_is_written_for_tests(tmp_path):
    from pretune_export.networks import forbidden_task_ids, load_corpus
    from pretune_export.suite import load_suite, tasks_of_module

    suite, out = tmp_path / "suite.py", tmp_path / "suite.jsonl.gz"
    suite.write_text(SUITE)
    count = int(invoke("suite", suite, out, "--target", TARGET_JSON).stdout)
    tasks = list(load_corpus(out))
    assert len(tasks) == count == 2
    assert {task.networks: task.weights for task in tasks} == {("one", "twin"): (1, 1), ("other",): (1,)}
    assert all(task.split == "test" and task.decisions > 0 for task in tasks)
    # The identities that training is kept from, and those that the benchmark tunes.
    assert {task.id for task in tasks} == forbidden_task_ids(suite, TARGET)
    module, inputs = load_suite(suite)["other"].build()
    (task,) = tasks_of_module(module, inputs, target=TARGET, name="other")
    assert task.task_id in {task.id for task in tasks}

    packed = out.read_bytes()
    out.write_bytes(gzip.decompress(packed))
    assert list(load_corpus(out)) == tasks
    out.write_text("{}")
    line = invoke("collect", out, tmp_path / "c", status=2).stderr.strip()
    assert line.startswith(f"error: {out}: line 1 is no task") and "\n" not in line


def test_mistakes_are_one_line(tmp_path, monkeypatch):
    line = invoke("corpus", tmp_path / "c.jsonl.gz", "--only", "nope", status=2).stderr.strip()
    assert line.startswith("error: unknown network 'nope'; the names are: ") and "\n" not in line
    (tmp_path / "typo.toml").write_text("datasets = []\nepoch = 3\n")
    assert "epoch" in invoke("train", tmp_path / "typo.toml", tmp_path / "run", status=2).stderr
    for name in [name for name in sys.modules if name.startswith("pretune_export.dataset")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    line = invoke("convert", tmp_path, tmp_path / "out", status=4).stderr.strip()
    assert line.startswith("error: pretune-export (pyarrow) needs") and "pretune[export]" in line
