"""Evidence for weights, on a few matmuls of the published measurements: baselines, figures, the card."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import config_of, invoke

torch = pytest.importorskip("torch")
pytest.importorskip("xgboost")

PUBLISHED = Path(__file__).parents[1] / "hub_cards" / "datasets" / "cpu-x86-64-v4"
MACHINE = "rocketlake-2"


def write_part(out, training=16, schedules=24):
    """A dataset of plain matmuls: some to train on, and those of the validation networks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tasks = [
        t for t in pq.read_table(PUBLISHED / "tasks.parquet").to_pylist() if t["name"].startswith("matmul")
    ]
    kept = {t["task"] for t in tasks if t["split"] == "validation"}
    kept |= set([t["task"] for t in tasks if t["split"] == "train"][:training])
    out.mkdir()
    for name in ("tasks", "spaces", f"measured-{MACHINE}"):
        table = pq.read_table(PUBLISHED / f"{name}.parquet")
        keep, seen = [], dict.fromkeys(kept, 0)
        for task in table["task"].to_pylist():
            keep.append(task in kept and (not name.startswith("measured") or seen[task] < schedules))
            seen[task] = seen.get(task, 0) + 1
        pq.write_table(table.filter(pa.array(keep)), out / f"{name}.parquet")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with a dataset, and a training run on it."""
    root = tmp_path_factory.mktemp("evidence")
    write_part(root / "data")
    (root / "config.toml").write_text(
        f'datasets = ["{root}/data"]\nepochs = 1\ncandidates_with_states = 4\nstates_per_candidate = 1\n'
        "tasks_per_batch = 4\nvalidate_every = 1\n"
    )
    invoke("train", root / "config.toml", root / "run")
    return root


@pytest.fixture(scope="module")
def data(root):
    from pretune_export.encoded import load_data

    return load_data(config_of(root), root / "run" / "encoded.pickle")


@pytest.fixture(scope="module")
def stores(root, data):
    from pretune_export.dataset import read_machines
    from pretune_export.encoded import machine_key
    from pretune_export.evidence.stores import load_stores

    machines = read_machines(root / "data")
    targets = {machine_key(root / "data", name): machine["target"] for name, machine in machines.items()}
    return load_stores([*data.train, *data.validation], targets, root / "run" / "stores")


def test_stores_count_the_operations_of_the_program(data, stores):
    import tvm

    from pretune.intake import make_task
    from pretune_export.evidence.stores import WIDTH, candidate_keys

    for task in data.validation:
        flops = make_task(task.name, tvm.ir.load_json(task.mod)["main"]).flops
        for group in task.groups:
            for key in candidate_keys(group):
                features = stores[key]
                assert features.dtype == np.float32 and features.shape[1] == WIDTH
                # The first numbers are logarithms of how often each kind of operation is done.
                done = (2.0 ** features[:, :4].astype(np.float64) - 1).sum()
                assert flops * 0.4 < done < flops * 1.6


def test_stores_are_extracted_once(root, data, stores):
    """Neither again, nor for another machine that measured the same candidates."""
    from pretune_export.evidence.stores import candidate_keys, load_stores

    groups = [dataclasses.replace(g, machine="other", latency=g.latency * 2) for g in data.train[0].groups]
    other = dataclasses.replace(data.train[0], groups=groups)
    # No process may start.
    again = load_stores(
        [data.train[0], other], {f"data/{MACHINE}": "", "other": ""}, root / "run" / "stores", processes=0
    )
    keys = [key for group in data.train[0].groups for key in candidate_keys(group)]
    assert set(again) == set(keys) and len(again) == len(keys)
    assert all(np.array_equal(again[key], stores[key]) for key in keys)


@pytest.mark.parametrize(
    "name", ["xgboost-metaschedule", "xgboost-regression", "xgboost-ndcg", "tenset-mlp", "tlp"]
)
def test_baselines_beat_random(data, stores, name):
    from pretune_export.evidence.baselines import BaselineConfig, fit_baseline
    from pretune_export.evidence.ranking import judge

    config = BaselineConfig(
        rounds=40, patience=20, epochs=12, tasks_per_batch=2, mlp_hidden=64, tlp_hidden=32
    )
    score, chosen = fit_baseline(name, data, stores, config)
    mean = judge(score, data.validation)["mean"]
    assert mean["spearman"] > 0.2 and mean["kendall"] > 0.15
    assert mean["top5"] > mean["random_top5"]
    assert 0 < next(iter(chosen.values())) <= 40


def test_tlp_sees_primitives_only(data):
    """Whatever the summary of the loop nest and the block say of an action, its input stays the same."""
    from pretune.features.schema import ACTION, ANNOTATION, DECISION
    from pretune_export.evidence.baselines.networks import primitive_inputs

    group = data.validation[0].groups[0]
    chosen = np.arange(len(group.latency))
    said = ("extent", "from_outer", "from_inner", *DECISION, *ANNOTATION)
    hidden = np.array([name not in said for name in ACTION])
    other = dataclasses.replace(group, actions=[np.where(hidden, 7.0, a) for a in group.actions])
    for a, b in zip(primitive_inputs(group, chosen), primitive_inputs(other, chosen), strict=True):
        assert np.array_equal(a, b)
    seen = np.stack(primitive_inputs(group, chosen))
    assert seen.shape == (len(chosen), len(group.types), 1 + len(said))
    assert (seen.std(0) > 0).any()  # candidates differ in their decisions


def row(machine, networks, weights, best, top1):
    tops = {f"top{k}": top1 for k in (1, 5, 10)}
    return {"machine": machine, "networks": networks, "weights": weights, "best": best, **tops}


def test_weighted_top_k_is_that_of_tenset_and_tlp():
    from pretune_export.evidence.ranking import weighted_top_k

    rows = [
        row("m", ["a", "b"], [3, 1], 2.0, 0.5),  # the choice takes 4 s
        row("m", ["a"], [1], 10.0, 1.0),
    ]
    assert weighted_top_k(rows, 1, "a") == pytest.approx((3 * 2 + 10) / (3 * 4 + 10))
    assert weighted_top_k(rows, 1, "b") == pytest.approx(0.5)
    assert weighted_top_k(rows, 1) == pytest.approx((3 * 2 + 10 + 2) / (3 * 4 + 10 + 4))


def test_random_top_k_is_the_mean_over_all_choices():
    from pretune_export.evidence.ranking import random_top_k

    slower = np.array([1.0, 1.5, 2.0, 4.0, 400.0])
    for k in (1, 2, 5, 10):
        choices = list(itertools.combinations(slower, min(k, 5)))
        assert random_top_k(slower, k) == pytest.approx(np.mean([1 / min(c) for c in choices]))


def test_perfect_and_constant_scores(data):
    from pretune_export.evidence.ranking import judge, slowdowns

    found = judge(lambda task: -slowdowns(task), data.validation)
    assert all(found["mean"][f] == pytest.approx(1) for f in ("top1", "top5", "spearman", "weighted_top1"))
    assert found["mean"]["kendall"] > 0.99  # failures are tied
    assert set(found["machines"]) == {f"data/{MACHINE}"} and "segformer" in found["networks"]
    constant = judge(lambda task: np.zeros(len(slowdowns(task))), data.validation)
    assert constant["mean"]["kendall"] == 0 and constant["mean"]["top1"] < 1


def test_fidelity_takes_the_tasks_with_most_schedules(data):
    from pretune_export.evidence.fidelity import fidelity, with_many_schedules
    from pretune_export.evidence.ranking import slowdowns

    task = data.validation[0]
    group = dataclasses.replace(task.groups[0], latency=task.groups[0].latency.copy())
    group.latency[0] = np.inf
    failing = dataclasses.replace(task, groups=[group, *task.groups[1:]])
    fewer = dataclasses.replace(task, groups=task.groups[:0])
    assert with_many_schedules([fewer, failing], 12, 20) == [failing]
    assert with_many_schedules(data.validation, 12, 200) == []
    assert len(with_many_schedules(data.validation, 2, 20)) == 2
    found = fidelity(lambda task: -slowdowns(task), [failing])
    assert found["mean"]["spearman"] == pytest.approx(1)
    (drawn,) = found["rows"]
    assert len(drawn["scores"]) == len(drawn["latencies"]) == drawn["schedules"] - 1
    assert min(drawn["latencies"]) == pytest.approx(drawn["best"], rel=1e-3)


def test_tasks_with_many_schedules_are_judged_apart(data, monkeypatch):
    from pretune_export.evidence import fidelity

    group = data.validation[0].groups[0]
    latency = np.tile(group.latency, 9)
    large = dataclasses.replace(
        data.validation[0], task="f" * 16, groups=[dataclasses.replace(group, latency=latency)]
    )
    monkeypatch.setattr(fidelity, "MANY", len(latency))
    found = dataclasses.replace(data, test=[large, *data.validation[1:3]])
    assert fidelity.set_apart(found) == ({"test": found.test[1:], "validation": data.validation}, [large])
    twin = dataclasses.replace(large)  # as on another machine
    found = dataclasses.replace(data, test=[large, twin, *data.validation[1:3]])
    assert fidelity.set_apart(found)[0]["test"] == found.test[2:]
    tiny = dataclasses.replace(large, groups=[dataclasses.replace(group, latency=group.latency[:2])])
    found = dataclasses.replace(data, test=[large, tiny])
    assert fidelity.set_apart(found)[0]["test"] == found.test  # what is left cannot be ranked
    only = dataclasses.replace(data, test=[large])
    assert fidelity.set_apart(only) == ({"test": [large], "validation": data.validation}, [large])
    none = dataclasses.replace(data, test=[])
    assert fidelity.set_apart(none) == ({"test": [], "validation": data.validation}, [])


def test_subsets_are_nested_and_validate_alike(root, tmp_path):
    from pretune_export.dataset import read_machines, read_parquet
    from pretune_export.evidence.scaling import subset

    def measured(out, **kept):
        (folder,) = subset([root / "data"], tmp_path / out, **kept)
        tasks, _spaces, rows, machines = read_parquet(Path(folder))
        assert machines == read_machines(root / "data")
        by_split = {"train": set(), "validation": set()}
        for r in rows[MACHINE]:
            by_split[tasks[r["task"]]["split"]].add((r["task"], r["space"], json.dumps(r["decisions"])))
        return by_split

    whole = measured("whole")
    few, more = measured("few", tasks=3), measured("more", tasks=6)
    assert few["validation"] == more["validation"] == whole["validation"]
    assert len({r[0] for r in few["train"]}) == 3 and few["train"] < more["train"] < whole["train"]
    short = measured("short", schedules=5)
    assert short["validation"] == whole["validation"] and short["train"] < whole["train"]
    assert len(short["train"]) == 5 * len({r[0] for r in whole["train"]})


def bench(trials, baseline_trials, ratios, zero, curves=None):
    """What `pretune bench search --trials 0,N` prints of ratios by subgraph, one for each seed."""
    rows = [
        {
            "name": name,
            "seed": seed,
            "ratios": [
                {"trials": n, "baseline_trials": baseline_trials, "ratio": found}
                for n, found in ((0, zero), (trials, ratio))
                if found
            ],
            "curves": curves or {},
        }
        for name, each in ratios.items()
        for seed, ratio in enumerate(each)
    ]
    machine = {"cpu": "Z80", "microarch": "z80", "cores": 2, "weights": "w", "summary": []}
    return {"trials": [0, trials], "baseline_trials": [baseline_trials], "rows": rows, **machine}


def test_search_is_summed_up_by_budget():
    from pretune_export.evidence.search import summarise

    benches = [
        bench(64, 64, {"a": [2.0, 1.0], "b": [2.0, 4.0], "c": [None, None]}, zero=None),
        bench(16, 64, {"a": [1.0], "b": [1.0]}, zero=0.7),
        bench(64, 256, {"a": [0.5]}, zero=None),
    ]
    rows = summarise(benches)
    assert [(r["trials"], r["baseline_trials"]) for r in rows] == [(0, 64), (16, 64), (64, 64), (64, 256)]
    assert rows[2]["geomean"] == pytest.approx(2) and rows[2]["median"] == 2
    assert rows[2]["seed_low"] == pytest.approx(2) == rows[2]["seed_high"]
    assert (rows[2]["subgraphs"], rows[2]["seeds"], rows[2]["cpu"]) == (2, 2, "Z80")
    assert rows[0]["geomean"] == pytest.approx(0.7)


CURVES = {
    "pretune": [[1, 4.0], [2, 2.0], [4, 1.0]],
    "metaschedule": [[1, None], [2, 8.0], [4, 2.0]],
}


def test_curves_are_relative_to_the_end_of_the_baseline():
    from pretune_export.evidence.search import curves

    whole = bench(4, 4, {"a": [2.0], "b": [2.0]}, zero=None, curves=CURVES)
    other = {side: [[n, t and t * 4] for n, t in points] for side, points in CURVES.items()}
    whole["rows"] += bench(4, 4, {"a": [2.0, 2.0]}, zero=None, curves=other)["rows"][1:]
    whole["rows"][-1]["curves"]["pretune"][-1][1] = 16.0
    without = bench(64, 64, {"a": [1.0]}, zero=None)  # of baselines that an earlier version kept
    found = curves([without, whole])
    assert found["baseline_trials"] == 4
    ours = {point["trials"]: point for point in found["pretune"]}
    assert ours[1]["geomean"] == pytest.approx(0.5) and ours[2]["geomean"] == pytest.approx(1)
    assert (ours[4]["low"], ours[4]["high"]) == pytest.approx((0.5, 2))
    assert ours[4]["geomean"] == pytest.approx(2 ** (1 / 3))
    assert [(p["trials"], p["geomean"]) for p in found["metaschedule"]] == [
        (2, pytest.approx(0.25)),
        (4, pytest.approx(1)),
    ]
    assert curves([without]) == {}


@pytest.fixture(scope="module")
def evaluation(root):
    """Of a run with all parts that there can be."""
    run = root / "run"
    ablations = {"no transition": {"top1": 0.4, "top5": 0.7, "spearman": 0.3}}
    (run / "ablations.json").write_text(json.dumps(ablations))
    (run / "search-64.json").write_text(
        json.dumps(bench(64, 64, {"a": [1.5, 2.0], "b": [1.5, 2.0]}, zero=0.8, curves=CURVES))
    )
    invoke("baselines", root / "config.toml", run, "--only", "xgboost-regression")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretune_export.processes.CHUNK", 100)  # starting processes takes longer than encoding
        patch.setattr("pretune_export.evidence.fidelity.MANY", 20)
        invoke("scaling", root / "config.toml", run, "--tasks", 4, "--schedules", 8)
        invoke("evaluate", root / "config.toml", run)
    return json.loads((run / "evaluation.json").read_text())


def test_an_evaluation_has_all_parts(root, evaluation):
    from PIL import Image

    assert evaluation["main"] == "validation" and evaluation["mean"] == evaluation["validation"]["mean"]
    assert set(evaluation["baselines"]) == {"xgboost-regression"}
    found = evaluation["baselines"]["xgboost-regression"]
    gain = evaluation["mean"]["top1"] - found["validation"]["top1"]
    assert found["gain"]["mean"] == pytest.approx(gain)
    assert found["gain"]["low"] <= gain <= found["gain"]["high"]
    scaling = [(r["varied"], r["tasks"], r["schedules"]) for r in evaluation["scaling"]]
    assert scaling[:2] == [("tasks", 4, 96), ("schedules", 16, 128)]
    assert scaling[2:] == [("tasks", 16, 384), ("schedules", 16, 384)]
    assert [r["trials"] for r in evaluation["search"]] == [0, 64]
    assert evaluation["curves"]["pretune"][-1]["geomean"] == pytest.approx(2)
    fidelity = evaluation["fidelity"]
    assert len(fidelity["rows"]) == evaluation["validation"]["tasks"] >= 4
    assert set(fidelity["baselines"]) == {"xgboost-regression"}
    whole = evaluation["baselines"]["xgboost-regression"]["validation"]  # of the same tasks
    assert fidelity["baselines"]["xgboost-regression"]["kendall"] == pytest.approx(whole["kendall"])
    assert evaluation["ablations"]["no transition"]["top1"] == 0.4
    image = np.asarray(Image.open(root / "run" / "evaluation.png").convert("L"))
    assert image.shape[1] > 1000 and (image < 128).mean() > 0.005


def test_baselines_are_kept_while_the_data_is_the_same(root, evaluation, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(root / "run", run)
    before = (run / "baselines.json").read_text()
    invoke("baselines", root / "config.toml", run, "--only", "xgboost-regression")
    assert (run / "baselines.json").read_text() == before
    (run / "baselines.json").write_text(json.dumps(json.loads(before) | {"data": "other"}))
    line = invoke("evaluate", root / "config.toml", run, status=2).stderr.strip().splitlines()[-1]
    assert "baselines.json is of other data; run: pretune-export baselines" in line
    (run / "baselines.json").unlink()
    (run / "search-old.json").write_text(json.dumps({"trials": 64, "rows": []}))
    line = invoke("evaluate", root / "config.toml", run, status=2).stderr.strip().splitlines()[-1]
    assert "search-old.json is of an earlier version; run: pretune bench search --json" in line


def test_the_card_shows_an_evaluation(evaluation, weights, tmp_path):
    from pretune_export.card import write_card

    folder = tmp_path / "weights"
    shutil.copytree(weights, folder)
    text = write_card(folder, evaluation).read_text()
    mean = evaluation["baselines"]["xgboost-regression"]["validation"]
    assert (
        f"| xgboost-regression | {mean['top1']:.3f} | {mean['top5']:.3f} | {mean['weighted_top1']:.3f}"
        in text
    )
    assert "| no transition | 0.400 | 0.700 | - | - | 0.300 |" in text
    assert "| 64 | 64 | 1.73 | 1.73 to 1.73 | 2 (1.50 to 2.00) | 1.75 | 2 | Z80, 2 cores |" in text
    assert "| none: first choice | 64 | 0.80 |" in text
    mean = evaluation["fidelity"]["baselines"]["xgboost-regression"]
    assert f"| mean, xgboost-regression | | | {mean['spearman']:.3f} |" in text
    assert "| tasks | 4 | 96 |" in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    for line, ruler in itertools.pairwise(tables):
        if set(ruler) <= set("|-"):
            assert line.count("|") == ruler.count("|")


def test_mistakes_are_one_line(root, tmp_path):
    config = root / "config.toml"
    line = invoke("baselines", config, tmp_path, "--only", "ansor", status=2).stderr.strip()
    assert (
        line.startswith("error: no baseline 'ansor'; there are: xgboost-metaschedule, ") and "\n" not in line
    )
    line = invoke("scaling", config, tmp_path, "--tasks", "many", status=2).stderr.strip()
    assert line == "error: --tasks many: expected numbers, as in --tasks 50,100"
    line = invoke("scaling", config, tmp_path, status=2).stderr.strip()
    assert line == "error: nothing to vary; give --tasks or --schedules"
