"""Every environment variable pretune reads, in one place. Read at call time, not at import."""

from __future__ import annotations

import math
import os
from pathlib import Path

from pretune.errors import OptionError

MOST_PATIENCE = 1.0
"""Candidates that wait much longer for a quiet machine would miss their deadlines."""


def cache_dir() -> Path:
    """Folder for what pretune keeps between runs: ``PRETUNE_CACHE``, else the XDG cache folder."""
    explicit = os.environ.get("PRETUNE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "pretune"


def own_weights_dir() -> Path:
    """Folder of weights that were fine-tuned on this machine: ``pretune/weights`` in the XDG data folder."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "pretune" / "weights"


def hub_org() -> str:
    """Organisation on the hub that publishes the weights: ``PRETUNE_HUB_ORG``, else ``pretune``."""
    return os.environ.get("PRETUNE_HUB_ORG") or "pretune"


def lock_file() -> Path:
    """File that pins weights to revisions: ``PRETUNE_LOCK``, else ``pretune.lock`` in the current folder."""
    return Path(os.environ.get("PRETUNE_LOCK") or "pretune.lock").expanduser()


def num_threads() -> int | None:
    """Threads for ONNX Runtime and for measuring: ``PRETUNE_NUM_THREADS``; None means detect."""
    value = os.environ.get("PRETUNE_NUM_THREADS")
    return int(value) if value and value.isdigit() and int(value) > 0 else None


def patience(usual: float) -> float:
    """Seconds that a measurement may wait for a quiet machine: ``PRETUNE_PATIENCE``, else `usual`.

    Raises
    ------
    OptionError
        If it is no number from 0, which never waits, to `MOST_PATIENCE`.
    """
    text = os.environ.get("PRETUNE_PATIENCE")
    if not text:
        return usual
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MOST_PATIENCE:
        raise OptionError(
            f"PRETUNE_PATIENCE={text} is no number of seconds from 0 to {MOST_PATIENCE:g}; give 0 not to wait"
        )
    return value


def debug() -> bool:
    """``PRETUNE_DEBUG=1``: show stack traces instead of one-line errors."""
    return os.environ.get("PRETUNE_DEBUG", "") not in ("", "0")


def exact_math() -> bool:
    """``PRETUNE_EXACT_MATH=1``: exp, erf and tanh are libm's, as in stock TVM, see `pretune.vector_math`."""
    return os.environ.get("PRETUNE_EXACT_MATH", "") not in ("", "0")


def bind_threads() -> bool:
    """Whether a measured candidate's threads may be pinned to cores: TVM's own ``TVM_BIND_THREADS``."""
    return os.environ.get("TVM_BIND_THREADS", "1") == "1"
