"""The corpus of networks: exported through the intake, divided without overlap, free of the test suite."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import tvm

from pretune.errors import OptionError

pytest.importorskip("torch", reason="the training side needs the extra: pip install 'pretune[export]'")

from pretune_export.networks import (
    NETWORKS,
    SPLITS,
    VALIDATION_FAMILIES,
    build_corpus,
    forbidden_task_ids,
    load_corpus,
    tasks_of,
)
from pretune_export.networks.corpus import MIN_WORK, CorpusTask, kind_of, pick

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})

SUITE = """
from dataclasses import dataclass
from typing import Callable

import torch
from torch import nn


@dataclass(frozen=True)
class Subgraph:
    module: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def build(self):
        return self.module().eval(), (torch.randn(self.shape),)


SUBGRAPHS = {"head": Subgraph(lambda: nn.Linear(320, 29), (4, 320))}
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.py"
    path.write_text(textwrap.dedent(SUITE))
    return path


def test_corpus_is_large_and_divided_by_family():
    families = {network.family for network in NETWORKS.values()}
    assert len(families) >= 30
    assert set(SPLITS) == set(NETWORKS)
    assert families >= VALIDATION_FAMILIES
    of_split = {
        split: {NETWORKS[name].family for name in NETWORKS if SPLITS[name] == split}
        for split in ("train", "validation")
    }
    assert not of_split["train"] & of_split["validation"]
    share = sum(split == "validation" for split in SPLITS.values()) / len(SPLITS)
    assert 0.1 < share < 0.2
    for name in ("resnet50", "mobilenetv2", "bert", "gpt2", "r3d", "opt", "gptneo"):
        assert name not in {family.replace("-", "") for family in families}


@pytest.mark.parametrize(
    ("name", "anchors"),
    [
        ("lenet@32", {"conv2d", "matmul", "avg_pool", "softmax"}),
        ("lstm@4", {"matmul", "softmax"}),
        ("tcn@8", {"conv1d", "conv1d 1x1", "matmul"}),
    ],
)
def test_networks_come_in_through_the_intake(name: str, anchors: set[str]):
    tasks = tasks_of(NETWORKS[name], TARGET)
    assert len({task.task_id for task in tasks}) == len(tasks)
    assert all(task.weight >= 1 and task.args for task in tasks)
    kinds = {kind_of(_line(task.name, task.args)) for task in tasks}
    assert anchors <= kinds


@pytest.mark.parametrize(
    ("name", "operand", "accumulator"),
    [
        ("tcn@8:float16", "float16", "float32"),
        ("lstm@4:bfloat16", "bfloat16", "float32"),
        ("lenet@32:int8", "int8", "int32"),
    ],
)
def test_low_precision_multiplies_narrow_and_adds_wide(name: str, operand: str, accumulator: str):
    assert SPLITS[name] == SPLITS[name.partition(":")[0]]
    products = [task for task in tasks_of(NETWORKS[name], TARGET) if re.search("conv|matmul", task.name)]
    assert products
    for task in products:
        assert [dtype for _, dtype in task.args[:2]] == [operand, operand]
        assert task.mod.script().count(f'T.Cast("{accumulator}", ') >= 2  # of both operands


def test_same_network_gives_the_same_identities():
    first, second = (tasks_of(NETWORKS["espcn"], TARGET) for _ in range(2))
    assert [task.task_id for task in first] == [task.task_id for task in second]


def test_suite_is_left_out_and_the_rest_written(
    suite: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    out = tmp_path / "corpus.jsonl.gz"
    forbidden = forbidden_task_ids(suite, TARGET)
    everything = build_corpus(out, TARGET, ["lstm@4"], keep_all=True)
    before = {task.id for task in load_corpus(out)}
    assert len(before) == everything
    assert before & forbidden  # the network's last layer is the suite's subgraph

    (part,) = (tmp_path / "corpus.jsonl.gz.parts").glob("lstm@4.*.jsonl.gz")
    stamp = part.stat().st_mtime_ns
    build_corpus(out, TARGET, ["lstm@4"], forbidden=forbidden)
    assert part.stat().st_mtime_ns == stamp  # resumed, not exported again
    tasks = list(load_corpus(out))
    assert tasks
    assert not {task.id for task in tasks} & forbidden
    assert all(task.decisions > 0 and task.flops >= MIN_WORK for task in tasks)
    assert all(task.networks == ("lstm@4",) and task.split == "train" for task in tasks)
    assert "lstm@4" in capfd.readouterr().err


def test_network_that_runs_out_of_time_is_skipped(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    out = tmp_path / "corpus.jsonl.gz"
    build_corpus(out, TARGET, ["lstm@4"])
    before = out.read_bytes()
    assert build_corpus(out, TARGET, ["densenet121"], timeout=1) == 0
    assert "warning: network densenet121 is skipped" in capfd.readouterr().err
    assert out.read_bytes() == before  # nothing found is no reason to empty the file


def test_unknown_network_is_named(tmp_path: Path):
    with pytest.raises(OptionError, match="resnet-9000"):
        build_corpus(tmp_path / "corpus.jsonl.gz", TARGET, ["resnet-9000"])


def test_pick_spreads_over_kinds_and_sizes():
    tasks = [
        _line(f"fused_conv2d{i}_add", [((1, 8, i, i), "f"), ((8, 8, 3, 3), "f"), ((1,), "f")], i)
        for i in range(50)
    ]
    tasks += [_line("softmax", [((8, 8), "f"), ((8, 8), "f")], 7.0)]
    chosen = pick(tasks, 6)
    assert len(chosen) == 6
    assert any(task.name == "softmax" for task in chosen)
    sizes = sorted(task.flops for task in chosen if task.name != "softmax")
    assert (sizes[0], sizes[-1]) == (0, 49)


def _line(name: str, shapes, flops: float = 1.0) -> CorpusTask:
    return CorpusTask(f"{name}-{flops}", ("n",), (1,), "train", name, 1, tuple(shapes), flops, 5, "")
