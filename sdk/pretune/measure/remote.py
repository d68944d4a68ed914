"""The process that holds one session with an RPC server, and dies with it.

It is started by `pretune.measure.farm`, as `pretune.measure.worker` is by a pool on this machine, and speaks
to it in the same way: a call into a device that hangs can only be ended with its process.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pretune.errors import one_line
from pretune.measure import worker
from pretune.measure.check import difference
from pretune.measure.worker import (
    ABSOLUTE_LIMIT_S,
    FLOOR_S,
    HICCUP_S,
    REPEAT_S,
    REPEATS,
    SPEND_S,
    Built,
    Done,
    Drop,
    Gate,
    Outputs,
    Repeat,
    Reply,
    Request,
    Signature,
    Time,
    Worker,
)

CALIBRATION_CALLS = 60


class Open(Request, frozen=True):
    """Begin a session, of at most `session_s` seconds, and load the guard in it."""

    host: str
    port: int
    matchkey: str
    session_s: int
    guard: str


class OnDevice(Request, frozen=True):
    """Carry out a request about the candidate in the library `path`; the session ends if it takes longer."""

    path: str
    signature: Signature
    seconds: float
    request: Time | Repeat | Outputs


class CalibrateDevice(Request, frozen=True):
    """Time the fixed kernel in the library `path`, and check what it computes."""

    path: str
    signature: Signature


class RemoteBuilt(Built):
    """A compiled candidate on the other side of a session. Every call that counts is timed there."""

    def __init__(self, session: Any, path: str, signature: Signature, device: Any) -> None:
        name = Path(path).name
        session.upload(path)
        super().__init__(session.load_module(name), signature, device)
        session.remove(name)

    def call(self, args: list[Any]) -> float:
        """Run twice; seconds of the second call."""
        return self.evaluate(args, 1, 1)[0]

    def time(self, args: list[Any], limit: float, gate: Gate) -> Done:
        """As on this machine, in fewer requests, and in the belief that the device is quiet."""
        del gate
        cold = super().call(args)  # with the way there and back, which is nothing beside a second
        if cold > max(limit, 1.0):
            return Done(latencies=(cold,), stopped_early=True, number=1)
        warm = self.call(args)
        if limit < warm < HICCUP_S:
            warm = min(warm, *self.evaluate(args, 1, 2))
        if warm > max(limit, FLOOR_S):
            return Done(latencies=(warm,), stopped_early=True, number=1)
        if warm > ABSOLUTE_LIMIT_S:
            repeats = min(REPEATS - 1, math.floor(SPEND_S / warm) - 4)  # three were made, one does not count
            more = self.evaluate(args, 1, repeats) if repeats > 0 else ()
            return Done(latencies=(warm, *more), number=1)
        number = max(1, round(REPEAT_S / warm))
        return Done(latencies=self.evaluate(args, number, REPEATS), number=number)


class RemoteWorker(Worker):
    """A worker whose candidates run on the other side of a session."""

    def __init__(self, target: str, num_threads: int) -> None:
        super().__init__(target, 1, 0.0)  # nothing runs on this machine
        self.num_threads, self.bound = num_threads, False
        self.session: Any = None
        self.deadline: Any = None

    def handle(self, request: Any) -> Done:
        """Carry out one request."""
        match request:
            case Open():
                return self.open(request)
            case OnDevice(request=inner):
                return self.watched(request.seconds, lambda: self.on_device(request, inner))
            case CalibrateDevice():
                return self.watched(0.0, lambda: self.calibrate(request))
            case _:
                return super().handle(request)

    def gate(self, threads: int) -> Gate:
        """Always open: whether this machine is busy says nothing about the device."""
        return Gate(lambda: 0.0, 0.0)

    def open(self, request: Open) -> Done:
        """Connect. The server then forks a process for this session, and the guard another one."""
        from tvm import rpc

        self.session = rpc.connect(request.host, request.port, request.matchkey, request.session_s)
        name = Path(request.guard).name
        self.session.upload(request.guard)
        guard = self.session.load_module(name)
        guard["guard"]()
        self.deadline = guard["deadline"]
        self.device = self.session.device(self.device.type)
        self.configure = self.session.get_function("runtime.config_threadpool")
        self.use_threads(self.num_threads)
        return Done()

    def watched(self, seconds: float, act: Callable[[], Done]) -> Done:
        """Act within a deadline on the device; end this process if the session is lost meanwhile."""
        try:
            self.deadline(math.ceil(seconds))
            done = act()
            self.deadline(0)
            return done
        except Exception as error:
            try:
                self.deadline(0)
            except Exception:
                print(one_line(error), file=sys.stderr, flush=True)
                os._exit(1)  # what is left of the session would raise when it is collected
            raise

    def on_device(self, request: OnDevice, inner: Time | Repeat | Outputs) -> Done:
        """Load a candidate, unless it is loaded, and carry out a request about it."""
        if inner.index not in self.built:
            self.built[inner.index] = RemoteBuilt(self.session, request.path, request.signature, self.device)
        done = super().handle(inner)
        if isinstance(inner, Outputs):
            super().handle(Drop(inner.index))
        return done

    def calibrate(self, request: CalibrateDevice) -> Done:
        """Time the fixed kernel, a matrix product, and compare what it leaves behind."""
        if self.kernel is None:
            self.kernel = RemoteBuilt(self.session, request.path, request.signature, self.device)
        args = self.arrays(self.kernel)
        latencies = self.kernel.evaluate(args, 1, CALIBRATION_CALLS)
        a, b, c = (arg.numpy() for arg in args)
        if wrong := difference({2: a @ b}, {2: c}):
            raise ValueError(f"computes a matrix product wrongly: {wrong}")
        return Done(latencies=latencies, number=1)


def main(fd: int, parent: int, target: str, num_threads: int) -> None:
    """Serve requests about one session, see `pretune.measure.worker.serve`."""

    def start() -> Callable[[Any], Reply]:
        return RemoteWorker(target, num_threads).handle

    worker.serve(fd, parent, start, Open | OnDevice | CalibrateDevice | Drop)
