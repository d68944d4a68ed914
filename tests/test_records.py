"""The record log, the run folder and the database: what survives kills, full disks and other runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pretune.errors import OutputError
from pretune.hardware import detect, make_target
from pretune.measure.result import Measured
from pretune.records import (
    Record,
    RecordLog,
    RunFolder,
    best_records,
    make_record,
    target_key,
    write_database,
)
from pretune.space import trace_to_json

SDK = str(Path(__file__).parents[1] / "sdk")


def record(trial: int = 0, **changes) -> Record:
    fields = {
        "task_id": "0123456789abcdef",
        "task_name": "matmul",
        "target": '{"kind":"llvm"}',
        "target_key": "aaaa",
        "trial": trial,
        "ok": True,
        "latencies": (1e-3,),
        "chosen_by": "search",
    }
    return Record(**(fields | changes))


def python(code: str, *arguments: object, prefix: tuple[str, ...] = (), **options) -> subprocess.Popen:
    """Start a Python process that can import pretune."""
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": SDK}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def finish(process: subprocess.Popen) -> str:
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return output


WRITER = """
import sys
from pretune.records import Record, RecordLog
path, first, count, size = sys.argv[1], *map(int, sys.argv[2:])
log = RecordLog(path)
for trial in range(first, first + count):
    log.append(Record(task_id=str(first), task_name="t", target="{}", target_key="k", trial=trial, ok=False,
                      error=str(trial % 10) * size, chosen_by="search"))
    print(trial, flush=True)
