"""The world model inside stock MetaSchedule, with real measurements."""

from __future__ import annotations

import numpy as np
import pytest

from pretune import CostModel, LatentSearch
from pretune.bench.metaschedule import Trials, silence_logger, through_pool
from pretune.measure import MeasurePool

from programs import TARGET, matmul  # isort: skip


@pytest.fixture(scope="module")
def pool():
    with MeasurePool(TARGET) as pool:
        yield pool


def tune(pool, tmp_path, trials, **parts):
    """Run ``ms.tune_tir``; its database, and the latencies that were measured."""
    from tvm.s_tir import meta_schedule as ms

    measured = Trials()
    builder, runner = through_pool(pool, measured)
    silence_logger()
    database = ms.tune_tir(
        matmul(),
        TARGET,
        str(tmp_path),
        trials,
        num_trials_per_iter=4,
        builder=builder,
        runner=runner,
        database=ms.database.MemoryDatabase(),
        measure_callbacks=[ms.measure_callback.AddToDatabase(), ms.measure_callback.UpdateCostModel()],
        seed=1,
        **parts,
    )
    return database, measured.latencies


def test_as_a_search_strategy(pool, tmp_path, weights):
    database, latencies = tune(pool, tmp_path, 10, strategy=LatentSearch(weights), cost_model="random")
    assert len(latencies) == 10 and np.isfinite(latencies).all()
    records = database.get_all_tuning_records()
    assert len({str(record.trace) for record in records}) == 10
    best = database.query_tuning_record(matmul(), TARGET, "main")
    assert float(best.run_secs[0]) == min(float(record.run_secs[0]) for record in records)


def test_as_a_cost_model(pool, tmp_path, weights):
    from tvm.s_tir import meta_schedule as ms

    strategy = ms.search_strategy.EvolutionarySearch(population_size=64)  # stock's 512 take longer to score
    database, latencies = tune(pool, tmp_path, 8, strategy=strategy, cost_model=CostModel(weights))
    assert len(latencies) == 8
    # One record for each, in their order.
    assert [float(r.run_secs[0]) for r in database.get_all_tuning_records()] == pytest.approx(latencies)


def test_the_cost_model_scores_as_the_ranker_does_and_learns(weights):
    from tvm.s_tir import meta_schedule as ms
    from tvm.s_tir.meta_schedule.runner import RunnerResult

    from pretune.hardware import detect, hardware_for_target
    from pretune.model import TaskScorer, WorldModel, load_weights
    from pretune.space import TaskSpace

    mod = matmul()
    space = TaskSpace.generate(mod, TARGET)
    rng = np.random.default_rng(0)
    rows = space.spaces[0].sample(40, rng)
    candidates = [c for c in (space.materialise(0, row) for row in rows) if c is not None]
    slots = space.spaces[0].slots
    rows = np.array([[s.find(d) for s, d in zip(slots, c.decisions, strict=True)] for c in candidates])
    context = ms.TuneContext(mod=mod, target=TARGET)
    info = ms.arg_info.ArgInfo.from_entry_func(mod, remove_preproc=True)
    given = [ms.MeasureCandidate(candidate.schedule, info) for candidate in candidates]
    cost_model = CostModel(weights)
    scores = cost_model.predict(context, given)
    scorer = TaskScorer(WorldModel(load_weights(weights), 1), space, hardware_for_target(TARGET, detect()))
    assert len(candidates) > 20 and (rows >= 0).all()
    np.testing.assert_allclose(scores, scorer.score(0, rows)[0], atol=1e-4)

    # Told that its order is the wrong way round, it turns.
    results = [RunnerResult([float(np.exp(score))], None) for score in scores]
    cost_model.update(context, given, results)
    after = cost_model.predict(context, given)
    assert np.corrcoef(after, scores)[0, 1] < 0


def test_clones_share_the_models(weights):
    strategy = LatentSearch(weights)
    made = strategy._models.get(TARGET)
    clone = strategy._inst.clone()  # as TVM asks for it; what TVM makes of it hides its attributes
    assert clone._models.get(TARGET) is made
