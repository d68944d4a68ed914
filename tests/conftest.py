"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def weights() -> Path:
    """The shipped weights."""
    from pretune.model.weights import shipped_folder

    folder = shipped_folder()
    assert folder is not None
    return folder / "cpu-x86-64-v4"
