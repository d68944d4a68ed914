"""Measuring: persistent worker processes compile and time candidates; one mishap costs one candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pretune.measure.base import Pool
from pretune.measure.check import TOLERANCE, difference
from pretune.measure.farm import FarmPool
from pretune.measure.pool import PATIENCE_S, MeasurePool
from pretune.measure.result import Measured
from pretune.measure.tracker import RPCAddress

if TYPE_CHECKING:
    from tvm.target import Target

__all__ = [
    "TOLERANCE", "FarmPool", "MeasurePool", "Measured", "Pool", "RPCAddress", "difference", "open_pool",
]  # fmt: skip


def open_pool(
    target: Target,
    rpc: RPCAddress | None = None,
    *,
    build_timeout: float = 10.0,
    run_timeout: float = 10.0,
    patience: float = PATIENCE_S,
) -> Pool:
    """A `MeasurePool` on this machine, or a `FarmPool`, which has no patience, of the farm at `rpc`."""
    if rpc is None:
        return MeasurePool(target, build_timeout=build_timeout, run_timeout=run_timeout, patience=patience)
    return FarmPool(target, rpc, build_timeout=build_timeout, run_timeout=run_timeout)
