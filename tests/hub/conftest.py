"""A hub, and a machine that has pulled nothing yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import huggingface_hub.utils
import pytest
from hub_server import Hub as Server

from pretune.hub.client import Hub


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """An empty cache, no lock file, and nothing that the client would say to anybody else."""
    for name in (
        "HF_TOKEN",
        "HF_ENDPOINT",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PRETUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_UPDATE_CHECK", "HF_HUB_DISABLE_XET"):
        monkeypatch.setenv(name, "1")  # for processes that tests start; this one has read them already
        monkeypatch.setattr(huggingface_hub.constants, name, True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.chdir(tmp_path)
    huggingface_hub.utils.disable_progress_bars()


@pytest.fixture(autouse=True)
def wheel(weights, tmp_path_factory, monkeypatch) -> Path:
    """Of the shipped weights those for AVX-512 alone: there is hardware that they do not cover."""
    shipped = tmp_path_factory.mktemp("wheel")
    shutil.copytree(weights, shipped / weights.name)
    monkeypatch.setattr("pretune.hub.sources.shipped_folder", lambda: shipped)
    return shipped


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    with Server(tmp_path / "server").running() as server:
        yield server


@pytest.fixture
def hub(server) -> Hub:
    return Hub(server.url)


@pytest.fixture
def folder(weights, tmp_path) -> Path:
    """A copy of the shipped weights, to spoil."""
    return Path(shutil.copytree(weights, tmp_path / "weights"))
