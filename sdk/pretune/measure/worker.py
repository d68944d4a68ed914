"""The worker process: compiles candidates in process, times them, and may die at any moment.

It is started by `pretune.measure.process`, never imported by a user. It answers one request at a time over a
socket; its standard output and error are a temporary file of the parent, which reads its last line if the
worker dies. Nothing here imports TVM before `main` has run.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pretune import env
from pretune.errors import one_line

if TYPE_CHECKING:
    import numpy as np

REPEATS = 3
REPEAT_S = 0.005
"""How long one repeat of a fast candidate lasts, in seconds."""
SPEND_S = 0.25
"""Repeats of a slow candidate stop once its runs took this long in all, in seconds."""
ABSOLUTE_LIMIT_S = 0.05
"""Where a candidate counts as slow when no best latency is known, in seconds."""
FLOOR_S = 20e-6
"""Calls shorter than this are never called slow: a call from Python is too coarse to tell."""
SPIN_S = 0.005
"""How long TVM's threads spin at most after a call, in seconds, with the spin count that `main` sets."""
SLOWED = 1.15
"""Time of the probe over its best at which something else, such as another guest of this host on the other
hyperthread of a core, takes so much of the machine that a repeat beside it is not to be trusted."""
SAVED_S = 1.0
"""How much time to wait may be saved up, in seconds."""
FORGET = 0.04
"""Share by which the best time of the probe grows for each second of waiting in vain."""
TURN = 0.2
"""Share of a measurement's patience that one repeat has which is timed in turns with others: it is one of
several, of which the fastest counts."""
CHECK_S = 0.002
"""Pause between two looks whether the machine is quiet, in seconds."""
_SIGNATURES_KEPT = 4
_PR_SET_PDEATHSIG = 1


