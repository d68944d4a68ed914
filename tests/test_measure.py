"""The measuring pool: real workers, real candidates, real deaths."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import psutil
import pytest
import tvm
from tvm import s_tir, te

from pretune.errors import MeasureError, OptionError
from pretune.measure import MeasurePool, difference
from pretune.measure.worker import Gate

TARGET = {"kind": "llvm", "num-cores": 2}


def matmul(n: int, scale: float = 1.0) -> tvm.IRModule:
    """The untuned program; another `scale` makes a wrong candidate."""
    a, b = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B")
    k = te.reduce_axis((0, n), name="k")
    c = te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j] * scale, axis=k), name="C")
    return tvm.IRModule({"main": te.create_prim_func([a, b, c])})


def tiled(n: int) -> tvm.IRModule:
    """A much better schedule of `matmul`."""
    schedule = s_tir.Schedule(matmul(n))
    i, j, k = schedule.get_loops(schedule.get_sblock("C"))
    j0, j1 = schedule.split(j, [None, 16])
    schedule.reorder(i, j0, k, j1)
    schedule.vectorize(j1)
    return schedule.mod


def unrolled(n: int) -> tvm.IRModule:
    """A schedule that keeps LLVM busy far beyond any deadline here: n**3 statements in one block."""
    schedule = s_tir.Schedule(matmul(n))
    for loop in schedule.get_loops(schedule.get_sblock("C")):
        schedule.unroll(loop)
    return schedule.mod


def copy(shape: tuple[int, ...], dtype: str, offset: int = 0) -> tvm.IRModule:
    """``B = A``, reading `offset` elements away: a large one is a segmentation fault."""
    a = te.placeholder(shape, dtype, name="A")
    b = te.compute(shape, lambda *i: a(*i) if not offset else a(i[0].astype("int64") + offset), name="B")
    return tvm.IRModule({"main": te.create_prim_func([a, b])})


def parallel(n: int) -> tvm.IRModule:
    schedule = s_tir.Schedule(tiled(n))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("C"))[0])
    return schedule.mod


def processes(pool: MeasurePool) -> list[psutil.Process]:
    return [psutil.Process(one.process.pid) for one in pool._workers]


@pytest.fixture(scope="module")
def shared() -> Iterator[MeasurePool]:
    with MeasurePool(TARGET, workers=1, num_threads=2, build_timeout=60, run_timeout=30) as pool:
        yield pool


@contextlib.contextmanager
def on_event(
    pattern: str = "", action: Callable[[], None] | None = None, *, into: list[str] | None = None
) -> Iterator[list[str]]:
    """Record what the pool does, and act once when an event matches `pattern`."""
    seen: list[str] = [] if into is None else into
    pending = [action] if action is not None else []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            if pending and re.fullmatch(pattern, seen[-1]):
                pending.pop()()

    logger, handler = logging.getLogger("pretune.measure"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield seen
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def kill_soon(pool: MeasurePool, index: int, *, building: bool) -> Callable[[], None]:
    """An action that kills the worker of a candidate with SIGKILL half a second later."""

    def kill() -> None:
        for one in pool._workers:
            if index in one.built or (building and one.job is not None and one.job.index == index):
                os.kill(one.process.pid, signal.SIGKILL)

    return threading.Timer(0.5, kill).start


def test_latencies_are_plausible_and_ordered(shared: MeasurePool) -> None:
    seen: list[int] = []
    naive, good = shared.measure([matmul(256), tiled(256)], on_result=lambda at, _: seen.append(at))
    assert sorted(seen) == [0, 1]
    assert naive.ok and good.ok and naive.error == good.error == ""
    assert 1 <= len(good.latencies) <= 3 and good.latency == min(good.latencies)
    assert 1e-5 < good.latency < naive.latency < 5.0  # 33 million float operations
    assert good.build_s > 0 and good.run_s > 3 * good.latency


def test_a_slow_candidate_is_stopped_early(shared: MeasurePool) -> None:
    slow, good = shared.measure([matmul(256), tiled(256)], best=1e-6)
    assert slow.stopped_early and len(slow.latencies) == 1
    assert good.stopped_early
    (good,) = shared.measure([tiled(256)], best=10.0)
    assert not good.stopped_early and good.ok


def test_one_build_gives_a_latency_on_one_thread_too(shared: MeasurePool) -> None:
    fast, slow = shared.measure([tiled(128), matmul(384)], best=1e-3, serial=True)
    assert fast.ok and fast.serial_latencies
    assert slow.stopped_early and not slow.serial_latencies
    assert not shared.measure([tiled(128)])[0].serial_latencies


def test_finalists_take_turns(shared: MeasurePool) -> None:
    with on_event() as events:
        results = shared.interleave([matmul(128), tvm.IRModule({}), tiled(128)], rounds=3)
    assert [len(result.latencies) for result in results] == [3, 0, 3]
    assert results[1].error_kind == "build"
    order = [event.split()[-1] for event in events if event.startswith("begin repeat")]
    assert len(order) == 6 and order == order[:2] * 3 and order[0] != order[1]


def test_a_crash_costs_one_finalist(shared: MeasurePool) -> None:
    crash = copy((8,), "float32", 1 << 40)
    results = shared.interleave([matmul(64), crash, tiled(64)], rounds=3)
    assert [len(result.latencies) for result in results] == [3, 0, 3]
    assert results[1].error_kind == "crash"


def test_an_invalid_module_is_a_build_error(shared: MeasurePool) -> None:
    bad, good = shared.measure([tvm.IRModule({}), tiled(64)])
    assert (bad.ok, bad.error_kind) == (False, "build")
    assert "main" in bad.error and "\n" not in bad.error
    assert good.ok
    (garbage,) = shared.measure(["not json"])
    assert garbage.error_kind == "build"


def test_a_wrong_candidate_is_caught(shared: MeasurePool) -> None:
    assert shared.compare(matmul(64), parallel(64)) is None
    line = shared.compare(matmul(64), matmul(64, scale=1.01))
    assert line is not None and "argument 2 (float32, 64x64)" in line and "\n" not in line
    assert shared.compare(matmul(64), matmul(64, scale=1.01), tolerance={"float32": (0.1, 0.1)}) is None
    crash = shared.compare(copy((64,), "float32"), copy((64,), "float32", offset=1 << 40))
    assert crash is not None and crash.startswith("fails to run: worker died of SIG")
    with pytest.raises(MeasureError, match="the reference fails to build"):
        shared.compare(tvm.IRModule({}), matmul(64))


def test_a_program_that_needs_positive_inputs_is_compared_on_those(shared: MeasurePool) -> None:
    def program(scale: float) -> tvm.IRModule:
        # All NaN where any input is negative, so that signed inputs cannot tell the two apart.
        a = te.placeholder((2, 64), name="A")
        k = te.reduce_axis((0, 64), name="k")
        b = te.compute((2,), lambda i: te.sum(te.sqrt(a[i, k]) * scale, axis=k), name="B")
        return tvm.IRModule({"main": te.create_prim_func([a, b])})

    assert np.isnan(shared.outputs(program(1.0))[1]).all()
    assert shared.compare(program(1.0), program(1.0)) is None
    assert "instead of" in str(shared.compare(program(1.0), program(2.0)))


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "int64", "bool"],
)
@pytest.mark.parametrize("shape", [(), (3, 5)])
def test_every_dtype_and_rank_runs(shared: MeasurePool, dtype: str, shape: tuple[int, ...]) -> None:
    outputs = shared.outputs(copy(shape, dtype), seed=3)
    if not outputs:  # a scalar of 0 or 1 may already be what is written
        assert shape == () and dtype in ("int8", "uint8", "int32", "int64", "bool")
    else:
        assert outputs[1].shape == shape and outputs[1].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert np.all(np.abs(outputs[1].astype(np.float64)) <= 1)
    assert shared.measure([copy(shape, dtype)])[0].ok


def test_timing_threads_have_a_core_each(shared: MeasurePool) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("one core")
    masks: list[dict[int, set[int]]] = []

    def look() -> None:
        threads = [thread.id for thread in processes(shared)[0].threads()]
        masks.append({thread: os.sched_getaffinity(thread) for thread in threads})

    with on_event("begin time .*", threading.Timer(0.3, look).start):
        assert shared.measure([matmul(768)])[0].ok  # over 0.3 s a call
    pinned = [mask for mask in masks[0].values() if len(mask) == 1]
    assert len(pinned) == 2 and not pinned[0] & pinned[1]


def test_calibration_is_repeatable(shared: MeasurePool) -> None:
    first, second = shared.calibrate(), shared.calibrate()
    assert 1e-4 < first < 1.0 and 0.1 < first / second < 10


def test_repeats_beside_something_else_do_not_count() -> None:
    probes = iter([1.0] * 3 + [2.0] * 9 + [1.0] * 99)  # full speed, then half of it for three looks
    runs = iter([2.0, 1.1, 1.0, 1.2])
    gate = Gate(lambda: next(probes), 60.0)
    assert gate.repeats(lambda: next(runs), 3) == (1.1, 1.0, 1.2)


def test_repeats_on_a_machine_that_stays_busy_end() -> None:
    probes = iter([1.0] * 3)
    gate = Gate(lambda: next(probes, 2.0), 0.05)
    assert gate.is_open()
    assert gate.repeats(lambda: 5.0, 3) == (5.0, 5.0, 5.0)


def test_patience_that_is_not_needed_is_saved() -> None:
    """For a while: then a machine that stays busy has nobody wait, and the gate forgets how fast it was."""
    speed = [1.0]
    gate = Gate(lambda: speed[0], 0.01)
    for _ in range(4):
        gate.repeats(lambda: 1.0, 1, share=0.5)
    speed[0] = 2.0
    start = time.perf_counter()
    assert gate.repeats(lambda: 5.0, 1) == (5.0,)
    assert time.perf_counter() - start > 4 * 0.5 * 0.01
    assert gate._saved == 0 and gate._best > 1.0


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "9", "0,5"])
def test_patience_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PRETUNE_PATIENCE", value)
    with pytest.raises(OptionError, match=f"PRETUNE_PATIENCE={value} is no number of seconds from 0 to 1"):
        MeasurePool({"kind": "llvm", "num-cores": 1})


def test_nothing_is_timed_while_something_builds() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def quiet() -> Iterator[None]:
        events.append("quiet")
        yield
        events.append("loud")

    # Batches of three, and a candidate that takes its worker's others with it.
    crashing = copy((8,), "float32", 1 << 40)
    candidates = [tiled(64), parallel(64), crashing, matmul(64), tiled(32), tiled(16), matmul(16)]
    with MeasurePool(TARGET, workers=2, quiet=quiet, batch=3) as pool, on_event(into=events):
        results = pool.measure(candidates)
    assert [result.error_kind for result in results] == ["", "", "crash", "", "", "", ""]
    quiet_now, running = False, set[str]()
    for event in events:
        if event in ("quiet", "loud"):
            assert not running
            quiet_now = event == "quiet"
            continue
        verb, what = event.removesuffix(" (killed)").split(" ", 1)
        if verb == "begin":
            assert what.startswith("time") == quiet_now
            assert not (quiet_now and running)
            running.add(what)
        else:
            running.discard(what)
    assert sum(event.startswith("begin time") for event in events) == len(candidates)


def test_a_build_has_a_deadline() -> None:
    with MeasurePool(TARGET, workers=2, build_timeout=4) as pool:
        start = time.monotonic()
        good, endless, other = pool.measure([tiled(64), unrolled(32), matmul(64)])
        assert time.monotonic() - start < 60
    assert good.ok and other.ok
    assert endless.error_kind == "build-timeout" and "4 s" in endless.error
    assert endless.build_s >= 3.9


def test_a_run_has_a_deadline(shared: MeasurePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "run_timeout", 2)
    slow, good = shared.measure([matmul(2048), tiled(64)])  # 17 billion operations, one at a time
    assert slow.error_kind == "run-timeout" and good.ok


@pytest.mark.parametrize("building", [True, False])
def test_sigkill_costs_one_candidate(building: bool) -> None:
    victim = unrolled(32) if building else matmul(2048)
    with MeasurePool(TARGET, workers=1, build_timeout=120, run_timeout=120) as pool:
        pattern = f"begin {'build' if building else 'time'} 1"
        with on_event(pattern, kill_soon(pool, 1, building=building)):
            first, killed, last = pool.measure([tiled(64), victim, matmul(64)])
    assert first.ok and last.ok
    assert killed.error_kind == "crash" and "SIGKILL" in killed.error


def test_an_idle_worker_that_dies_costs_nothing(shared: MeasurePool) -> None:
    assert shared.measure([tiled(64)])[0].ok
    processes(shared)[0].send_signal(signal.SIGKILL)
    time.sleep(0.2)
    assert all(result.ok for result in shared.measure([tiled(64), matmul(64)]))
    processes(shared)[0].send_signal(signal.SIGKILL)
    time.sleep(0.2)
    assert shared.calibrate() > 0


def test_ctrl_c_ends_the_workers_and_the_pool_goes_on() -> None:
    with MeasurePool(TARGET, workers=2, build_timeout=120) as pool:
        main = threading.main_thread().ident
        assert main is not None
        interrupt = threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start
        workers: list[psutil.Process] = []

        def act() -> None:
            workers.extend(processes(pool))
            interrupt()

        with on_event("begin build .*", act), pytest.raises(KeyboardInterrupt):
            pool.measure([unrolled(32), unrolled(32)])
        assert len(workers) == 2 and not any(one.is_running() for one in workers)
        assert pool.measure([tiled(64)])[0].ok
        workers = processes(pool)
    assert workers and not any(one.is_running() for one in workers)


def test_workers_that_cannot_start_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'libLLVM is broken' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    message = "status 3: libLLVM is broken; run: pretune doctor"
    with MeasurePool(TARGET) as pool, pytest.raises(MeasureError, match=message):
        pool.measure([tiled(64)])


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_measure import TARGET, tiled, unrolled
from pretune.measure import MeasurePool
pool = MeasurePool(TARGET, workers=1, build_timeout=600)
print("measured", pool.measure([tiled(64)])[0].ok, pool._workers[0].process.pid, flush=True)
if {endless}:
    pool.measure([unrolled(32)])
"""