"""


# Records --------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path):
    log = RecordLog(tmp_path / "records.jsonl")
    trace = [[["GetSBlock", [], ["C", "main"], ["b0"]]], [[4, [16, 1, 1, 4]], [5, 0.25]]]
    records = [
        record(0, chosen_by="default"),
        record(1, trace=trace, space=2, decisions=[[16, 4], 3], latencies=(2e-3, 1e-3), seed=7),
        record(
            2, trace=trace, ok=False, latencies=(), error_kind="build", error="LLVM: line 1\nline 2 \u00e9"
        ),
        record(1, trace=trace, kind="final"),
    ]
    assert log.load() == []
    for item in records:
        log.append(item)
    assert log.load() == records
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 4
    assert [item.latency for item in records] == [1e-3, 1e-3, math.inf, 1e-3]
    assert records[0].trace_key == "default"
    assert records[1].trace_key == records[2].trace_key != "default"


@pytest.mark.parametrize(
    "changes", [{"latencies": ()}, {"latencies": (math.inf,)}, {"latencies": (1e-3, math.nan)}]
)
def test_a_record_that_is_ok_has_finite_latencies(changes):
    with pytest.raises(ValueError, match="latenc"):
        record(**changes)


def test_target_key_is_the_same_however_the_target_was_written():
    hardware = detect()
    key = target_key(make_target("llvm -mcpu=znver4 -num-cores=4 -mattr=-avx512f,+avx2", hardware))
    assert key == target_key(
        '{"num-cores": 4, "mcpu": "znver4", "kind": "llvm", "mattr": ["+avx2", "-avx512f"]}'
    )
    assert key != target_key(make_target("llvm -mcpu=znver4 -num-cores=2 -mattr=-avx512f,+avx2", hardware))
    assert len(key) == 12


# The log: damage ------------------------------------------------------------------------------------


def test_a_last_line_torn_at_any_byte(tmp_path, capfd):
    path = tmp_path / "records.jsonl"
    log = RecordLog(path)
    log.append(record(0))
    log.append(record(1))
    whole = path.read_bytes()
    first = len(whole.splitlines(keepends=True)[0])
    for cut in range(first + 1, len(whole)):
        torn = tmp_path / "records.jsonl.torn"
        torn.unlink(missing_ok=True)
        path.write_bytes(whole[:cut])
        loaded = log.load()
        notice = capfd.readouterr().err
        if cut == len(whole) - 1:  # only the end of the line is missing: the record is whole
            assert loaded == [record(0), record(1)]
            assert notice == "" and path.read_bytes() == whole
        else:
            assert loaded == [record(0)]
            assert "unfinished" in notice and str(path) in notice
            assert torn.read_bytes() == whole[first:cut] + b"\n"
            assert path.read_bytes() == whole[:first]
            assert log.load() == [record(0)] and capfd.readouterr().err == ""


def test_appending_after_a_torn_line_without_reading(tmp_path, capfd):
    path = tmp_path / "records.jsonl"
    log = RecordLog(path)
    log.append(record(0, error="x" * 200_000))
    log.append(record(1, error="y" * 200_000))
    path.write_bytes(path.read_bytes()[:-100])
    log.append(record(2))
    assert [item.trial for item in log.load()] == [0, 2]
    assert "unfinished" in capfd.readouterr().err


def test_a_file_that_is_one_torn_line(tmp_path, capfd):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"version":1,"kind"')
    assert RecordLog(path).load() == []
    assert path.read_bytes() == b""
    RecordLog(path).append(record(5))
    assert [item.trial for item in RecordLog(path).load()] == [5]
    assert "unfinished" in capfd.readouterr().err


def test_broken_lines_and_unknown_versions_are_counted_and_kept(tmp_path, capfd):
    path = tmp_path / "records.jsonl"
    log = RecordLog(path)
    for trial in range(3):
        log.append(record(trial))
    lines = path.read_bytes().splitlines()
    newer = json.dumps({"version": 2, "whatever": 1}).encode()
    missing = json.dumps({"version": 1, "trial": 3}).encode()
    content = b"\n".join([lines[0], b"", lines[1], newer, b"\x00\x00", missing, b"[1", lines[2]]) + b"\n"
    path.write_bytes(content)
    assert [item.trial for item in log.load()] == [0, 1, 2]
    notices = capfd.readouterr().err.splitlines()
    assert notices == [
        f"notice: {path}: skipped 4 lines (2, 5, 6, 7) that cannot be read",
        f"notice: {path}: skipped line 4 of a version other than 1",
    ]
    assert path.read_bytes() == content


def test_fields_of_a_later_pretune_are_ignored(tmp_path):
    path = tmp_path / "records.jsonl"
    data = msgspec.to_builtins(record(1)) | {"a_new_field": [1, 2]}
    path.write_text(json.dumps(data) + "\n")
    assert RecordLog(path).load() == [record(1)]


# The log: several writers, kills and full disks -------------------------------------------------------


def test_processes_and_threads_append_at_once(tmp_path):
    path = tmp_path / "records.jsonl"
    # Lines long enough for one writer to find another's half written, were it not for the lock.
    writers = [python(WRITER, path, first, 40, 500_000) for first in (0, 1000, 2000)]

    def append(first: int) -> None:
        for trial in range(first, first + 40):
            RecordLog(path).append(record(trial, task_id=str(first), error="z" * 500_000))

    threads = [threading.Thread(target=append, args=(first,)) for first in (3000, 4000)]
    for thread in threads:
        thread.start()
    for item in [*threads, *writers]:
        item.join() if isinstance(item, threading.Thread) else finish(item)
    records = RecordLog(path).load()
    assert len(path.read_bytes().splitlines()) == len(records) == 200
    for first in range(0, 5000, 1000):  # and each writer's in its own order
        mine = [item.trial for item in records if item.task_id == str(first)]
        assert mine == list(range(first, first + 40))
    assert not (tmp_path / "records.jsonl.torn").exists()


def test_a_writer_killed_again_and_again(tmp_path):
    path = tmp_path / "records.jsonl"
    announced = {}
    for first in (0, 1000, 2000):
        writer = python(WRITER, path, first, 900, 1_000_000)  # a kill can cut a long write anywhere
        for _ in range(5):
            announced[first] = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.communicate()[0].split()
        announced[first] = int(rest[-1]) if rest else announced[first]
    records = RecordLog(path).load()
    for first, last in announced.items():
        mine = [item.trial for item in records if item.task_id == str(first)]
        assert mine == list(range(first, first + len(mine)))  # no gap
        assert len(mine) >= last - first + 1  # whatever append returned for is there
    assert len(path.read_bytes().splitlines()) == len(records)


def test_a_write_cut_short_leaves_no_trace(tmp_path):
    """A limit on the file size lets the kernel take a part of a line, as a full disk does."""
    code = """
import resource, sys
from pretune.errors import OutputError
from pretune.records import Record, RecordLog
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
log = RecordLog(sys.argv[1])
make = lambda trial, size: Record(task_id="t", task_name="t", target="{}", target_key="k", trial=trial,
                                  ok=False, error="x" * size, chosen_by="search")
log.append(make(0, 6000))
try:
    log.append(make(1, 6000))
