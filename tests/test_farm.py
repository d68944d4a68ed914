"""The farm: TVM's own tracker and servers on this machine, killed, stalled and restarted."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import tvm
from click.testing import CliRunner
from tvm.rpc.base import RPC_MAGIC

from pretune.bench.loopback import Chaos, LoopbackFarm
from pretune.cli import main
from pretune.errors import EnvironmentFaultError, MeasureError, OptionError
from pretune.measure import FarmPool, Measured, RPCAddress
from pretune.measure import farm as farm_module
from pretune.measure.fleet import Device, Session, Trial
from pretune.measure.process import Job
from pretune.measure.tracker import Tracker
from pretune.measure.worker import Done
from test_measure import copy, matmul, parallel, tiled

TARGET = {"kind": "llvm", "num-cores": 1}
CRASH = copy((8,), "float32", 1 << 40)


@pytest.fixture(scope="module")
def two() -> Iterator[LoopbackFarm]:
    with LoopbackFarm(2) as farm:
        yield farm


@pytest.fixture(scope="module")
def pool(two: LoopbackFarm) -> Iterator[FarmPool]:
    # The servers share cores with each other, and with whatever else runs here.
    with FarmPool(TARGET, two.address, tolerance=math.inf, build_timeout=60, run_timeout=30) as one:
        yield one


@pytest.fixture(scope="module")
def alone() -> Iterator[tuple[LoopbackFarm, FarmPool]]:
    """A farm with a single server, and a pool that measures on it."""
    with (
        LoopbackFarm(1) as farm,
        FarmPool(TARGET, farm.address, tolerance=math.inf, build_timeout=60, run_timeout=30) as pool,
    ):
        yield farm, pool


def test_candidates_are_measured_on_devices(pool: FarmPool) -> None:
    calls: Counter[int] = Counter()
    mods = [matmul(64), tiled(64), matmul(256)]
    naive, good, slow = pool.measure(mods, best=1e-4, serial=True, on_result=lambda at, _: calls.update([at]))
    assert naive.ok and good.ok and calls == {0: 1, 1: 1, 2: 1}
    assert good.serial_latencies and good.build_s > 0
    assert slow.stopped_early and len(slow.latencies) == 1
    assert {naive.device, good.device, slow.device} <= set(pool.devices)
    assert pool.calibrate() > 0


def test_a_crash_costs_one_candidate_and_no_server(two: LoopbackFarm, pool: FarmPool) -> None:
    first, crash, invalid, last = pool.measure([tiled(64), CRASH, "not json", parallel(64)])
    assert first.ok and last.ok
    assert (crash.error_kind, invalid.error_kind) == ("crash", "build")
    assert "ended 2 sessions" in crash.error and "\n" not in crash.error
    assert pool.measure([tiled(32)])[0].ok
    # Both serve on; which of them measures what is chance.
    assert len(two._processes) == 2 and all(one.poll() is None for one in two._processes.values())


def test_a_device_ends_a_candidate_at_its_deadline(pool: FarmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "run_timeout", 1.0)
    (slow,) = pool.measure([matmul(2048)])
    assert slow.error_kind == "run-timeout" and "1 s" in slow.error


def test_finalists_take_turns_on_one_device(pool: FarmPool) -> None:
    naive, crash, good = pool.interleave([matmul(64), CRASH, tiled(64)], rounds=3)
    assert len(naive.latencies) == len(good.latencies) == 3 and naive.device == good.device
    assert crash.error_kind == "crash"


def test_outputs_are_compared(pool: FarmPool) -> None:
    assert pool.compare(matmul(64), tiled(64)) is None
    assert "argument 2" in str(pool.compare(matmul(64), matmul(64, scale=1.01)))
    assert "fails to run" in str(pool.compare(copy((8,), "float32"), CRASH))


@pytest.mark.usefixtures("few_rounds")
def test_the_command_line_tunes_on_a_farm(two: LoopbackFarm, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(FarmPool.__init__.__kwdefaults__, "tolerance", math.inf)
    where = ["--rpc-tracker", str(two.address), "--rpc-key", two.address.key]
    command = [
        "tune",
        "--demo",
        "--trials",
        "3",
        "--op",
        "*matmul*",
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    result = CliRunner().invoke(main, [*command, "-q", *where])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").open()]
    assert len({json.dumps(r["trace"]) for r in records if r["kind"] == "trial" and r["trial"]}) >= 3
    assert all(r["device"].startswith("127.0.0.1:") for r in records)
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["cpu"] == found["microarch"]  # all that the target says of the devices


@pytest.mark.usefixtures("any_drift")
def test_fine_tuning_measures_on_a_farm(two: LoopbackFarm, weights: Path, tmp_path, monkeypatch) -> None:
    pytest.importorskip("torch")
    import pretune
    from pretune_export.finetune import plan

    monkeypatch.setitem(FarmPool.__init__.__kwdefaults__, "tolerance", math.inf)
    monkeypatch.setitem(plan.FINE_TUNING, "epochs", 1)
    monkeypatch.setitem(plan.FINE_TUNING, "least_steps", 0)
    monkeypatch.setitem(plan.FINE_TUNING, "candidates_with_states", 2)
    programs = []
    for n in (32, 48, 64):
        programs.append(tmp_path / f"{n}.json")
        programs[-1].write_text(str(tvm.ir.save_json(matmul(n))))
    target = {"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}
    result = pretune.finetune(
        programs, target=target, trials=48, base=weights, out=tmp_path / "out", search=False, rpc=two.address
    )
    assert result.schedules == 48 and result.tasks == {"train": 1, "validation": 1, "test": 1}
    rows = [json.loads(line) for line in (tmp_path / "out" / "collected" / "measured.jsonl").open()]
    assert all(row["device"].startswith("127.0.0.1:") for row in rows)


def test_every_trial_is_measured_once_whatever_happens_to_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The server that is stalled last resumes after all trials, so one of them is given up there.
    monkeypatch.setattr(farm_module, "STALL_S", 2.0)
    mods = [tiled(n) if n % 2 else matmul(n) for n in range(32, 72)]
    seen: Counter[int] = Counter()
    notices: list[str] = []
    with (
        LoopbackFarm(4) as farm,
        FarmPool(
            TARGET, farm.address, tolerance=math.inf, build_timeout=60, run_timeout=6, notify=notices.append
        ) as pool,
    ):
        chaos = Chaos(farm, 4, every=5)

        def on_result(at: int, _measured: Measured) -> None:
            seen[at] += 1
            chaos.trial_done()

        results = pool.measure(mods, on_result=on_result)
        answered = sum(device.trials for device in pool.devices.values())
    assert seen == Counter(range(40)) and answered == 40
    assert all(result.ok for result in results), [result.error for result in results if not result.ok]
    assert {act.split()[0] for act in chaos.log} == {"kill", "stall", "start", "resume"}
    assert notices and len({result.device for result in results}) >= 3


def test_chaos_leaves_a_server() -> None:
    result = CliRunner().invoke(main, ["bench", "farm", "--servers", "2", "--chaos"])
    assert result.exit_code == 2 and "none of 2 servers; give --servers 3 or more" in result.stderr


def test_a_stalled_device_is_abandoned_and_returns(
    alone: tuple[LoopbackFarm, FarmPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    farm, pool = alone
    notices: list[str] = []

    def notify(line: str) -> None:
        notices.append(line)
        if "has not answered" in line:
            farm.resume(0)

    assert pool.measure([tiled(64)])[0].ok
    monkeypatch.setattr(farm_module, "STALL_S", 2.0)
    monkeypatch.setattr(pool, "run_timeout", 2.0)
    monkeypatch.setattr(pool._fleet, "_notify", notify)
    farm.stall(0)
    assert pool.measure([tiled(32)])[0].ok
    assert any("has not answered" in line for line in notices)


def test_a_farm_without_devices_keeps_what_it_has(
    alone: tuple[LoopbackFarm, FarmPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    farm, pool = alone
    notices: list[str] = []
    pool.calibrate()
    monkeypatch.setattr(pool._fleet, "_notify", notices.append)
    monkeypatch.setattr(pool._fleet, "_wait", 2)
    kept: list[Measured] = []

    def on_result(_at: int, measured: Measured) -> None:
        kept.append(measured)
        farm.kill(0)

    with pytest.raises(MeasureError, match="could be used for 2 s; what was measured is kept"):
        pool.measure([tiled(64), tiled(32)], on_result=on_result)
    assert len(kept) == 1 and kept[0].ok
    assert any("is gone" in line for line in notices)
    monkeypatch.undo()
    farm.kill_tracker()
    farm.start_tracker()
    farm.wait(0)
    farm.start(0)
    # While it is gone again, the device in use is measured on.
    results = pool.measure([tiled(n) for n in (32, 48, 64)], on_result=lambda *_: farm.kill_tracker())
    assert all(result.ok for result in results)
    farm.start_tracker()


def both(pool: FarmPool) -> list[Session]:
    """Sessions of the two devices, once each is back from what an earlier test did to it."""
    pool.calibrate()
    end = time.monotonic() + 120
    while len(sessions := pool._fleet.idle(40.0)) < 2 and time.monotonic() < end:
        pool._fleet.answers(2)
    assert len(sessions) == 2
    return sessions


def test_a_device_with_wild_timings_is_set_aside(pool: FarmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    session, _other = both(pool)
    assert session.device is not None
    monkeypatch.setattr(pool._fleet, "_notify", notices.append)
    monkeypatch.setattr(pool._fleet, "_tolerance", 0.1)
    monkeypatch.setattr(session.device, "failures", 0)
    pool._fleet._meet(session, Done(latencies=(1e-3, 1e-3, 2e-3, 3e-3, 2e-3)))
    assert not session.alive
    what = f"device {session.device.address} is set aside: its timings vary wildly, by a factor of up to 3.0"
    assert notices == [f"{what}; looked at again in 2 s"]


def test_devices_that_differ_are_set_aside(pool: FarmPool, monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[str] = []
    fast, slow = both(pool)
    monkeypatch.setattr(pool._fleet, "_notify", notices.append)
    assert fast.device is not None and slow.device is not None
    fast.device.speed, slow.device.speed = 1e-3, 1.3e-3
    monkeypatch.setattr(pool._fleet, "_speed", 1e-3)
    monkeypatch.setattr(slow.device, "failures", 0)
    monkeypatch.setattr(pool._fleet, "_tolerance", 0.1)
    pool._fleet._compare([fast, slow])
    assert pool._fleet.idle(40.0) == [fast] and not slow.alive
    what = f"device {slow.device.address} is set aside: it takes 1.30 times as long as the others"
    assert notices == [f"{what}; looked at again in 2 s"]
    slow.device.away_until = math.inf
    while pool._fleet._tracker.summary()[0] == 0:
        time.sleep(0.1)
    for sessions in (1, 2):  # it is free, but not taken before its time has come
        pool._fleet._next_poll = 0.0
        pool._fleet._recruit(2)
        assert len(pool._fleet.sessions()) == sessions
        slow.device.away_until = 0.0


def test_a_candidate_that_every_device_has_lost_is_tried_again(pool: FarmPool) -> None:
    sessions = both(pool)
    first, second = (one.device.address for one in sessions if one.device is not None)
    lost = {0: [first], 1: [first, second]}
    trials = deque(Trial(Job(n, ""), Path(), lost_on=where) for n, where in lost.items())
    assert [pool._pick(trials, one) for one in sessions] == [trials[1], trials[0]]
    trials.pop()
    assert [pool._pick(trials, one) for one in sessions] == [None, trials[0]]


def test_a_device_that_fails_for_days_is_still_looked_at() -> None:
    assert [Device("", failures=n).absence() for n in (1, 3, 10, 2000)] == [2, 8, 240, 240]


def test_addresses() -> None:
    assert RPCAddress.parse(None, None) is None
    assert RPCAddress.parse("[::1]:9190", "k") == RPCAddress("::1", 9190, "k")
    for tracker in ("host", "host:", ":9190", "host:99999", "a b:1"):
        with pytest.raises(OptionError, match="no HOST:PORT"):
            RPCAddress.parse(tracker, "k")
    with pytest.raises(OptionError, match="both"):
        RPCAddress.parse("host:9190", None)


def test_a_farm_ends_with_its_process() -> None:
    farm = LoopbackFarm(1)

    def hold(ready: Connection) -> None:
        with farm:
            ready.send(True)
            time.sleep(600)

    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    child = fork.Process(target=hold, args=(there,))
    child.start()
    there.close()
    here.recv()
    server = Tracker(farm.address).take()
    assert server is not None
    key = f"client:{server.matchkey}".encode()
    with socket.create_connection((server.host, server.port)) as session:
        session.sendall(struct.pack("<ii", RPC_MAGIC, len(key)) + key)
        parent = psutil.Process(child.pid)
        end = time.monotonic() + 60
        # The tracker, the server, what each of them starts, and the session.
        while len(family := parent.children(recursive=True)) < 5 and time.monotonic() < end:
            time.sleep(0.1)
        child.kill()
        _gone, alive = psutil.wait_procs(family, timeout=30)
    for one in alive:
        one.kill()
    assert len(family) == 5 and not alive


def test_a_farm_that_is_not_there(two: LoopbackFarm, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = RPCAddress("127.0.0.1", 1, "k")
    with pytest.raises(MeasureError, match=r"no RPC tracker at 127.0.0.1:1 .* -m tvm.exec.rpc_tracker"):
        FarmPool(TARGET, closed)
    other = RPCAddress(two.address.host, two.address.port, "other")
    with pytest.raises(MeasureError, match=r"no server has the key other .*: loopback.* --key other"):
        FarmPool(TARGET, other)
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(EnvironmentFaultError, match="needs a C\\+\\+ compiler"):
        FarmPool(TARGET, two.address)
