"""Training under ``torchrun``: several processes come to the weights that one comes to."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from commands import config_of
from test_evidence import write_part

torch = pytest.importorskip("torch")


def torchrun(root, run, processes):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = ["-m", "pretune_export.cli", "train", root / "config.toml", run]
    done = subprocess.run(
        [*launch, f"--nproc-per-node={processes}", *map(str, command)],
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("distributed")
    write_part(root / "data", training=5, schedules=13)
    (root / "config.toml").write_text(
        f'datasets = ["{root}/data"]\nepochs = 3\ncandidates_with_states = 5\nstates_per_candidate = 1\n'
        "tasks_per_batch = 2\nvalidate_every = 2\nthreads = 1\n"
        "sizes = {latent = 16, encoder_hidden = 16, action_hidden = 16, transition_hidden = 24}\n"
    )
    return root


def distance(a, b):
    """Of two lists of tensors, relative to the length of the first."""
    a, b = (torch.cat([x.double().flatten() for x in each]) for each in (a, b))
    return float((a - b).norm() / a.norm())


def test_two_processes_train_as_one(root, tmp_path):
    from pretune_export.train import load_best, train

    one, many = tmp_path / "one", tmp_path / "many"
    done = torchrun(root, many, 2)
    best = train(config_of(root), one, cache=many / "encoded.pickle")
    assert "processes: 2" in done.stdout
    # Only the first process speaks and writes.
    assert done.stdout.count("training tasks with") == 1
    logs = [[json.loads(x) for x in (run / "log.jsonl").read_text().splitlines()] for run in (one, many)]
    assert len(logs[0]) == len(logs[1]) == 3
    for a, b in zip(*logs, strict=True):
        assert {**a, "seconds": 0} == pytest.approx({**b, "seconds": 0}, rel=1e-3)
    assert json.loads(done.stdout.splitlines()[-1]) == pytest.approx(best, rel=1e-3)
    a, b = (torch.load(run / "last.pt", weights_only=True) for run in (one, many))
    for part in ("net", "average", "decoder"):
        # Without what standardises the inputs, which is not trained.
        weights = [[x for name, x in each[part].items() if "input" not in name] for each in (a, b)]
        assert distance(*weights) < 1e-4
    # Momenta are sums of gradients. Adam hides their scale, and makes much of rounding where they are tiny.
    momenta = [[state["exp_avg"] for state in each["optimizer"]["state"].values()] for each in (a, b)]
    assert distance(*momenta) < 1e-5
    load_best(many, config_of(root))
