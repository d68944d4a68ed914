"""The parent's handle of one worker process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import msgspec

from pretune.measure import worker

log = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""How long a worker may take to import TVM, in seconds."""
SLICE_S = 0.5
"""The most that a deadline advances between two looks at the clock, in seconds: a machine or a process group
that was suspended does not make its candidates late."""
_LOG_BYTES = 1 << 20
_BOOT = """\
import sys
sys.path[:] = {path!r}
from {module} import main
main({fd}, {parent}, *{args!r})
"""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(worker.Reply).decode


@dataclass(frozen=True)
class Died:
    """The worker died while it carried out a request."""

    seconds: float
    error: str


@dataclass(frozen=True)
class Late:
    """The worker missed its deadline and was killed."""

    seconds: float
    error: str


Answer = worker.Done | worker.Failed | Died | Late


@dataclass(frozen=True)
class Job:
    """A candidate on its way: its number within the pool, and its module as `tvm.ir.save_json` writes it."""

    index: int
    text: str


class WorkerProcess:
    """One worker process, started on creation. It carries out one request at a time.

    Parameters
    ----------
    *args
        What ``main`` of the module takes, from `target` on.
    module : str
        Whose ``main`` the process runs.

    Attributes
    ----------
    starting : bool
        Whether it has yet to report that it is ready.
    busy : bool
        Whether it is starting or carries out a request.
    job : Job or None
        What it is compiling.
    built : dict of int to (Job, float)
        What it has compiled, and in how many seconds, by `Job.index`.
    """

    def __init__(self, *args: str | float, module: str = worker.__name__) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile("ab+")  # noqa: SIM115  (lives as long as the worker)
        # The child looks for modules exactly where this process does, whatever changed sys.path.
        path = [os.path.abspath(entry) for entry in sys.path]  # noqa: PTH100  ("" is the working folder)
        boot = _BOOT.format(path=path, module=module, fd=theirs.fileno(), parent=os.getpid(), args=args)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", boot],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for the parent, which then kills its workers
            )
        self.connection = Connection(ours.detach())
        self.starting = True
        self.job: Job | None = None
        self.built: dict[int, tuple[Job, float]] = {}
        self._begin("start", START_TIMEOUT)

    def _begin(self, what: str, seconds: float) -> None:
        self.busy, self._what, self._left, self._allowed = True, what, seconds, seconds
        self._started = time.perf_counter()
        log.debug("begin %s", what)

    @property
    def alive(self) -> bool:
        """Whether it has not been killed; a dead process shows when it is next spoken to."""
        return not self.connection.closed

    def send(self, request: worker.Request, seconds: float) -> bool:
        """Hand a request with a deadline to an idle worker; False if it turns out to be dead."""
        if os.fstat(self._log.fileno()).st_size > _LOG_BYTES:
            os.ftruncate(self._log.fileno(), 0)
        try:
            self.connection.send_bytes(_encode(request))
        except OSError:
            return False
        self._begin(f"{type(request).__name__.lower()} {getattr(request, 'index', '')}".strip(), seconds)
        return True

    def _receive(self) -> Answer:
        try:
            reply = _decode(self.connection.recv_bytes())
        except (EOFError, OSError, msgspec.DecodeError):
            return Died(time.perf_counter() - self._started, self.kill(died=True))
        self.busy = False
        log.debug("end %s", self._what)
        return reply

    def _late(self) -> Answer:
        self.kill()
        return Late(time.perf_counter() - self._started, f"took longer than {self._allowed:g} s")

    def kill(self, died: bool = False) -> str:
        """End the process and whatever it started; one line saying how it had died, if it had."""
        if not self.alive:
            return "worker is gone"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0 if died else 0.0)  # its exit status comes a moment after its socket closes
        code = self.process.returncode
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)
        self.connection.close()
        if self.busy:
            self.busy = False
            log.debug("end %s (killed)", self._what)
        file = self._log.fileno()
        text = os.pread(file, 4096, max(0, os.fstat(file).st_size - 4096)).decode(errors="replace")
        self._log.close()
        if code is None:
            how = "worker killed"
        elif code < 0:
            how = f"worker died of {signal.Signals(-code).name}"
        else:
            how = f"worker exited with status {code}"
        # TVM's handler of signals prints a stack, a frame a line, which does not say what happened.
        lines = [line.strip(" !") for line in text.splitlines()]
        last = next((line for line in reversed(lines) if line and not line.startswith(("File ", "0x"))), "")
        return f"{how}: {last[:300]}" if last else how


def wait_any(workers: list[WorkerProcess]) -> list[tuple[WorkerProcess, Answer]]:
    """Wait until a busy worker answers, dies or is late; empty if none did for a moment."""
    busy = [one for one in workers if one.busy]
    if not busy:
        return []
    start = time.monotonic()
    readable = wait([one.connection for one in busy], min(SLICE_S, *(max(0.0, one._left) for one in busy)))
    spent = min(time.monotonic() - start, SLICE_S)
    answers: list[tuple[WorkerProcess, Answer]] = []
    for one in busy:
        one._left -= spent
        if one.connection in readable:
            answers.append((one, one._receive()))
        elif one._left <= 0:
            answers.append((one, one._late()))
    return answers


def kill_all(workers: list[WorkerProcess], owner: int) -> None:
    """End all processes in a list, and empty it, unless this is a forked child of the process `owner`."""
    if os.getpid() == owner:
        for one in workers:
            one.kill()
        workers.clear()
