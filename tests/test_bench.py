"""Parts of the benchmarks; `test_cli.py` runs whole ones."""

from __future__ import annotations

import pytest

from pretune.bench.metaschedule import Baseline, tune_stock
from pretune.bench.stats import geomean, spearman
from pretune.intake import make_task
from pretune.measure import MeasurePool

from programs import TARGET, matmul  # isort: skip


def test_averages():
    assert geomean([1.0, 4.0]) == pytest.approx(2.0) and geomean([]) is None
    assert spearman([1, 2, 3, 9], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2], [1, 2]) is None


def test_the_baseline_names_its_winner_in_turns(tmp_path):
    pytest.importorskip("xgboost")
    task = make_task("matmul", matmul(16, 16, 16)["main"])
    with MeasurePool(TARGET) as pool:
        found = tune_stock(task, TARGET, pool, trials=4, seed=0, work_dir=tmp_path)
    assert found.error == "" and found.trials == 4
    assert 1 < len(found.traces) <= 4 and found.trace in found.traces
    assert found.latency is not None and found.latency > 0
    assert Baseline(**found.to_dict()) == found
    # Folders of earlier versions hold baselines without finalists.
    old = {name: value for name, value in found.to_dict().items() if name != "traces"}
    assert Baseline(**old).traces == []