except OutputError as error:
    print(error)
log.append(make(2, 1000))
print([record.trial for record in log.load()])
"""
    path = tmp_path / "records.jsonl"
    message, trials = finish(python(code, path)).splitlines()
    assert str(tmp_path) in message and "File too large" in message
    assert trials == "[0, 2]"
    assert not list(tmp_path.glob("*.torn"))


def _may(*command: str) -> bool:
    try:
        return subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


MOUNT = ("unshare", "--user", "--map-root-user", "--mount")
needs_mount = pytest.mark.skipif(not _may(*MOUNT), reason="mounting a small file system is not allowed here")


@needs_mount
def test_a_full_and_a_read_only_disk(tmp_path):
    code = """
import os, subprocess, sys
from pretune.errors import OutputError
from pretune.records import Record, RecordLog, RunFolder
disk = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "none", disk], check=True)
make = lambda trial: Record(task_id="t", task_name="t", target="{}", target_key="k", trial=trial, ok=False,
                            error="x" * 9000, chosen_by="search")
with RunFolder(disk + "/run") as run:
    run.write_result({"trials": 0})
    written = 0
    try:
        while written < 100:
            run.log.append(make(written))
            written += 1
    except OutputError as error:
        print(error)
    try:
        run.write_result({"trials": "y" * 20000})
    except OutputError as error:
        print(error)
    print([record.trial for record in run.log.load()] == list(range(written)), written)
    print(run.result_path.read_text())
    print(sorted(path.name for path in run.path.iterdir()))
os.truncate(run.log.path, 0)
run.log.append(make(7))
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
print([record.trial for record in run.log.load()])
for attempt in (lambda: run.log.append(make(8)), run.__enter__, RunFolder(disk + "/other").__enter__):
    try:
        attempt()
    except OutputError as error:
        print(error)
