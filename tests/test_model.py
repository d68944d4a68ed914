"""The world model under ONNX Runtime, its weights folders, and the search that uses it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from pretune.errors import WeightsError
from pretune.features.schema import SCHEMA_VERSION
from pretune.hardware import detect, hardware_for_target
from pretune.model import TaskScorer, WorldModel, load_weights
from pretune.model.weights import ONNX_FILES
from pretune.search import Posterior, TaskSearch
from pretune.space import TaskSpace
from programs import TARGET, conv2d_relu, matmul, softmax


@pytest.fixture(scope="module")
def model(weights):
    return WorldModel(load_weights(weights), num_threads=2)


@pytest.fixture(scope="module")
def hardware():
    return hardware_for_target(TARGET, detect())


@pytest.mark.parametrize("program", [matmul, conv2d_relu, softmax])
def test_sharing_prefixes_changes_no_score(model, hardware, program):
    space = TaskSpace.generate(program(), TARGET)
    scorer = TaskScorer(model, space, hardware)
    rng = np.random.default_rng(0)
    for part, design in zip(scorer.spaces[:3], space.spaces, strict=False):
        rows = np.concatenate([design.sample(40, rng)] * 2)  # duplicates share everything
        score, features = part.score(rows)
        actions, summary = part.encoder.encode(design.decisions(rows))
        first = next(i for i, step in enumerate(part.encoder.steps) if step.slots)
        plain = model.rollout(
            part.z0,
            [(s.type_id, a) for s, a in zip(part.encoder.steps[first:], actions[first:], strict=True)],
        )
        want, want_embedding = model.rank(plain, summary, part.hardware)
        np.testing.assert_allclose(score, want, atol=2e-4)
        np.testing.assert_allclose(features, np.concatenate([want_embedding, summary], axis=1), atol=2e-4)
        assert score[:40] == pytest.approx(score[40:], abs=1e-5)
        assert score.std() > 0


def test_all_design_spaces_at_once_score_as_one_by_one(model, hardware):
    space = TaskSpace.generate(softmax(), TARGET)
    scorer = TaskScorer(model, space, hardware)
    rng = np.random.default_rng(0)
    sizes = [1100, 1, 0, *[37] * (len(space.spaces) - 3)]  # shared among threads, not worth it, none
    rows = [design.sample(n, rng) for design, n in zip(space.spaces, sizes, strict=True)]
    for k, (score, features) in enumerate(scorer.score_all(rows)):
        alone = [scorer.score(k, rows[k][i : i + 300]) for i in range(0, len(rows[k]), 300)]
        assert len(score) == len(features) == len(rows[k])
        for i, (want, want_features) in enumerate(alone):
            np.testing.assert_allclose(score[300 * i :][:300], want, atol=1e-5)
            np.testing.assert_allclose(features[300 * i :][:300], want_features, atol=1e-5)


def test_search_proposes_new_buildable_candidates(model, hardware):
    space = TaskSpace.generate(matmul(), TARGET)
    search = TaskSearch(space, TaskScorer(model, space, hardware), seed=1)
    first = search.propose(6)
    search.update(first, [1e-3 * (i + 1) for i in range(6)])
    second = search.propose(6)
    hashes = [p.candidate.shash for p in first + second]
    assert len(first) == len(second) == 6
    assert len(set(hashes)) == 12
    assert search.scored > 10_000


def test_search_is_reproducible(model, hardware):
    def rows(seed):
        space = TaskSpace.generate(matmul(), TARGET)
        return [
            p.row.tolist()
            for p in TaskSearch(space, TaskScorer(model, space, hardware), seed=seed).propose(4)
        ]

    assert rows(5) == rows(5)


def test_search_learns_on_the_task(model, hardware):
    """With latencies that only the embeddings explain, later proposals are better than the first."""
    space = TaskSpace.generate(conv2d_relu(), TARGET)
    scorer = TaskScorer(model, space, hardware)
    search = TaskSearch(space, scorer, seed=0)
    weight = np.random.default_rng(2).normal(
        size=scorer.score(0, space.spaces[0].sample(1, search.rng))[1].shape[1]
    )

    def latency(p):
        return float(np.exp(-p.features @ weight))

    medians = []
    for _ in range(5):
        proposals = search.propose(8)
        latencies = [latency(p) for p in proposals]
        search.update(proposals, latencies)
        medians.append(np.median(latencies))
    assert medians[-1] < 0.8 * medians[0]


def test_posterior_corrects_a_wrong_ranker():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 6))
    truth = np.sin(x[:, 0]) + 0.5 * x[:, 1]  # negative log latency
    score = -truth + 0.3 * rng.normal(size=400)  # a ranker that is quite wrong on this task
    posterior = Posterior()
    mean, deviation = posterior.predict(score, x)
    assert np.array_equal(mean, score) and not deviation.any()
    posterior.update(score[:60], x[:60], np.exp(-truth[:60]))
    mean, deviation = posterior.predict(score[60:], x[60:])
    assert np.corrcoef(mean, truth[60:])[0, 1] > 0.8
    near, _ = posterior.predict(score[:60], x[:60])
    assert np.abs((near - near.mean()) - (truth[:60] - truth[:60].mean())).mean() < 0.3
    far = posterior.predict(score[:1], x[:1] + 50.0)[1]
    assert far[0] > deviation.mean()


def test_posterior_survives_failures_and_many_trials():
    rng = np.random.default_rng(0)
    posterior = Posterior()
    posterior.update(np.zeros(3), rng.normal(size=(3, 4)), np.full(3, np.inf))
    assert np.isfinite(posterior.predict(np.zeros(2), np.zeros((2, 4)))[0]).all()
    for _ in range(9):
        x = rng.normal(size=(100, 4))
        latency = np.exp(x[:, 0])
        latency[::10] = np.inf
        posterior.update(x[:, 1], x, latency)
    mean, deviation = posterior.predict(np.zeros(50), rng.normal(size=(50, 4)))
    assert np.isfinite(mean).all() and np.isfinite(deviation).all()


@pytest.fixture
def copy(weights, tmp_path):
    shutil.copytree(weights, tmp_path / "w")
    return tmp_path / "w"


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ONNX_FILES)
def test_a_flipped_byte_is_found(copy, name):
    data = bytearray((copy / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(WeightsError, match=rf"{name}.*damaged"):
        load_weights(copy)


def test_a_truncated_or_missing_file_is_named(copy):
    (copy / ONNX_FILES[0]).write_bytes((copy / ONNX_FILES[0]).read_bytes()[:100])
    with pytest.raises(WeightsError, match=r"encoder\.onnx: 100 bytes"):
        load_weights(copy)
    (copy / ONNX_FILES[0]).unlink()
    with pytest.raises(WeightsError, match=r"encoder\.onnx: missing"):
        load_weights(copy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 99}, r"weights format 99.*pip install -U pretune"),
        ({"format_version": 0}, r"weights format 0.*leave --weights out"),
        ({"feature_schema": SCHEMA_VERSION + 1}, r"feature schema.*pip install -U pretune"),
        ({"onnx": {"opset": 99, "ir": 8}}, r"opset 99"),
        ({"min_sdk_version": "99.0"}, r"need pretune 99\.0"),
    ],
)
def test_weights_of_another_version_are_refused(copy, changes, message):
    edit(copy, **changes)
    with pytest.raises(WeightsError, match=message):
        load_weights(copy)


def test_a_folder_that_is_no_weights_folder(tmp_path):
    with pytest.raises(WeightsError, match=r"no such weights folder"):
        load_weights(tmp_path / "nothing")
    with pytest.raises(WeightsError, match=r"config\.json: missing"):
        load_weights(tmp_path)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(WeightsError, match=r"cannot be read"):
        load_weights(tmp_path)


def test_weights_for_another_tvm_are_refused_with_the_way_out(copy):
    edit(copy, tvm=">=0.20,<0.21")
    with pytest.raises(WeightsError, match=r"apache-tvm >=0\.20,<0\.21, but .* pip install 'apache-tvm>=0"):
        load_weights(copy)
    edit(copy, tvm="the newest")
    with pytest.raises(WeightsError, match=r"config\.json: 'the newest' is no range"):
        load_weights(copy)


def test_an_unknown_format_is_named_before_anything_else_is_read(copy):
    (copy / "manifest.json").write_text("[]")
    edit(copy, format_version=99)
    with pytest.raises(WeightsError, match="weights format 99"):
        load_weights(copy)


def test_the_search_explores_unless_it_is_greedy(model, hardware):
    space = TaskSpace.generate(matmul(), TARGET)
    search = TaskSearch(space, TaskScorer(model, space, hardware), seed=1)
    first = search.propose(6)
    search.update(first, [1e-3 * (i + 1) for i in range(6)])
    for explore in (0.0, 2.0):
        pool = search._evolve(explore)[0]
        mean, deviation = search._posterior.predict(pool.score, pool.features)
        np.testing.assert_allclose(pool.value, mean + explore * deviation, atol=1e-3)
        assert deviation.max() > 0.01


def test_a_batch_is_spread_unless_it_is_greedy(model, hardware):
    space = TaskSpace.generate(matmul(), TARGET)

    def correlation(*, greedy: bool) -> float:
        search = TaskSearch(space, TaskScorer(model, space, hardware), seed=1)
        proposals = search.propose(12, greedy=greedy)
        score, features = np.array([p.score for p in proposals]), np.stack([p.features for p in proposals])
        assert score[0] == score.max()
        _mean, covariance = search._posterior.joint(score, features)
        return float(np.triu(covariance / covariance[0, 0], 1).sum() / (12 * 11 / 2))

    assert correlation(greedy=False) < correlation(greedy=True) - 0.05
