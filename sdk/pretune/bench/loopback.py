"""A farm on this machine: TVM's own RPC tracker and servers, as processes that can be killed and stalled."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from pretune.errors import MeasureError, MissingExtraError
from pretune.measure import RPCAddress
from pretune.measure.tracker import Tracker

HOST, KEY = "127.0.0.1", "loopback"
START_S, POLL_S = 120.0, 0.1
SITE = """\
import ctypes, os, signal, sys
sys.modules["torch"] = None  # `import tvm` would spend seconds importing it
prctl, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
def end_with_parent():
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
os.register_at_fork(after_in_child=end_with_parent)
end_with_parent()
"""
"""``sitecustomize.py`` of the tracker, the servers and all that they start: Python runs it first."""


class LoopbackFarm:
    """A tracker and some servers, numbered from 0, until the ``with`` block ends.

    However that comes about: the kernel ends them with the thread that started them.

    Parameters
    ----------
    servers : int
    threads : int
        Of each server's candidates, unless its client asks for others.
    """

    def __init__(self, servers: int, *, threads: int = 1) -> None:
        if any(importlib.util.find_spec(name) is None for name in ("cloudpickle", "tornado")):
            raise MissingExtraError("TVM's RPC tracker", "bench")
        self.address = RPCAddress(HOST, _free_port(), KEY)
        self._threads = threads
        self._ports = [_free_port() for _ in range(servers)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._tracker: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="pretune-loopback-")
        (Path(self._folder.name) / "sitecustomize.py").write_text(SITE)
        self._errors = Path(self._folder.name) / "stderr"

    def __enter__(self) -> LoopbackFarm:
        try:
            self.start_tracker()
            self.wait(0)  # A server that finds no tracker tries again only after 5 s.
            for number in range(len(self._ports)):
                self.start(number)
            self.wait(len(self._ports))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for number in list(self._processes):
            self.kill(number)
        self.kill_tracker()
        self._folder.cleanup()

    def start_tracker(self) -> None:
        """Start the tracker; with `kill_tracker`, what a reboot of its machine does."""
        self._tracker = self._spawn("tvm.exec.rpc_tracker", self.address.port)

    def kill_tracker(self) -> None:
        """End the tracker with SIGKILL."""
        if self._tracker is not None:
            _signal(self._tracker, signal.SIGKILL)
            self._tracker.wait()
            self._tracker = None

    def start(self, number: int) -> None:
        """Start a server, again under the same port."""
        where = ("--tracker", str(self.address), "--key", self.address.key, "--silent")
        self._processes[number] = self._spawn("tvm.exec.rpc_server", self._ports[number], *where)

    def kill(self, number: int) -> None:
        """End a server, and the session it serves, with SIGKILL."""
        process = self._processes.pop(number)
        _signal(process, signal.SIGKILL)
        process.wait()

    def stall(self, number: int) -> None:
        """Stop a server and its session where they are; `resume` has them go on."""
        _signal(self._processes[number], signal.SIGSTOP)

    def resume(self, number: int) -> None:
        """Undo `stall`."""
        _signal(self._processes[number], signal.SIGCONT)

    def wait(self, count: int) -> None:
        """Wait until so many servers are registered."""
        for _ in range(int(START_S / POLL_S)):
            with contextlib.suppress(MeasureError):
                if len(Tracker(self.address).summary()[1]) >= count:
                    return
            processes = [self._tracker, *self._processes.values()]
            if any(process is not None and process.poll() is not None for process in processes):
                raise MeasureError(f"an RPC tracker or server on {HOST} has ended: {self._last_words()}")
            time.sleep(POLL_S)
        raise MeasureError(f"{count} RPC servers on {HOST} have not started in {START_S:.0f} s")

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _spawn(self, module: str, port: int, *options: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([self._folder.name, *sys.path])
        # Half of `import tvm` is about compiling, which nothing here does.
        more = {"PYTHONPATH": path, "TVM_NUM_THREADS": str(self._threads), "TVM_USE_RUNTIME_LIB": "1"}
        with self._errors.open("ab") as errors:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", module, "--host", HOST),
                    *("--port", str(port), "--port-end", str(port + 1), *options),
                ],
                env=os.environ | more,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )


class Chaos:
    """Kills, stalls, restarts and resumes servers in turn, one such step whenever `every` trials are done.

    Attributes
    ----------
    MOST_OUT : int
        Servers that are out at a time, at most; there must be more.
    log : list of str
        What was done.
    """

    MOST_OUT = 2

    def __init__(self, farm: LoopbackFarm, servers: int, every: int) -> None:
        self._farm, self._servers, self._every = farm, servers, every
        self._done = 0
        self.log: list[str] = []

    def trial_done(self) -> None:
        """Count a trial."""
        self._done += 1
        if self._done % self._every:
            return
        turn, step = divmod(self._done // self._every - 1, 4)
        first, second = turn % self._servers, (turn + 1) % self._servers
        acts = ((self._farm.kill, first), (self._farm.stall, second))
        acts += ((self._farm.start, first), (self._farm.resume, second))
        act, number = acts[step]
        act(number)
        self.log.append(f"{act.__name__} {number}")


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind((HOST, 0))
        return one.getsockname()[1]
