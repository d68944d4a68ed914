"""Measuring: persistent worker processes compile and time candidates; one mishap costs one candidate."""

from pretune.measure.check import TOLERANCE, difference
from pretune.measure.pool import MeasurePool
from pretune.measure.result import Measured

__all__ = ["TOLERANCE", "MeasurePool", "Measured", "difference"]