"""
    lines = finish(python(code, tmp_path, prefix=MOUNT)).splitlines()
    assert lines[0].startswith(f"cannot write to {tmp_path}/run: the disk is full")
    assert lines[1] == lines[0]
    whole, written = lines[2].split()
    assert whole == "True" and 5 < int(written) < 15
    assert json.loads("".join(lines[3:6])) == {"trials": 0}  # the old result stays
    assert "records.jsonl.torn" not in lines[7] and ".result.json." not in lines[7]
    assert lines[8] == "[7]"
    assert lines[9].startswith(f"cannot write to {tmp_path}/run: it is on a read-only file system")
    assert lines[10] == lines[9]
    assert lines[11].startswith(f"cannot write to {tmp_path}/other: it is on a read-only file system")


# The run folder ---------------------------------------------------------------------------------------

HOLDER = """
import sys
from pretune.records import RunFolder
with RunFolder(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_created_and_its_result_replaced(tmp_path):
    with RunFolder(tmp_path / "a" / "b") as run:
        run.log.append(record(0))
        run.write_result({"speedup": 1.5})
        run.write_result({"speedup": 2.0})
        assert json.loads(run.result_path.read_text()) == {"speedup": 2.0}
        assert run.database_dir.parent == run.library_path.parent == run.path
        with pytest.raises(ValueError, match="JSON"):
            run.write_result({"speedup": math.nan})
        assert json.loads(run.result_path.read_text()) == {"speedup": 2.0}
    with RunFolder(tmp_path / "a" / "b") as run:  # again, to resume
        assert run.log.load() == [record(0)]
    assert sorted(path.name for path in run.path.iterdir() if path.name[0] != ".") == [
        "records.jsonl",
        "result.json",
    ]


def test_a_folder_held_by_another_run(tmp_path):
    holder = python(HOLDER, tmp_path / "out", stdin=subprocess.PIPE)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(
        OutputError, match=rf"{tmp_path}/out is in use by another run \(process {holder.pid}\)"
    ):
        RunFolder(tmp_path / "out").__enter__()
    holder.kill()
    holder.communicate()
    mine = rf"in use by another run \(process {os.getpid()}\)"
    # The lock dies with its process.
    with RunFolder(tmp_path / "out"), pytest.raises(OutputError, match=mine):
        RunFolder(tmp_path / "out").__enter__()
    with RunFolder(tmp_path / "out"):
        pass


def test_a_file_in_the_place_of_the_folder(tmp_path):
    (tmp_path / "out").write_text("")
    for path in (tmp_path / "out", tmp_path / "out" / "sub"):
        with pytest.raises(OutputError, match="there is a file of that name"):
            RunFolder(path).__enter__()


ORDINARY = () if os.getuid() else ("unshare", "--user")  # root may write anywhere; in there it may not


@pytest.mark.skipif(bool(ORDINARY) and not _may(*ORDINARY), reason="needs an unprivileged process")
def test_a_folder_without_permission(tmp_path):
    code = """
import sys
from pretune.errors import OutputError
from pretune.records import RecordLog, RunFolder
for path in (sys.argv[1], sys.argv[1] + "/new"):
    try:
        RunFolder(path).__enter__()
    except OutputError as error:
        print(error)
print([record.trial for record in RecordLog(sys.argv[1] + "/records.jsonl").load()])
"""
    folder = tmp_path / "out"
    folder.mkdir()
    RecordLog(folder / "records.jsonl").append(record(3))
    content = (folder / "records.jsonl").read_bytes()
    (folder / "records.jsonl").write_bytes(content + content[:30])  # torn, and nobody may repair it
    (folder / "records.jsonl").chmod(0o444)
    folder.chmod(0o555)
    try:
        process = python(code, folder, prefix=ORDINARY)
        output, errors = process.communicate()
    finally:
        folder.chmod(0o755)
    lines = output.splitlines()
    assert lines[0].startswith(
        f"cannot write to {folder}: permission denied; choose another folder with --out"
    )
    assert lines[1].startswith(f"cannot write to {folder}/new: permission denied")
    assert lines[2] == "[3]"
    assert "skipped line 2 that cannot be read" in errors


# The database -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target():
    return make_target("native -num-cores 2", detect())


@pytest.fixture(scope="module")
def network():
    """Two dense layers of different shapes, the second without an activation."""
    from tvm.script import ir as I
    from tvm.script import relax as R

    @I.ir_module
    class Network:
        @R.function
        def main(
            x: R.Tensor((16, 32), "float32"),
            w: R.Tensor((32, 64), "float32"),
            v: R.Tensor((64, 16), "float32"),
        ) -> R.Tensor((16, 16), "float32"):
            with R.dataflow():
                product: R.Tensor((16, 64), "float32") = R.matmul(x, w)
                hidden: R.Tensor((16, 64), "float32") = R.nn.relu(product)
                output: R.Tensor((16, 16), "float32") = R.matmul(hidden, v)
                R.output(output)
            return output

    return Network


@pytest.fixture(scope="module")
def tasks(network, target):
    from pretune.compat import setup_tvm
    from pretune.intake.task import tasks_of_relax

    setup_tvm()
    found = tasks_of_relax(network, target)
    assert len(found) == 2
    return found


@pytest.fixture(scope="module")
def traces(tasks, target):
    """Three traces of each task, as MetaSchedule samples and postprocesses them."""
    from tvm.s_tir import meta_schedule as ms

    result = {}
    for task in tasks:
        context = ms.TuneContext(
            mod=task.mod,
            target=target,
            space_generator="post-order-apply",
            search_strategy="replay-trace",
            task_name=task.name,
            rand_state=1,
            num_threads=1,
        )
        context.pre_tuning(32, 32, context.generate_design_space(), database=None, cost_model=None)
        found = [trace_to_json(candidate.sch.trace) for candidate in context.generate_measure_candidates()]
        distinct = list({json.dumps(trace): trace for trace in found}.values())
        assert len(distinct) >= 3
        result[task.task_id] = distinct[:3]
    return result


def measurements(task, target, traces, latencies, kind="trial"):
    """Records of the default schedule and the traces; a latency of None is a failure."""
    result = []
    for trial, (trace, latency) in enumerate(zip([None, *traces], latencies, strict=True)):
        measured = (
            Measured(latencies=(latency, latency * 2)) if latency else Measured(error_kind="run", error="x")
        )
        chosen_by = "search" if trial else "default"
        result.append(
            make_record(
                task,
                target,
                measured,
                trial=trial,
                trace=trace,
                chosen_by=chosen_by,
                hardware=detect(),
                kind=kind,
            )
        )
    return result


def load(directory: Path):
    from tvm.s_tir import meta_schedule as ms

    return ms.database.JSONDatabase(work_dir=str(directory), allow_missing=False)


def best_trace(database, task, target):
    found = database.query_tuning_record(task.mod, target, "main")
    return None if found is None else trace_to_json(found.trace)


def test_records_say_what_was_measured_where(tasks, target, traces, tmp_path):
    task = tasks[0]
    written = measurements(task, target, traces[task.task_id], [4e-3, 2e-3, None, 1e-3])
    log = RecordLog(tmp_path / "records.jsonl")
    for item in written:
        log.append(item)
    assert log.load() == written
    assert written[0].trace is None and written[0].ok
    assert written[1].latency == 2e-3 and written[1].latencies == (2e-3, 4e-3)
    assert not written[2].ok and written[2].error_kind == "run"
    assert {item.microarch for item in written} == {detect().microarch}
    assert {(item.tvm[:2], item.target_key, len(item.time)) for item in written} == {
        ("0.", target_key(target), 29)
    }


STOCK = """
import json, sys
sys.modules["torch"] = sys.modules["pretune"] = None
import numpy as np
import tvm
from tvm import relax
from tvm.s_tir import meta_schedule as ms
directory, network, task, target = sys.argv[1], *(open(name).read() for name in sys.argv[2:])
target = tvm.target.Target(json.loads(target))
network, task = tvm.ir.load_json(network), tvm.ir.load_json(task)
database = ms.database.JSONDatabase(work_dir=directory)

rng = np.random.default_rng(0)
x, w, v = (rng.standard_normal(shape, dtype="float32") for shape in ((16, 32), (32, 64), (64, 16)))
hidden = np.maximum(x @ w, 0)

schedule = ms.tir_integration.compile_tir(database, task, target)
arrays = [tvm.runtime.tensor(a) for a in (x, w, np.zeros((16, 64), "float32"))]
tvm.compile(schedule.mod, target=target)["main"](*arrays)
np.testing.assert_allclose(arrays[-1].numpy(), hidden, rtol=1e-4, atol=1e-4)

executable = ms.relax_integration.compile_relax(database, network, target, params=None)
output = relax.VirtualMachine(executable, tvm.cpu())["main"](*(tvm.runtime.tensor(a) for a in (x, w, v)))
np.testing.assert_allclose(output.numpy(), hidden @ v, rtol=1e-4, atol=1e-4)

with target, database, tvm.transform.PassContext(opt_level=3):
    names = "LegalizeOps AnnotateTIROpPattern FoldConstant FuseOps FuseTIR MetaScheduleApplyDatabase".split()
    applied = tvm.transform.Sequential([getattr(relax.transform, name)() for name in names])(network)
functions = {var.name_hint: func for var, func in applied.functions.items()}
scheduled = {name: bool(func.attrs.get("tirx.is_scheduled", False)) for name, func in functions.items()
             if not isinstance(func, relax.Function)}
print(json.dumps([len(database), scheduled, schedule.trace.as_python()[-1]]))
"""


def test_stock_tvm_loads_and_applies_it(network, tasks, target, traces, tmp_path):
    import tvm

    first, second = sorted(tasks, key=lambda task: "relu" not in task.name)
    records = [
        *measurements(first, target, traces[first.task_id], [4e-3, 2e-3, None, 1e-3]),
        *measurements(second, target, traces[second.task_id], [1e-3, 2e-3, 3e-3, 4e-3]),
    ]
    assert write_database(records, tasks, target, tmp_path / "database") == 1  # the second is best untuned
    assert sorted(path.name for path in (tmp_path / "database").iterdir()) == [
        "database_tuning_record.json",
        "database_workload.json",
    ]
    files = []
    for name, text in {
        "network": tvm.ir.save_json(network),
        "task": tvm.ir.save_json(first.mod),
        "target": str(target),
    }.items():
        files.append(tmp_path / name)
        files[-1].write_text(text)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", STOCK, str(tmp_path / "database"), *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    count, scheduled, _ = json.loads(done.stdout)
    assert count == 2  # the two that were valid
    assert {name: flag for name, flag in scheduled.items() if "relu" in name} == {first.name: True}
    assert not any(flag for name, flag in scheduled.items() if "relu" not in name)


def test_the_fastest_comes_first_and_at_most_k(tasks, target, traces, tmp_path):
    task = tasks[0]
    some = traces[task.task_id]
    records = measurements(task, target, some, [4e-3, 2e-3, 3e-3, 1e-3])
    write_database(records, [task], target, tmp_path, k=2)
    database = load(tmp_path)
    assert len(database) == 2
    assert best_trace(database, task, target) == some[2]
    top = database.get_top_k(database.commit_workload(task.mod), 8)
    assert [float(item.run_secs[0]) for item in top] == pytest.approx([1e-3, 2e-3])
    assert target_key(top[0].target) == target_key(target)


def test_finals_decide(tasks, target, traces):
    task = tasks[0]
    some = traces[task.task_id]
    key = target_key(target)
    trials = measurements(task, target, some, [4e-3, 2e-3, 3e-3, 1e-3])

    def ranking(records):
        return [item.trial for item in best_records(records, task.task_id, key)]

    assert ranking(trials) == [3, 1, 2, 0]
    # Timed in turns, trial 1 is better than 3, and 2 was no finalist.
    finals = [
        measurements(task, target, some, [4e-3, 1.1e-3, 9e-3, 1.2e-3], kind="final")[at] for at in (0, 1, 3)
    ]
    assert ranking(trials + finals) == [1, 3, 0]
    # The winner gives wrong results: it is out, as a trial too.
    wrong = msgspec.structs.replace(finals[1], ok=False, error_kind="wrong", error="differs by 3")
    assert ranking([*trials, finals[0], finals[2], wrong]) == [3, 0]
    assert ranking([*trials, wrong]) == [3, 2, 0]
    # Resumed, then killed before new finals: the new trial counts, the old finals stand for their trials.
    late = msgspec.structs.replace(trials[2], latencies=(0.5e-3,), trial=9)
    assert ranking([*trials, *finals, late]) == [9, 1, 3, 0]
    # Another target and another task are not looked at.
    other = (
        msgspec.structs.replace(trials[3], target_key="x"),
        msgspec.structs.replace(trials[3], task_id="x"),
    )
    assert ranking([*trials[:3], *other]) == [1, 2, 0]


def test_the_same_schedule_measured_twice_is_one_record(tasks, target, traces, tmp_path):
    task = tasks[0]
    records = measurements(task, target, traces[task.task_id], [4e-3, 2e-3, 3e-3, 1e-3])
    write_database(records + records, [task], target, tmp_path)
    assert len(load(tmp_path)) == 3


def test_another_run_keeps_other_tasks_and_drops_other_targets(tasks, target, traces, tmp_path):
    first, second = tasks
    of_first = measurements(first, target, traces[first.task_id], [4e-3, 2e-3, 3e-3, 1e-3])
    of_second = measurements(second, target, traces[second.task_id], [4e-3, 1e-3, 2e-3, 3e-3])
    write_database(of_second, [second], target, tmp_path)
    before = (tmp_path / "database_tuning_record.json").read_bytes()
    assert write_database(of_first, [first], target, tmp_path) == 1
    database = load(tmp_path)
    assert len(database) == 6
    assert best_trace(database, first, target) == traces[first.task_id][2]
    assert best_trace(database, second, target) == traces[second.task_id][0]

    # A kill after the first of the two files was replaced leaves new workloads and old records.
    torn = tmp_path / "torn"
    torn.mkdir()
    shutil.copy(tmp_path / "database_workload.json", torn)
    (torn / "database_tuning_record.json").write_bytes(before)
    database = load(torn)
    assert best_trace(database, second, target) == traces[second.task_id][0]
    assert best_trace(database, first, target) is None

    # The default schedule turns out to be the best: the task goes, the other stays.
    slower = measurements(first, target, traces[first.task_id], [0.5e-3, 2e-3, 3e-3, 1e-3])
    assert write_database(slower, [first], target, tmp_path) == 0
    database = load(tmp_path)
    assert best_trace(database, first, target) is None
    assert best_trace(database, second, target) == traces[second.task_id][0]

    # A query does not look at the target, so another target's database replaces this one.
    other = make_target("llvm -mcpu=x86-64-v2 -num-cores 2", detect())
    records = measurements(first, other, traces[first.task_id], [4e-3, 3e-3, 2e-3, 1e-3])
    assert write_database([*of_first, *of_second, *records], [first], other, tmp_path) == 1
    database = load(tmp_path)
    assert len(database) == 3
    assert best_trace(database, second, other) is None


def test_no_records_make_an_empty_database_that_loads(tasks, target, tmp_path):
    assert write_database([], tasks, target, tmp_path) == 0
    assert len(load(tmp_path)) == 0


@pytest.mark.parametrize("damage", ["blank line", "torn line", "no workloads"])
def test_a_damaged_database_is_written_anew(tasks, target, traces, tmp_path, damage, capfd):
    task = tasks[0]
    records = measurements(task, target, traces[task.task_id], [4e-3, 2e-3, 3e-3, 1e-3])
    write_database(records, [task], target, tmp_path)
    path = tmp_path / "database_tuning_record.json"
    if damage == "blank line":  # loading this as it is ends the process
        path.write_bytes(b"\n" + path.read_bytes())
    elif damage == "torn line":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        (tmp_path / "database_workload.json").unlink()
    (tmp_path / ".new-leftover").mkdir()
    write_database(records, [task], target, tmp_path)
    assert len(load(tmp_path)) == 3
    assert not list(tmp_path.glob(".new-*"))
    assert ("damaged" in capfd.readouterr().err) == (damage != "no workloads")


def test_a_trace_that_does_not_replay_is_left_out(tasks, target, traces, tmp_path, capfd):
    task = tasks[0]
    records = measurements(task, target, traces[task.task_id], [4e-3, 2e-3, 3e-3, 1e-3])
    of_another_tvm = json.loads(json.dumps(records[3].trace).replace("GetSBlock", "GetBlock"))
    records[3] = msgspec.structs.replace(records[3], trace=of_another_tvm)
    assert write_database(records, [task], target, tmp_path) == 1
    assert best_trace(load(tmp_path), task, target) == traces[task.task_id][0]
    assert "trial 3 does not replay" in capfd.readouterr().err


@needs_mount
def test_a_disk_that_fills_up_while_the_database_is_written(tasks, target, traces, tmp_path):
    import tvm

    code = """
import json, os, shutil, subprocess, sys
sys.modules["torch"] = None
from pathlib import Path
disk, records, mod, target = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=True)
import tvm
from pretune.errors import OutputError
from pretune.intake.task import make_task
from pretune.records import RecordLog, write_database
target = tvm.target.Target(json.loads(target))
task = make_task("t", tvm.ir.load_json(Path(mod).read_text())["main"])
records = RecordLog(records).load()
old, new, filler = Path(disk, "old"), Path(disk, "new"), Path(disk, "filler")
write_database(records[:2], [task], target, old)
before = {path.name: path.read_bytes() for path in old.iterdir()}
failures = 0
# The disk ends anywhere: at the start, in the workloads, in the records.
for room in range(0, len(before["database_workload.json"]) + 6 * 4096, 4096):
    for folder in (old, new):
        status = os.statvfs(disk)
        filler.write_bytes(b"x" * (status.f_bavail * status.f_frsize - room))
        try:
            write_database(records, [task], target, folder)
        except OutputError as error:
            failures += 1
            assert "the disk is full" in str(error)
            assert folder is new or before == {path.name: path.read_bytes() for path in old.iterdir()}
            assert folder is old or not list(new.glob("*"))
        filler.unlink()
        shutil.rmtree(new, ignore_errors=True)
write_database(records, [task], target, old)
print(failures, len((old / "database_tuning_record.json").read_text().splitlines()))
"""
    task = tasks[0]
    log = RecordLog(tmp_path / "records.jsonl")
    for item in measurements(task, target, traces[task.task_id], [4e-3, 2e-3, 3e-3, 1e-3]):
        log.append(item)
    (tmp_path / "mod").write_text(tvm.ir.save_json(task.mod))
    (tmp_path / "disk").mkdir()
    process = python(code, tmp_path / "disk", log.path, tmp_path / "mod", target, prefix=MOUNT)
    failures, count = finish(process).split()
    assert int(failures) >= 10
    assert count == "3"


def test_latencies_reach_the_database_in_order(tasks, target, traces, tmp_path):
    """MetaSchedule ranks by the mean of the run times, pretune by the fastest repeat."""
    task = tasks[0]
    some = traces[task.task_id]
    records = measurements(task, target, some, [9e-3, 2e-3, 3e-3, 1e-3])
    noisy = msgspec.structs.replace(records[3], latencies=(1e-3, 50e-3, 50e-3))
    write_database([*records[:3], noisy], [task], target, tmp_path)
    assert best_trace(load(tmp_path), task, target) == some[2]
    assert np.isclose(float(load(tmp_path).get_all_tuning_records()[0].run_secs[0]), 1e-3)
