"""The measuring worker in a hurry: it does not wait for a busy machine.

By itself it waits up to half a second for each candidate, and two for a calibration. No test asks for
latencies that are this exact.
"""

from pretune.measure import worker
from pretune.measure.process import WorkerProcess
from pretune.measure.worker import main

__all__ = ["hurry", "main"]

worker.PATIENCE_S = 0.02
worker.Gate.repeats.__defaults__ = (worker.PATIENCE_S,)


def hurry() -> None:
    """Have the pools of this process start workers that run this module's `main`."""
    WorkerProcess.__init__.__defaults__ = (__name__,)