class Request(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of what the parent asks for."""


class Build(Request, frozen=True):
    """Compile the module (JSON of `tvm.ir.save_json`) and keep its function as `index`."""

    index: int
    mod: str


class Export(Request, frozen=True):
    """Compile the module and link it into a shared library at `path`."""

    index: int
    mod: str
    path: str


class Time(Request, frozen=True):
    """Time a built candidate and drop it. `limit` in seconds per call; infinite for none.

    With `serial`, once more on one thread, unless it was slow.
    """

    index: int
    limit: float
    serial: bool = False


class Repeat(Request, frozen=True):
    """One repeat of a built candidate; `number` calls, or 0 to choose."""

    index: int
    number: int


class Outputs(Request, frozen=True):
    """Call a built candidate once on seeded inputs; send the arguments in `want` and those that changed."""

    index: int
    seed: int
    signed: bool
    want: tuple[int, ...]


class Drop(Request, frozen=True):
    """Forget a built candidate."""

    index: int


class Calibrate(Request, frozen=True):
    """Time the fixed kernel."""


class Array(msgspec.Struct, array_like=True, frozen=True):
    """One argument's contents."""

    position: int
    dtype: str
    shape: tuple[int, ...]
    data: bytes


Signature = tuple[tuple[str, tuple[int, ...]], ...]
"""Dtype and shape of each argument."""


class Done(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """The request was carried out in `seconds`."""

    seconds: float = 0.0
    latencies: tuple[float, ...] = ()
    serial_latencies: tuple[float, ...] = ()
    stopped_early: bool = False
    number: int = 0
    arrays: tuple[Array, ...] = ()
    signature: Signature = ()


class Failed(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """TVM reported an error after `seconds`; the worker lives on."""

    seconds: float = 0.0
    error: str


AnyRequest = Build | Export | Time | Repeat | Outputs | Drop | Calibrate
Reply = Done | Failed


def random_array(
    shape: tuple[int, ...], dtype: str, rng: np.random.Generator, low: float, signed: bool
) -> np.ndarray:
    """Random contents: floats of magnitude `low` to ``10 * low`` (no denormals); integers are 0 or 1, so that
    they are valid indices."""
    import ml_dtypes
    import numpy as np

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = math.prod(shape)
    if size == 0:
        return np.zeros(shape, kind)
    # A prime period: large arrays cost no random numbers, and no stride that a schedule uses divides it.
    count = min(size, 65521)
    if kind.kind in "biu":
        values = rng.integers(0, 2, count)
    else:
        values = rng.uniform(low, 10 * low, count)
        if signed:
            values *= rng.choice((-1.0, 1.0), count)
    return np.resize(values.astype(kind), shape)


def to_numpy(array: Array) -> np.ndarray:
    """The array that a message carries."""
    import ml_dtypes
    import numpy as np

    dtype = np.dtype(getattr(ml_dtypes, array.dtype, array.dtype))
    return np.frombuffer(array.data, dtype).reshape(array.shape)


HICCUP_S = 0.02
"""Threads that wait for a core on a busy machine lose whole ticks of the scheduler, 4 ms each."""


def compiled(text: str, target: Any) -> tuple[Any, Signature]:
    """A candidate's executable, and its arguments."""
    import tvm
    from tvm.s_tir.meta_schedule.arg_info import ArgInfo
    from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock

    mod: Any = tvm.ir.load_json(text)
    infos = [info.as_json() for info in ArgInfo.from_prim_func(mod["main"])]
    signature = tuple((str(dtype), tuple(map(int, shape))) for _, dtype, shape in infos)
    # As MetaSchedule's own builder does.
    mod = RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(mod)
    return tvm.compile(mod, target=target), signature


class Gate:
    """Has repeats timed while the cores run at full speed.

    On a host with other guests a core runs at half its speed for up to a second at a time, whenever the other
    hyperthread of it is busy. Repeats within a few milliseconds then agree, and are wrong.

    Parameters
    ----------
    probe : callable
        Runs a short, fixed piece of work on all threads; its time in seconds.
    patience : float
        Seconds that each measurement may wait for the machine to itself, on average: what one does not need
        is left to those that follow.
    """

    def __init__(self, probe: Callable[[], float], patience: float) -> None:
        self._probe, self._patience = probe, patience
        self._best = math.inf
        self._saved = 0.0

    def is_open(self) -> bool:
        """Whether the cores run at full speed now, as far as is known."""
        took = min(self._probe() for _ in range(3))
        self._best = min(self._best, took)
        return took <= SLOWED * self._best

    def repeats(self, run: Callable[[], float], count: int, share: float = 1.0) -> tuple[float, ...]:
        """`count` results of `run`, all at full speed; once patience runs out, the best there are.

        `share` is how much of a measurement's patience this one has.
        """
        trusted: list[float] = []
        doubtful: list[float] = []
        left = min(self._saved, SAVED_S) + share * self._patience
        waited = 0.0
        ready = self.is_open()
        while len(trusted) < count:
            began = time.perf_counter()
            late, before = waited >= left, ready
            if ready or late:
                result = run()
                ready = self.is_open()
                if before and ready:
                    trusted.append(result)
                    continue
                doubtful.append(result)
                if late and len(trusted) + len(doubtful) >= count:
                    self._best *= 1 + FORGET * waited  # or one lucky moment would have all wait, for good
                    break
            else:
                time.sleep(CHECK_S)
                ready = self.is_open()
            waited += time.perf_counter() - began
        self._saved = max(0.0, left - waited)
        return tuple(trusted or sorted(doubtful)[:count])


class Built:
    """A compiled candidate, ready to run."""

    def __init__(self, module: Any, signature: Signature, device: Any) -> None:
        self.module, self.signature, self.device = module, signature, device
        # LLVM generates machine code when a function is first asked for: that belongs to the build.
        self.function = module["main"]

    def run(self, args: list[Any]) -> None:
        """Run once."""
        self.function(*args)
        self.device.sync()

    def call(self, args: list[Any]) -> float:
        """Run; seconds a call."""
        start = time.perf_counter()
        self.run(args)
        return time.perf_counter() - start

    def evaluate(self, args: list[Any], number: int, repeat: int) -> tuple[float, ...]:
        """`repeat` averages over `number` calls, in seconds per call, after one call that does not count."""
        timer = self.module.time_evaluator("main", self.device, number=number, repeat=repeat)
        return tuple(map(float, timer(*args).results))

    def time(self, args: list[Any], limit: float, gate: Gate) -> Done:
        """Time it: a cold call, a warm one that decides, then `REPEATS` repeats of `REPEAT_S`.

        Ordinary candidates take under 50 ms in all on a quiet machine, slow ones two to four calls.
        """
        cold = self.call(args)
        if cold > max(limit, 1.0):
            return Done(latencies=(cold,), stopped_early=True, number=1)
        warm = self.call(args)
        if limit < warm < HICCUP_S:  # a hiccup of the machine shows up in one call, not in three
            warm = min(warm, self.call(args), self.call(args))
        if warm > max(limit, FLOOR_S):
            return Done(latencies=(warm,), stopped_early=True, number=1)
        if warm > ABSOLUTE_LIMIT_S:
            latencies, spent = [warm], cold + warm
            while len(latencies) < REPEATS and spent + warm < SPEND_S:
                latencies.append(self.call(args))
                spent += latencies[-1]
            return Done(latencies=tuple(latencies), number=1)
        number = max(1, round(REPEAT_S / warm))
        latencies = gate.repeats(lambda: self.evaluate(args, number, 1)[0], REPEATS)
        return Done(latencies=latencies, number=number)


class Worker:
    """State of the worker process: the target, the compiled candidates, the argument arrays."""

    def __init__(self, target: str, num_threads: int, patience: float) -> None:
        self.patience = patience
        self.everywhere = os.sched_getaffinity(0)
        self.cores = pick_cores(num_threads)
        self.num_threads = num_threads
        self.bound = env.bind_threads() and len(self.cores) == num_threads
        os.environ["TVM_BIND_THREADS"] = "1" if self.bound else "0"

        import tvm

        self.configure: Any = tvm.get_global_func("runtime.config_threadpool")
        if self.bound:
            self.use_threads(num_threads)
        self.target: Any = tvm.ir.load_json(target)
        kind = self.target.kind.name
        self.device = tvm.runtime.device("cpu" if kind in ("llvm", "c") else kind)
        self.built: dict[int, Built] = {}
        self.arguments: OrderedDict[Any, list[Any]] = OrderedDict()
        self.kernel: Built | None = None
        self.gates: dict[int, Gate] = {}

    def gate(self, threads: int) -> Gate:
        """The gate of candidates that run on so many threads."""
        if threads not in self.gates:
            probe = self.build(matmul(PROBE))
            args = self.arrays(probe)
            probe.run(args)
            self.gates[threads] = Gate(lambda: probe.call(args), self.patience)
        return self.gates[threads]

    def use_threads(self, count: int) -> None:
        """Have candidates run on `count` threads."""
        if self.bound:
            one_core_per_thread = -2
            self.configure(one_core_per_thread, count, [str(core) for core in self.cores[:count]])
        else:
            fast_cores = 1
            self.configure(fast_cores, count)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Hold this thread on its core.

        TVM pins the other threads of its pool but lets this one, which does as much work, roam: now and then
        it shares a core with one of them for hundreds of calls, and the candidate looks twice as slow.
        """
        os.sched_setaffinity(0, self.cores[:1] if self.bound else self.everywhere)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self.everywhere)

    def build(self, text: str) -> Built:
        """Compile a module in process."""
        executable, signature = compiled(text, self.target)
        return Built(executable.jit(), signature, self.device)

    def arrays(self, built: Built) -> list[Any]:
        """Device arrays for a candidate's arguments, allocated once per signature."""
        import numpy as np
        import tvm

        found = self.arguments.pop(built.signature, None)
        if found is None:
            rng = np.random.default_rng(0)
            found = [
                tvm.runtime.tensor(random_array(shape, dtype, rng, 0.01, False), device=self.device)
                for dtype, shape in built.signature
            ]
            while len(self.arguments) >= _SIGNATURES_KEPT:
                self.arguments.popitem(last=False)
        self.arguments[built.signature] = found
        return found

    def handle(self, request: AnyRequest) -> Done:
        """Carry out one request."""
        match request:
            case Build():
                self.built[request.index] = self.build(request.mod)
                return Done()
            case Export():
                executable, signature = compiled(request.mod, self.target)
                # In the pool's folder, which goes even if this process is killed meanwhile.
                with tempfile.TemporaryDirectory(dir=Path(request.path).parent) as folder:
                    executable.export_library(request.path, workspace_dir=folder)
                return Done(signature=signature)
            case Time():
                built = self.built.pop(request.index)
                args = self.arrays(built)
                with self.pinned():
                    done = built.time(args, request.limit, self.gate(self.num_threads))
                    if request.serial and not done.stopped_early:
                        done.serial_latencies = self.time_serially(built, args, request.limit)
                    return done
            case Repeat():
                built = self.built[request.index]
                args = self.arrays(built)
                number = request.number
                with self.pinned():
                    if number == 0:
                        built.call(args)
                        number = max(1, round(REPEAT_S / built.call(args)))
                    gate = self.gate(self.num_threads)
                    latencies = gate.repeats(lambda: built.evaluate(args, number, 1)[0], 1, share=TURN)
                    return Done(latencies=latencies, number=number)
            case Outputs():
                return self.outputs(request)
            case Drop():
                self.built.pop(request.index, None)
                return Done()
            case Calibrate():
                kernel = self.kernel = self.kernel or self.build(matmul(CALIBRATION))
                args = self.arrays(kernel)
                with self.pinned():
                    gate = self.gate(self.num_threads)
                    latencies = gate.repeats(lambda: min(kernel.evaluate(args, 1, 12)), 5, share=4)
                    return Done(latencies=latencies, number=1)

    def time_serially(self, built: Built, args: list[Any], limit: float) -> tuple[float, ...]:
        """Latencies on one thread; `limit` is that of all threads."""
        self.use_threads(1)
        try:
            return built.time(args, limit * self.num_threads, self.gate(1)).latencies
        finally:
            self.use_threads(self.num_threads)

    def outputs(self, request: Outputs) -> Done:
        """Call once on fresh seeded arrays."""
        import numpy as np
        import tvm

        built = self.built[request.index]
        rng = np.random.default_rng(request.seed)
        before = [random_array(shape, dtype, rng, 0.1, request.signed) for dtype, shape in built.signature]
        args = [tvm.runtime.tensor(array, device=self.device) for array in before]
        built.run(args)
        arrays = []
        for position, (old, arg) in enumerate(zip(before, args, strict=True)):
            data = arg.numpy()
            if position in request.want or data.tobytes() != old.tobytes():
                arrays.append(Array(position, built.signature[position][0], data.shape, data.tobytes()))
        return Done(arrays=tuple(arrays))


CALIBRATION, PROBE = 384, 96
"""Sizes of the matmuls that tell how fast the machine is: in general, and right now."""


def matmul(n: int) -> str:
    """A fixed float32 matmul of n x n, tiled, vectorised, on all threads: JSON of its module."""
    import tvm
    from tvm import s_tir, te

    a: Any = te.placeholder((n, n), "float32", name="A")
    b: Any = te.placeholder((n, n), "float32", name="B")
    k = te.reduce_axis((0, n), name="k")
    c: Any = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), name="C")
    schedule: Any = s_tir.Schedule(tvm.IRModule({"main": te.create_prim_func([a, b, c])}))
    i, j, r = schedule.get_loops(schedule.get_sblock("C"))
    i0, i1 = schedule.split(i, [None, 8])
    j0, j1 = schedule.split(j, [None, 16])
    schedule.reorder(i0, j0, r, i1, j1)
    schedule.parallel(i0)
    schedule.vectorize(j1)
    schedule.unroll(i1)
    return str(tvm.ir.save_json(schedule.mod))


def pick_cores(count: int) -> list[int]:
    """CPUs to run `count` threads on, at first one a physical core; fewer if there are not as many."""
    first, siblings, seen = [], [], set()
    for cpu in sorted(os.sched_getaffinity(0)):
        core = str(cpu)
        with contextlib.suppress(OSError):
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        (siblings if core in seen else first).append(cpu)
        seen.add(core)
    return (first + siblings)[:count]


def main(fd: int, parent: int, target: str, num_threads: int, patience: float) -> None:
    """Compile and time candidates in this process, see `serve`.

    Parameters
    ----------
    fd, parent : int
        As of `serve`.
    target : str
        The TVM target, as `tvm.ir.save_json` writes it.
    num_threads : int
        Threads of a candidate that runs.
    patience : float
        As of `Gate`.
    """
    os.environ["TVM_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(num_threads)
    # Idle threads of TVM spin for some 50 ms by default, which the next worker would feel; now for 3 ms.
    os.environ.setdefault("TVM_THREAD_POOL_SPIN_COUNT", "20000")
    serve(fd, parent, lambda: Worker(target, num_threads, patience).handle, AnyRequest)


def serve(fd: int, parent: int, start: Callable[[], Callable[[Any], Reply]], requests: Any) -> None:
    """Serve requests until the parent closes the socket or dies.

    Parameters
    ----------
    fd : int
        The worker's end of the socket pair.
    parent : int
        Process id of the parent.
    start : callable
        Gets ready, and returns what carries out a request.
    requests : type
        Of requests, for the decoder.
    """
    # A worker inside LLVM does not see its socket close, so let the kernel end it with its parent.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    # If a candidate exhausts memory, the worker should go before the user's process does.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.modules["torch"] = None  # type: ignore[assignment]  # `import tvm` would spend 2 s importing it
    connection = Connection(fd)
    handle = start()
    encode = msgspec.msgpack.Encoder().encode
    decode = msgspec.msgpack.Decoder(requests).decode
    connection.send_bytes(encode(Done()))
    while True:
        try:
            request = decode(connection.recv_bytes())
        except EOFError:
            return
        begun = time.perf_counter()
        try:
            reply = handle(request)
        except Exception as error:  # whatever TVM raises is the candidate's fault, not the worker's
            name, line = type(error).__name__, one_line(error)
            reply = Failed(error=line if line.startswith(name) else f"{name}: {line}")
        reply.seconds = time.perf_counter() - begun
        connection.send_bytes(encode(reply))
