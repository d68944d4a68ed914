"""Parts of the benchmarks; `test_cli.py` runs whole ones."""

from __future__ import annotations

import json
import math

import pytest

from pretune.bench.found import Found, Store, after, best_so_far
from pretune.bench.metaschedule import tune_stock
from pretune.bench.stats import geomean, spearman
from pretune.bench.summary import drift_notice, summarise
from pretune.intake import make_task
from pretune.measure import MeasurePool

from programs import TARGET, matmul  # isort: skip


def test_averages():
    assert geomean([1.0, 4.0]) == pytest.approx(2.0) and geomean([]) is None
    assert spearman([1, 2, 3, 9], [0.1, 0.2, 0.3, 0.4]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2], [1, 2]) is None


@pytest.mark.usefixtures("few_rounds")
def test_the_baseline_names_its_winners_in_turns(tmp_path):
    pytest.importorskip("xgboost")
    task = make_task("matmul", matmul(16, 16, 16)["main"])
    with MeasurePool(TARGET) as pool:
        both = tune_stock(task, TARGET, pool, budgets=(3, 6), seed=0, work_dir=tmp_path)
    for budget, found in both.items():
        assert found.error == "" and found.trials == budget
        assert 1 < len(found.traces) <= budget and found.trace in found.traces
        assert found.latency is not None and found.latency > 0
        assert Found(**json.loads(json.dumps(found.to_dict()))) == found
    # The smaller budget is the beginning of the larger one.
    few, many = both[3], both[6]
    assert few.curve[:2] == many.curve[:2] and few.seconds <= many.seconds
    assert [n for n, _latency in many.curve] == [1, 2, 4, 6]
    assert many.curve[-1][1] == min(latency for _n, latency in many.curve)


def test_baselines_of_earlier_versions_are_read(tmp_path):
    old = {"trace": [[], []], "latency": 1e-3, "trials": 64, "failures": 0, "seconds": 9.5, "error": ""}
    (tmp_path / "metaschedule.jsonl").write_text(json.dumps({"key": "k", "value": old}) + "\n")
    found = Found(**Store(tmp_path / "metaschedule.jsonl").find("k"))
    assert found.latency == 1e-3 and found.traces == [] and found.curve == []


def test_a_torn_line_costs_its_own_value_only(tmp_path):
    path = tmp_path / "store.jsonl"
    store = Store(path)
    for key, value in (("a", 1), ("b", 2), ("a", 3)):
        store.keep(key, value)
    path.write_bytes(path.read_bytes()[:-5])  # a kill while the last line was written
    store = Store(path)
    assert store.find("a") == 1 and store.find("b") == 2
    store.keep("a", 4)
    assert Store(path).find("a") == 4 and Store(path).find("c") is None


def test_best_so_far():
    curve = best_so_far([math.inf, 3.0, 5.0, 2.0, 1.0])
    assert curve == [[1, None], [2, 3.0], [4, 2.0], [5, 1.0]]
    assert [after(curve, n) for n in (1, 3, 4, 1024)] == [None, 3.0, 2.0, 1.0]
    assert best_so_far([]) == [] and after([], 4) is None


def row(name, seed, ratio, calibration=(1.0, 1.0), trials=64):
    ratios = [{"trials": trials, "baseline_trials": 64, "ratio": ratio}] if ratio else []
    return {"name": name, "seed": seed, "ratios": ratios, "calibration": list(calibration)}


def test_ratios_are_summed_up_by_budgets():
    rows = [row("a", 0, 2.0), row("a", 1, 1.0), row("b", 0, 2.0), row("b", 1, 4.0), row("c", 0, None)]
    few, many = summarise([*rows, row("a", 0, 0.5, trials=16)])
    assert (few["trials"], few["geomean"], few["low"]) == (16, 0.5, None)
    assert many["geomean"] == pytest.approx(2) == many["seed_low"] == many["seed_high"]
    assert (many["median"], many["compared"], many["subgraphs"], many["seeds"]) == (2, 4, 2, 2)
    # A subgraph's seeds are drawn together: two of the same give the ends of the interval.
    assert many["low"] == pytest.approx(2**0.5) and many["high"] == pytest.approx(8**0.5)


def test_a_machine_whose_speed_moved_is_said():
    assert drift_notice([row("a", 0, 1.0), row("b", 0, 1.0, (1.0, 1.05))]) == ""
    said = drift_notice([row("a", 0, 1.0), row("b", 0, 1.0, (1.0, 1.5)), row("c", 0, None, ())])
    assert "(+50%), and while 1 of 2 rows were made (b #0 +50%)" in said
    assert "(+50%); ratios" in drift_notice([row("a", 0, 1.0), row("b", 0, 1.0, (1.5, 1.5))])
