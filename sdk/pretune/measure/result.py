"""What is known about a candidate once it has been measured."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

ErrorKind = Literal["", "build", "run", "build-timeout", "run-timeout", "crash"]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One trial's result.

    Attributes
    ----------
    latencies : tuple of float
        Seconds per call, one for each repeat; empty if the candidate failed.
    serial_latencies : tuple of float
        Seconds per call on one thread, where that was asked for.
    build_s : float
        Seconds spent compiling it.
    run_s : float
        Seconds spent running it.
    stopped_early : bool
        Slower than the limit: `latencies` then holds one call, good for ranking but noisier.
    error_kind : str
        ``""``, or what went wrong: ``build`` and ``run`` are errors that TVM reported, ``build-timeout``
        and ``run-timeout`` missed deadlines, ``crash`` a worker that died.
    error : str
        ``""``, or one line saying what happened.
    device : str
        ``"HOST:PORT"`` of the RPC server it ran on; ``""`` on this machine.
    """

    latencies: tuple[float, ...] = ()
    serial_latencies: tuple[float, ...] = ()
    build_s: float = 0.0
    run_s: float = 0.0
    stopped_early: bool = False
    error_kind: ErrorKind = ""
    error: str = ""
    device: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is a latency."""
        return bool(self.latencies)

    @property
    def latency(self) -> float:
        """The fastest repeat in seconds; infinite if the candidate failed."""
        return min(self.latencies, default=math.inf)
