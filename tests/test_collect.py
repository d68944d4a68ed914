"""Collecting many schedules of one task: between calibrations, of tasks that have so many."""

from __future__ import annotations

import pytest
import tvm

from commands import invoke
from programs import TARGET, matmul, softmax

pytest.importorskip("torch")

from pretune.measure import MeasurePool
from pretune.space import TaskSpace
from pretune_export.collect import (
    CollectOptions,
    Collector,
    read_collected,
    read_lines,
    with_choice,
)
from pretune_export.networks.corpus import CorpusTask, load_corpus, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    from pretune.intake import make_task

    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl.gz"
    tasks = []
    for mod in (softmax(2, 4), matmul(16, 16, 16), matmul(32, 16, 16)):
        task = make_task("main", mod["main"])
        text = str(tvm.ir.save_json(task.mod))
        tasks.append(
            CorpusTask(task.task_id, ("n",), (1,), "test", "main", 1, task.args, task.flops, 1, text)
        )
    write_corpus(path, tasks)
    return path


def test_tasks_with_enough_schedules(corpus):
    tasks = list(load_corpus(corpus))
    sizes = [TaskSpace.generate(tvm.ir.load_json(task.mod), TARGET).size for task in tasks]
    least = sorted(sizes)[1]
    enough = [task for task, size in zip(tasks, sizes, strict=True) if size >= least]
    assert with_choice(tasks, TARGET, least, None) == enough and len(enough) == 2
    assert with_choice(tasks, TARGET, least, 1) == enough[:1]
    assert with_choice(tasks, TARGET, 0, 2) == tasks[:2]


class Drifting(MeasurePool):
    """A pool on a machine that is half as fast at its third calibration."""

    calibrations = 0

    def calibrate(self):
        self.calibrations += 1
        return super().calibrate() * 0 + (2.0 if self.calibrations == 3 else 1.0)


def test_a_chunk_that_saw_the_machine_move_is_measured_again(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pretune_export.collect.CHUNK", 4)
    task = list(load_corpus(corpus))[1]
    with Drifting(TARGET) as pool:
        options = CollectOptions(random=10, rounds=0)
        assert Collector(TARGET, tmp_path, options, pool).run([task]) == 10
        # 4, 4 and 2; of the second chunk, the first calibration was off.
        assert pool.calibrations == 8
    assert capsys.readouterr().out.startswith("calibration moved by -50%: 4 measured again")
    rows = list(read_lines(tmp_path / "measured.jsonl"))
    assert len(rows) == 10 and all(row["calibration"] == [1.0, 1.0] for row in rows)
    assert len(read_collected([tmp_path])[1]) == 10


def test_collect_takes_so_many_tasks(corpus, tmp_path):
    target = '{"kind":"llvm","mcpu":"x86-64-v3","num-cores":2}'
    few = ("--random", 3, "--rounds", 0, "--limit", 1, "--min-space", 10)
    for count in ("3", "0"):  # the second time, that task is done
        assert invoke("collect", corpus, tmp_path, "--target", target, *few).stdout.splitlines()[-1] == count
    assert len({row["task"] for row in read_lines(tmp_path / "measured.jsonl")}) == 1
