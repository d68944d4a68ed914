"""Fixtures shared by all tests."""

from __future__ import annotations

import math
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_weights_of_the_user(tmp_path_factory):
    """What the user of this machine has pulled or fine-tuned is not tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRETUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("data")))
        patch.delenv("PRETUNE_LOCK", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_a_quiet_machine():
    """No test asks for latencies that are this exact."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRETUNE_PATIENCE", "0")
        yield


@pytest.fixture(scope="module")
def any_drift():
    """What is collected counts, however the speed of this machine moves: or else a busy one gives none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pretune_export.collect.MAX_DRIFT", math.inf)
        yield


@pytest.fixture
def few_rounds(monkeypatch):
    """Winners are timed in two rounds of turns: more are no other test, but take long on a busy machine."""
    for name in ("tuning.FINAL_ROUNDS", "bench.turns.ROUNDS"):
        monkeypatch.setattr(f"pretune.{name}", 2)


@pytest.fixture(scope="session")
def weights() -> Path:
    """The shipped weights."""
    from pretune.model.weights import shipped_folder

    folder = shipped_folder()
    assert folder is not None
    return folder / "cpu-x86-64-v4"