def script(tmp_path: Path, endless: bool) -> subprocess.Popen[str]:
    """A user's script without a main guard, in a process that has pretune on `sys.path` only."""
    path = tmp_path / "user.py"
    body = SCRIPT.format(tests=str(Path(__file__).parent), endless=endless)
    path.write_text(f"import sys\nsys.path[:0] = {sys.path!r}\n{body}")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path)


def test_a_script_without_main_guard(tmp_path: Path) -> None:
    with script(tmp_path, endless=False) as process:
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.startswith("measured True") and out.count("measured") == 1


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    with script(tmp_path, endless=True) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline().split()[2]))
        time.sleep(1)  # it is inside LLVM now, where a closed socket is not noticed
        assert worker.is_running()
        process.kill()
        process.wait()
        worker.wait(10)


def test_difference() -> None:
    a = np.linspace(-1, 1, 101, dtype=np.float32)
    assert difference({0: a}, {0: a * np.float32(1 + 1e-5)}) is None
    assert "101 values differ" in str(difference({0: a}, {0: a + np.float32(0.1)}))
    assert "(float32, 101)" in str(difference({0: a}, {0: np.where(a > 0.5, np.nan, a)}))
    holes = np.where(a > 0.5, np.nan, a).astype(np.float32)
    assert difference({0: holes}, {0: holes.copy()}) is None
    assert difference({0: np.array([np.inf, 1.0])}, {0: np.array([np.inf, 1.0 + 1e-12])}) is None
    assert difference({0: np.array([np.inf, 1.0])}, {0: np.array([-np.inf, 1.0])}) is not None
    assert difference({0: np.array([1, 2])}, {0: np.array([1, 3])}) is not None
    assert "became" in str(difference({0: a}, {0: a.astype(np.float64)}))
    assert "wrote arguments" in str(difference({0: a}, {1: a}))
    half = a.astype(np.float16)
    assert difference({0: half}, {0: (half * np.float16(1.01))}) is None
    low = a.astype(ml_dtypes.bfloat16)
    assert difference({0: low}, {0: (-low.astype(np.float32)).astype(ml_dtypes.bfloat16)}) is not None
