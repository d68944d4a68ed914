"""Fine-tuning for real on three tiny tasks: killed, resumed, trained for an epoch, judged, registered."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
import tvm
from click.testing import CliRunner

from pretune.measure import RPCAddress
from programs import TARGET, matmul

torch = pytest.importorskip("torch")

TRIALS = 48
COMMAND = """
import math
from pretune_export import collect
collect.MAX_DRIFT = math.inf
from pretune.cli import main
main()
"""
"""`pretune` in a process of its own that measures on a busy machine as the tests do."""
NO_FARM = RPCAddress("127.0.0.1", 1, "key")


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("programs")
    paths = []
    for n, shape in enumerate(((32, 48, 64), (64, 32, 16), (48, 48, 48))):
        paths.append(folder / f"p{n}.json")
        paths[-1].write_text(str(tvm.ir.save_json(matmul(*shape))))
    return paths


def options(programs, out, weights):
    return {"tasks": programs, "target": TARGET, "trials": TRIALS, "base": weights, "out": out}


def rows(out: Path, name: str = "measured") -> list[dict]:
    file = out / "collected" / f"{name}.jsonl"
    lines = file.read_text().split("\n") if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def key(row: dict) -> tuple:
    return row["task"], row["space"], json.dumps(row["decisions"])


@pytest.fixture(scope="module")
def killed(programs, weights, tmp_path_factory) -> tuple[Path, list[dict]]:
    """The folder of a run that was killed in the middle of a batch, and what it had measured."""
    out = tmp_path_factory.mktemp("runs") / "out"
    tasks = [part for path in programs for part in ("--tasks", str(path))]
    command = [sys.executable, "-c", COMMAND, "finetune", *tasks, "--target", str(TARGET)]
    command += ["--trials", str(TRIALS), "--base", str(weights), "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    while not (rows(out) and rows(out, "pending")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows(out) + rows(out, "pending")
    assert 0 < len(before) < TRIALS
    return out, before


@pytest.fixture(scope="module")
def finished(killed, programs, weights, any_drift):
    """The result of the same run, resumed to its end, and what it reported on the way."""
    import pretune
    from pretune_export.finetune import plan

    out, _before = killed
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plan.FINE_TUNING, "epochs", 1)
        patch.setitem(plan.FINE_TUNING, "least_steps", 0)
        patch.setitem(plan.FINE_TUNING, "candidates_with_states", 2)
        result = pretune.finetune(**options(programs, out, weights), search=False, on_progress=seen.append)
    return result, seen


def test_a_killed_run_goes_on_without_measuring_anything_again(killed, finished):
    out, before = killed
    result, seen = finished
    after = {key(row): row["latencies"] for row in rows(out)}
    assert len(rows(out)) == len(after) == result.schedules == TRIALS
    # A kill while a batch is put away leaves some of its rows in two places.
    had = {key(row): row["latencies"] for row in before}
    assert set(list(after)[: len(had)]) == set(had)
    assert all(after[schedule] == latencies for schedule, latencies in had.items())
    assert list(dict.fromkeys(p.phase for p in seen)) == ["measuring", "training", "judging"]


def test_models_choose_for_training_tasks_only(killed, finished):
    from pretune_export.networks import load_corpus

    out, _before = killed
    splits = {task.id: task.split for task in load_corpus(out / "tasks.jsonl.gz")}
    assert sorted(splits.values()) == ["test", "train", "validation"]
    policies = {
        split: {r["policy"] for r in rows(out) if splits[r["task"]] == split} for split in splits.values()
    }
    assert "model" in policies["train"] and "random" in policies["train"]
    assert "model" not in policies["test"] | policies["validation"]


def test_the_weights_can_be_published_and_say_where_they_come_from(finished):
    from huggingface_hub import ModelCard

    from pretune.hub.validate import validate

    result, _seen = finished
    config = validate(result.weights)
    assert (config.covers.isa_level, config.measured_on[0].cores) == ("x86-64-v3", 2)
    card = ModelCard.load(result.weights / "README.md")
    assert card.data.get("base_model") == "pretune/cpu-x86-64-v4"
    assert "Fine-tuned from `cpu-x86-64-v4` with 48 schedules" in card.text
    assert "None of these networks" not in card.text
    for name in ("top1", "top5", "spearman"):
        assert config.quality[name] == pytest.approx(result.after[name])


def test_training_started_from_the_base(killed, finished):
    """An epoch moves the networks a little; the spread of their inputs stays."""
    from pretune_export.nets import load_net

    result, _seen = finished
    base, tuned = load_net(killed[0] / "base").state_dict(), load_net(result.weights).state_dict()
    moved = {name: float((tuned[name] - value).abs().max()) for name, value in base.items()}
    assert all(moved[name] == 0 for name in moved if name.endswith(("input.mean", "input.scale")))
    assert 0 < max(moved.values()) < 0.05


def test_only_better_weights_are_registered_and_then_used(finished, monkeypatch, tmp_path):
    from pretune.hardware import detect, hardware_for_target
    from pretune.hub.sources import find_weights
    from pretune_export.finetune.register import register, used_by

    result, _seen = finished
    assert not result.kept and result.registered is None  # with one held-out task, and no search
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    hardware = hardware_for_target(TARGET, detect())
    assert find_weights(hardware).config.name == "cpu-x86-64-v2"
    for _again in range(2):  # the second time they take the place of the first
        place = register(result.weights, "mine")
        assert find_weights(hardware).path == place
    assert used_by(place, hardware, []) == "pretune tune"
    older = hardware_for_target(tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v2"}), detect())
    told = f"pretune tune --weights {place} with the same --target and --rpc-tracker"
    assert used_by(place, older, ["--target", "--rpc-tracker"]) == told
    assert [p.name for p in place.parent.iterdir()] == ["mine"]
    assert [p.name for p in place.parents[1].iterdir()] == ["weights"]


def test_a_finished_run_is_not_done_again(killed, finished, programs, weights):
    import pretune

    out, _before = killed
    result, _seen = finished
    again = pretune.finetune(**options(programs, out, weights), search=False)
    assert again == result
    with pytest.raises(pretune.errors.OptionError, match="trials: 48"):
        pretune.finetune(**options(programs, out, weights) | {"trials": 47})
    with pytest.raises(pretune.errors.OptionError, match="seed: 0"):  # and what was made stays
        pretune.finetune(**options(programs, out, weights) | {"trials": 64}, seed=1)
    with pytest.raises(pretune.errors.OptionError, match=r"shapes: \{\}"):
        pretune.finetune(**options(programs, out, weights), shapes={"x": (1, 3)})
    with pytest.raises(pretune.errors.OptionError, match="farm: False"):
        pretune.finetune(**options(programs, out, weights), rpc=NO_FARM)
    before = programs[1].read_text()
    programs[1].write_text(programs[0].read_text())
    with pytest.raises(pretune.errors.OptionError, match=r"\(\S*p1.json had other tasks\)"):
        pretune.finetune(**options(programs, out, weights))
    programs[1].write_text(before)


def test_a_larger_budget_goes_on_from_what_was_measured(
    killed, finished, programs, weights, tmp_path, any_drift, monkeypatch
):
    """What was kept before is withdrawn until the new weights are judged."""
    import pretune
    from pretune_export.finetune import loop, plan

    source, _before = killed
    out = tmp_path / "out"
    shutil.copytree(source, out)
    (out / "result.json").unlink()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name, value in {"epochs": 1, "least_steps": 0, "candidates_with_states": 2}.items():
        monkeypatch.setitem(plan.FINE_TUNING, name, value)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "better", lambda *_: (True, "they are said to be"))
        kept = pretune.finetune(**options(programs, out, weights), search=False)
    assert kept.kept and kept.registered.is_dir() and kept.used_by
    more = options(programs, out, weights) | {"trials": TRIALS + 6}
    result = pretune.finetune(**more, search=False)
    assert not result.kept and not kept.registered.exists()
    assert result.schedules == len({key(row) for row in rows(out)}) == len(rows(out)) == TRIALS + 6
    assert rows(out)[:TRIALS] == rows(source)


def test_weights_that_are_no_better_after_all_are_withdrawn(finished, monkeypatch, tmp_path):
    from pretune_export.finetune.register import register, withdraw

    result, _seen = finished
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    place = register(result.weights, "mine")
    assert "is removed" in withdraw(place, result.weights) and not place.exists()
    place = register(result.weights, "mine")
    (place / "model.safetensors").write_bytes(b"of a later run")
    assert "stays" in withdraw(place, result.weights) and place.exists()


def test_a_task_that_was_killed_with_its_share_does_not_end_the_run(killed, weights, tmp_path, any_drift):
    from pretune.hardware import detect, hardware_for_target
    from pretune.measure import MeasurePool
    from pretune.model import WorldModel, load_weights
    from pretune_export.collect import CollectOptions, Collector
    from pretune_export.finetune.measure import Budget, Measurer
    from pretune_export.networks import load_corpus

    out, _before = killed
    target = tvm.target.Target(TARGET)
    tasks = [msgspec.structs.replace(t, split="test") for t in load_corpus(out / "tasks.jsonl.gz")][:2]
    model, hardware = WorldModel(load_weights(weights), 1), hardware_for_target(target, detect())

    def measured(pool):
        collector = Collector(target, tmp_path, CollectOptions(), pool)
        return Measurer(collector, model, hardware, 0, lambda *_: None).run(tasks, Budget(2))

    with MeasurePool(target) as pool:
        assert measured(pool) == 2
        file = tmp_path / "measured.jsonl"
        first = [line for line in file.open() if json.loads(line)["task"] == tasks[0].id]
        assert len(first) == 1
        file.write_text("".join(first))
        (tmp_path / "done.jsonl").unlink()
        assert measured(pool) == 2


def test_training_that_ran_out_of_time_is_not_taken_up_again(killed, finished, tmp_path, monkeypatch):
    from pretune.hardware import detect, hardware_for_target
    from pretune_export.finetune import loop, plan
    from pretune_export.networks import load_corpus

    source, _before = killed
    out = tmp_path / "out"
    shutil.copytree(source, out)
    for file in ("best.pt", "last.pt", "log.jsonl", "done.json"):
        (out / "training" / file).unlink()
    monkeypatch.setitem(plan.FINE_TUNING, "candidates_with_states", 2)
    found = msgspec.json.decode((out / "plan.json").read_bytes(), type=plan.Plan)
    settings = msgspec.structs.replace(found.settings, trials=None, seconds=1.0)
    machine, target = detect(), tvm.target.Target(TARGET)
    run = loop._Run(
        out, msgspec.structs.replace(found, settings=settings), list(load_corpus(out / "tasks.jsonl.gz")),
        target, machine, hardware_for_target(target, machine), None, lambda _progress: None,
    )  # fmt: skip
    logs = []
    for _again in range(2):
        run._train(run._config())
        logs.append((out / "training" / "log.jsonl").read_text())
    lines = logs[0].splitlines()
    assert logs[0] == logs[1] and len(lines) < json.loads(lines[0])["epochs"]


def rankings(*top1: float) -> dict:
    rows = [{"top1": value, "top5": 0.9, "spearman": 0.8} for value in top1]
    return {"mean": rows[0] | {"top1": sum(top1) / len(top1)}, "test": {"rows": rows}}


@pytest.mark.parametrize(
    ("after", "search", "kept", "said"),
    [
        ((0.8, 0.8, 0.8, 0.9), None, True, "top-1 0.700 -> 0.825"),
        ((0.7, 0.7, 0.7, 0.7), None, False, "do not rank better"),
        ((0.6, 0.6, 0.6, 0.7), {"base": 1.5}, False, "do not rank better"),
        ((0.9, 0.5, 0.9, 0.6), None, False, "less than chance"),
        ((0.8, 0.8, 0.8, 0.9), {"base": 1.02}, True, "rank better"),
        ((0.8, 0.8, 0.8, 0.9), {"base": 0.8}, False, "slower"),
        ((0.8,), None, False, "so few tell little"),
        ((0.8,), {"base": 0.98}, False, "searches were no faster"),
        ((0.8,), {"base": 1.02}, True, "rank better"),
    ],
)
def test_what_is_better(after, search, kept, said):
    from pretune_export.finetune.judge import better

    found, why = better({"before": rankings(*[0.7] * len(after)), "after": rankings(*after)}, search)
    assert found is kept and said in why


def test_where_a_base_was_published(weights, tmp_path):
    from pretune.hardware import detect
    from pretune_export.finetune.plan import choose_base

    assert choose_base(detect(), "cpu-x86-64-v4").repo == "pretune/cpu-x86-64-v4"
    assert choose_base(detect(), str(weights)).repo == "pretune/cpu-x86-64-v4"
    copy = tmp_path / "mine"
    shutil.copytree(weights, copy)
    assert choose_base(detect(), str(copy)).repo == ""
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["provenance"]["fine_tuned"] = {"base_repo": "pretune/cpu-x86-64-v4"}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    assert choose_base(detect(), str(copy)).repo == "pretune/cpu-x86-64-v4"


def test_a_dead_pool_says_what_is_kept(programs, weights, tmp_path, monkeypatch):
    import pretune
    from pretune.errors import MeasureError

    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(MeasureError, match=r"keeps the 0 schedules .* the same command resumes"):
        pretune.finetune(**options(programs, tmp_path / "out", weights))


def test_the_target_describes_the_devices_of_a_farm(programs, tmp_path):
    import pretune
    from pretune.hardware import detect

    device = next(name for name in ("rocketlake", "znver4") if name != detect().microarch)
    target = f"llvm -mcpu={device} -num-cores 2"
    with pytest.raises(pretune.errors.MeasureError, match="no RPC tracker"):
        pretune.finetune(programs, target=target, trials=TRIALS, out=tmp_path / "out", rpc=NO_FARM)
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["base_why"] == f"measured on {device}"


def test_without_torch_the_install_line_comes_first(tmp_path, monkeypatch):
    from pretune.cli import main

    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, ["finetune", "--out", str(tmp_path / "out")])
    assert result.exit_code == 4
    assert result.stderr == (
        "error: pretune finetune (torch) needs an optional package; run: pip install 'pretune[export]'\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30m", 1800), ("1h30m", 5400), ("90s", 90), (12.5, 12.5), ("0s", None), ("x", None)],
)
def test_budgets_of_time(text, seconds):
    from pretune.errors import OptionError
    from pretune.finetuning import parse_duration

    if seconds is None:
        with pytest.raises(OptionError, match="--budget"):
            parse_duration(text)
    else:
        assert parse_duration(text) == seconds


def task(name: str, *networks: str):
    from pretune_export.networks import CorpusTask

    return CorpusTask(name, networks, (1,) * len(networks), "train", name, 1, (), 1.0, 1, "")


def test_whole_networks_are_held_out_where_there_are_enough():
    from pretune_export.finetune.plan import split

    networks = [f"n{i}" for i in range(10)]
    tasks = [task(f"{n}-{i}", n) for n in networks for i in range(4)] + [task("shared", *networks)]
    found = {t.id: t.split for t in split(tasks)}
    by_network = {n: {found[f"{n}-{i}"] for i in range(4)} for n in networks}
    assert all(len(splits) == 1 for splits in by_network.values())
    assert sum(splits == {"test"} for splits in by_network.values()) == 2
    assert found["shared"] == "train"
    few = [msgspec.structs.replace(t, networks=("one",)) for t in tasks]
    counts = [t.split for t in split(few)]
    assert (counts.count("test"), counts.count("validation")) == (8, 4)


def test_without_programs_the_shipped_tasks_keep_their_splits(weights):
    from pretune_export.finetune.plan import dataset_tasks, in_turn, spread

    shipped = {t.id: t.split for t in dataset_tasks(weights)}
    chosen = in_turn(spread(dataset_tasks(weights), 1000), seed=0)
    assert len({t.id for t in chosen}) == len(chosen) == 62
    assert all(shipped[t.id] == t.split for t in chosen)
    assert [t.split for t in chosen].count("test") == 12
    # Wherever it ends, some of each have been measured.
    assert {t.split for t in chosen[:12]} == {"train", "validation", "test"}


def test_tasks_are_enough_to_choose_from(weights, tmp_path, monkeypatch):
    """The wheel has no more of the datasets."""
    from pretune_export.finetune import plan

    shipped = weights.parent / "datasets" / "cpu-x86-64-v4-test" / "tasks.parquet"
    folder = tmp_path / "datasets" / "some"
    folder.mkdir(parents=True)
    shutil.copy(shipped, folder)
    monkeypatch.setattr(plan, "shipped_folder", lambda: None)
    assert {task.split for task in plan.dataset_tasks(tmp_path / "base")} == {"test"}


def test_transfer_compares_fine_tuned_with_scratch(killed, finished, tmp_path):
    from pretune_export.config import TrainConfig
    from pretune_export.dataset import read_parquet
    from pretune_export.evidence.transfer import draw, transfer

    out, _before = killed
    datasets = [str(out / "dataset")]
    drawn = []
    for n in (10, 16):
        (folder,) = draw(datasets, tmp_path / str(n), n)
        _tasks, _spaces, by_machine, _machines = read_parquet(Path(folder))
        (found,) = by_machine.values()
        assert len(found) == n
        drawn.append({(r["task"], r["space"], json.dumps(r["decisions"])) for r in found})
    assert drawn[0] < drawn[1]
    config = TrainConfig(
        datasets=datasets, test_datasets=[str(out / "dataset-test")], epochs=1, tasks_per_batch=1, threads=1,
        candidates_with_states=0,
    )  # fmt: skip
    from pretune_export.finetune import plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(plan.FINE_TUNING, "epochs", 1)
        patch.setitem(plan.FINE_TUNING, "least_steps", 0)
        made = transfer(config, tmp_path / "run", base=out / "base", schedules=[60])
    names = [(row["model"], row["drawn"]) for row in made]
    assert names == [("base", 0), ("scratch", 60), ("fine-tuned", 60), ("scratch", 600)]
    assert json.loads((tmp_path / "run" / "transfer.json").read_text()) == made
    scratch, tuned = made[1:3]
    assert scratch["schedules"] == tuned["schedules"] == 16 and tuned["epoch"] == 1
    assert all(0 < row[name] <= 1 for row in made for name in ("top1", "top5"))
