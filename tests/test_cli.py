"""The command line: what it refuses and how, a whole tuning run, interruptions, ranking, benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from pretune.cli import DEMO, main
from pretune.errors import InputError
from pretune.records import RecordLog, RunFolder

pytestmark = pytest.mark.usefixtures("few_rounds")

SDK = str(Path(__file__).parents[1] / "sdk")

MATMUL = """
from tvm.script import tirx as T

@T.prim_func(s_tir=True)
def matmul(A: T.Buffer((64, 64)), B: T.Buffer((64, 64)), C: T.Buffer((64, 64))):
    for i, j, k in T.grid(64, 64, 64):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] += A[vi, vk] * B[vk, vj]
"""

MOUNT = ("unshare", "--user", "--map-root-user", "--mount")
"""Prefix of a command that may mount file systems of its own."""


def _may(*command: str) -> bool:
    try:
        return subprocess.run([*command, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


needs_mount = pytest.mark.skipif(not _may(*MOUNT), reason="mounting a small file system is not allowed here")


@pytest.fixture(scope="module")
def matmul(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("program") / "matmul.py"
    path.write_text(MATMUL)
    return path


@pytest.fixture(scope="module")
def weights() -> Path:
    """The shipped weights that cover this machine: with others comes a notice."""
    from pretune.hardware import detect
    from pretune.hub.sources import find_weights

    return find_weights(detect()).path


def pretune(*args, cwd: Path, prefix=(), boot: str = "pass") -> subprocess.Popen:
    """Start ``pretune`` as a process of its own, without torch, which no command but fine-tuning needs."""
    code = f"import sys; sys.modules['torch'] = None; {boot}; from pretune.cli import main; main()"
    environment = {k: v for k, v in os.environ.items() if k != "PRETUNE_DEBUG"} | {"PYTHONPATH": SDK}
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *map(str, args)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 600) -> tuple[int, str, str]:
    """Exit status, stdout, stderr."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def python(code: str) -> str:
    """What Python code prints in a process of its own."""
    environment = os.environ | {"PYTHONPATH": SDK}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refuse(*args, status: int) -> str:
    """Run a command that must fail with one line on stderr, which is returned, and nothing on stdout."""
    result = CliRunner().invoke(main, list(map(str, args)))
    assert result.exit_code == status, (result.stderr, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    return result.stderr


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (DEMO.read_bytes()[:4000], "truncated"),
        (b"PK\x03\x04 not a model at all" * 40, "not an ONNX model"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git-LFS pointer"),
    ],
    ids=["missing", "empty", "truncated", "other", "lfs"],
)
def test_a_file_that_is_no_model(tmp_path, weights, contents, said):
    path = tmp_path / "model.onnx"
    if contents is not None:
        path.write_bytes(contents)
    line = refuse("tune", path, "--weights", weights, "--out", tmp_path / "out", status=2)
    assert str(path) in line and said in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shape", "picture=1x1x32x32"], "'picture', which does not exist; the inputs are: image (1x1x"),
        (["--shape", "image=1x1x32"], "has 3 dimensions, but input 'image' has 4"),
        (["--shape", "image"], "is not NAME=DIMxDIM"),
        (["--target", "llvm -mcpu=znver44"], "LLVM does not know the CPU 'znver44'; similar names: znver4"),
        (["--target", "gpu"], "target kind 'gpu' is not supported"),
        (["--op", "*conv3d*"], " and 1 more; pretune tune INPUT --trials 0 --out DIR lists all"),
        (["--trials", "-1"], "--trials -1 is not a number of trials"),
        (["--trials", "many"], "'many' is not a valid integer"),
        (["--seed", "-1"], "--seed -1 is negative"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_options_that_do_not_fit(tmp_path, weights, options, said):
    line = refuse("tune", DEMO, "--weights", weights, "--out", tmp_path / "out", *options, status=2)
    assert said in line
    assert not (tmp_path / "out").exists()


def test_nothing_or_too_much_to_tune():
    assert "give an INPUT file, or --demo" in refuse("tune", status=2)
    assert "leave out INPUT, or --demo" in refuse("tune", "model.onnx", "--demo", status=2)
    assert "No such command 'tun'" in refuse("tun", status=2)
    assert "Missing option '--traces'" in refuse("rank", "model.onnx", status=2)


def test_weights_that_are_none(tmp_path, matmul):
    line = refuse("tune", matmul, "--weights", tmp_path / "none", "--out", tmp_path / "out", status=3)
    assert f"{tmp_path / 'none'}: no such weights folder; run: pretune doctor" in line


def test_debugging_shows_the_stack(tmp_path, weights, monkeypatch):
    monkeypatch.setenv("PRETUNE_DEBUG", "1")
    result = CliRunner().invoke(main, ["tune", str(tmp_path / "no.onnx"), "--weights", str(weights)])
    assert isinstance(result.exception, InputError)


def test_a_file_of_pytorch_without_pytorch(tmp_path, weights, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    path = tmp_path / "model.pt2"
    path.write_bytes(b"PK\x03\x04")
    line = refuse("tune", path, "--weights", weights, "--out", tmp_path / "out", status=4)
    assert "pip install 'pretune[export]'" in line
    suite = tmp_path / "suite.py"
    suite.write_text("SUBGRAPHS = {}")
    assert "pip install 'pretune[bench]'" in refuse("bench", "search", "--suite", suite, status=4)


def test_a_suite_that_is_none(tmp_path):
    suite = tmp_path / "suite.py"
    suite.write_text("SUBGRAPHS = {'a': 1}")
    assert "defines no SUBGRAPHS" in refuse("bench", "search", "--suite", suite, status=2)
    suite.write_text("import does_not_exist")
    assert "cannot be run: ModuleNotFoundError" in refuse("bench", "search", "--suite", suite, status=2)
    assert "give 1 or more" in refuse("bench", "search", "--suite", suite, "--seeds", "0", status=2)
    said = refuse("bench", "search", "--suite", suite, "--trials", "16,many", status=2)
    assert "--trials 16,many: expected numbers of 0 or more, as in --trials 16,64" in said


# -- output folders ------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_one(tmp_path, matmul, weights):
    (tmp_path / "out").write_text("a file")
    line = refuse("tune", matmul, "--weights", weights, "--out", tmp_path / "out", status=5)
    assert f"cannot write to {tmp_path / 'out'}" in line and "choose another folder with --out" in line


def test_a_folder_held_by_another_run(tmp_path, matmul, weights):
    with RunFolder(tmp_path / "out"):
        line = refuse("tune", matmul, "--weights", weights, "--out", tmp_path / "out", status=5)
    assert f"{tmp_path / 'out'} is in use by another run (process {os.getpid()})" in line


@needs_mount
def test_a_read_only_disk(tmp_path, matmul, weights):
    mount = f"['mount', '-t', 'tmpfs', '-o', 'ro', 'none', '{tmp_path}']"
    boot = f"import subprocess; subprocess.run({mount}, check=True)"
    args = ("tune", matmul, "--trials", 0, "--weights", weights, "--out", tmp_path / "out")
    status, out, err = finish(pretune(*args, cwd=tmp_path, prefix=MOUNT, boot=boot))
    assert (status, out) == (5, ""), err
    last = err.splitlines()[-1]
    assert last.startswith(f"error: cannot write to {tmp_path}/out: it is on a read-only file system")


@needs_mount
def test_a_disk_that_fills_up_during_the_run(tmp_path, matmul, weights):
    # 16 kB in all: the first records fit, each of about 2.5 kB.
    mount = f"['mount', '-t', 'tmpfs', '-o', 'size=16k', 'none', '{tmp_path}']"
    boot = f"""import atexit, subprocess; subprocess.run({mount}, check=True); \
atexit.register(lambda: print(open('{tmp_path}/out/records.jsonl').read(), end=''))"""
    args = ("tune", matmul, "--trials", 6, "--weights", weights, "--out", tmp_path / "out")
    status, out, err = finish(pretune(*args, cwd=tmp_path, prefix=MOUNT, boot=boot))
    assert status == 5, err
    assert f"error: cannot write to {tmp_path}/out: the disk is full; free some space and run again" in err
    kept = [json.loads(line) for line in out.splitlines()]  # what was written is whole
    assert 1 <= len(kept) < 7 and [record["trial"] for record in kept] == list(range(len(kept)))


# -- a whole run ---------------------------------------------------------------------------------------------

TRIALS = 4


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, matmul, weights) -> tuple[Path, dict, str]:
    """Output folder, JSON and stderr of a run on a matmul, without torch."""
    folder = tmp_path_factory.mktemp("run")
    args = ("tune", matmul, "--trials", TRIALS, "--weights", weights, "--out", "out", "--json")
    status, out, err = finish(pretune(*args, cwd=folder))
    assert status == 0, err
    return folder / "out", json.loads(out), err


def test_a_run(tuned):
    out, found, err = tuned
    assert json.loads((out / "result.json").read_text()) == found
    (task,) = found["tasks"]
    assert task["name"] == "matmul" and task["trials"] == TRIALS and not task["error"]
    assert task["chosen_by"] in ("search", "default")
    assert 0 < task["best"] <= task["default"]
    records = RecordLog(out / "records.jsonl").load()
    trials = [record for record in records if record.kind == "trial"]
    assert [record.trial for record in trials] == list(range(TRIALS + 1))
    assert trials[0].trace is None and len({record.trace_key for record in trials}) == TRIALS + 1
    assert any(record.kind == "final" for record in records)
    lines = err.splitlines()
    assert lines[0].startswith(f"task 1/1 matmul  0/{TRIALS} trials")
    assert lines[-1].startswith("task 1/1 matmul  ")
    assert f"search, {TRIALS} trials" in lines[-1] or "default: nothing was faster" in lines[-1]


def test_the_database_makes_stock_tvm_compute_the_same(tuned, matmul):
    out, found, _err = tuned
    import tvm
    from tvm.s_tir import meta_schedule as ms

    from pretune.intake import load_program

    target = tvm.target.Target(json.loads(found["target"]))
    program = load_program(matmul, target=target)
    database = ms.database.JSONDatabase(work_dir=str(out / "database"))
    schedule = ms.tir_integration.compile_tir(database, program.mod, target)
    assert (schedule is None) == (found["tasks"][0]["chosen_by"] == "default")
    module = tvm.compile(program.mod if schedule is None else schedule.mod, target=target)
    rng = np.random.default_rng(0)
    a, b = (rng.random((64, 64), dtype=np.float32) for _ in range(2))
    args = [tvm.runtime.tensor(x) for x in (a, b, np.zeros((64, 64), np.float32))]
    module["main"](*args)
    np.testing.assert_allclose(args[2].numpy(), a @ b, rtol=1e-4)


def test_the_same_command_measures_nothing_again(tuned, matmul, weights):
    out, found, _err = tuned
    before = (out / "records.jsonl").read_bytes()
    args = ["tune", str(matmul), "--trials", str(TRIALS), "--weights", str(weights), "--out", str(out)]
    result = CliRunner().invoke(main, [*args, "--json", "--quiet"])
    assert result.exit_code == 0 and result.stderr == ""
    again = json.loads(result.stdout)
    assert (out / "records.jsonl").read_bytes() == before
    assert again["tasks"] == found["tasks"]
    # For people: a table, and what to do with the results.
    result = CliRunner().invoke(main, [*args, "--quiet"])
    assert result.exit_code == 0
    for word in ("matmul", "speed-up", f"{found['tasks'][0]['speedup']:.2f}x", f"{out}/", "compile_tir"):
        assert word in result.stdout


def test_trials_that_an_earlier_run_made_are_not_made_again(tuned, matmul, weights, tmp_path):
    out = shutil.copytree(tuned[0], tmp_path / "out")
    before = (out / "records.jsonl").read_bytes()
    args = ("tune", matmul, "--trials", TRIALS + 2, "--weights", weights, "--out", out, "--quiet")
    result = CliRunner().invoke(main, list(map(str, args)))
    assert result.exit_code == 0 and result.stderr == ""
    assert (out / "records.jsonl").read_bytes().startswith(before)
    records = [r for r in RecordLog(out / "records.jsonl").load() if r.kind == "trial"]
    assert [r.trial for r in records] == list(range(TRIALS + 3))
    assert len({r.trace_key for r in records}) == TRIALS + 3


def test_rank(tuned, matmul, weights, tmp_path):
    out, _found, _err = tuned
    args = ["rank", str(matmul), "--weights", str(weights), "--json", "--traces"]
    result = CliRunner().invoke(main, [*args, str(out / "records.jsonl")])
    assert result.exit_code == 0, result.stderr
    (task,) = json.loads(result.stdout)["tasks"]
    assert task["name"] == "matmul"
    scores = [row["score"] for row in task["ranking"]]
    assert scores == sorted(scores, reverse=True) and len(set(scores)) > 1
    by_line = {row["line"]: row for row in task["ranking"]}
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    with_trace = {number for number, record in enumerate(records, start=1) if record["trace"]}
    assert set(by_line) == with_trace

    # The same traces alone, and as MetaSchedule writes them, get the same scores.
    first, second = sorted(with_trace)[:2]
    traces = tmp_path / "traces.jsonl"
    stock = [0, [records[second - 1]["trace"], [1e-3], {}, []]]
    traces.write_text(json.dumps(records[first - 1]["trace"]) + "\n" + json.dumps(stock) + "\n")
    result = CliRunner().invoke(main, [*args, str(traces)])
    (task,) = json.loads(result.stdout)["tasks"]
    found = {row["line"]: (row["score"], row["latency"]) for row in task["ranking"]}
    assert found[1] == (pytest.approx(by_line[first]["score"], abs=1e-4), None)
    assert found[2] == (pytest.approx(by_line[second]["score"], abs=1e-4), 1e-3)
    result = CliRunner().invoke(main, [a for a in args if a != "--json"] + [str(traces)])
    assert result.exit_code == 0 and "1.00 ms" in result.stdout.replace("1 ms", "1.00 ms")


def test_rank_refuses(tuned, matmul, weights, tmp_path):
    out, _found, _err = tuned
    traces = tmp_path / "traces.jsonl"
    common = ["--weights", weights, "--traces", traces]
    assert f"{traces} does not exist" in refuse("rank", matmul, *common, status=2)
    traces.write_text("[[1, 2]\n")
    assert f"{traces}, line 1: expected a trace" in refuse("rank", matmul, *common, status=2)
    traces.write_text('{"trace": null}\n')
    assert "holds no trace" in refuse("rank", matmul, *common, status=2)

    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    insts, decisions = next(record["trace"] for record in records if record["trace"])
    traces.write_text(json.dumps([insts, decisions[1:]]) + "\n")
    assert "incomplete: instruction" in refuse("rank", matmul, *common, status=2)
    traces.write_text(json.dumps([insts, decisions]) + "\n")
    line = refuse("rank", DEMO, *common, status=2)  # ten tasks: whose trace is it?
    assert "choose one with --op: " in line and "conv2d" in line
    line = refuse("rank", DEMO, *common, "--op", "*softmax*", status=2)
    assert "line 1: the trace does not apply to" in line


def test_interrupted_and_resumed(tmp_path, matmul, weights, monkeypatch):
    log = tmp_path / "out" / "records.jsonl"
    args = ("tune", matmul, "--weights", weights, "--out", "out", "--trials")
    process = pretune(*args, 500, cwd=tmp_path)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if log.is_file() and log.read_bytes().count(b"\n") >= 3:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    status, out, err = finish(process)
    assert (status, out) == (130, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("error: interrupted; out/records.jsonl keeps what was measured (")
    assert last.endswith("the same command resumes")
    before = log.read_bytes()
    count = before.count(b"\n")
    assert before.endswith(b"\n") and 3 <= count < 500 and f"({count} records)" in last

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, [*map(str, args), str(count), "--json"])  # one more than was measured
    assert result.exit_code == 0, result.stderr
    assert log.read_bytes().startswith(before)
    trials = [record.trial for record in RecordLog(log).load() if record.kind == "trial"]
    assert trials == list(range(count + 1)) and json.loads(result.stdout)["tasks"][0]["trials"] == count


def test_when_nothing_can_be_tuned(tmp_path, weights):
    # Reads far outside its buffer: every candidate's worker dies, and so does the untuned program's.
    path = tmp_path / "crash.py"
    path.write_text(MATMUL.replace("B[vk, vj]", "B[vk * 1000000, vj]"))
    args = ("tune", path, "--weights", weights, "--out", tmp_path / "out", "--trials", 1, "--json", "--quiet")
    result = CliRunner().invoke(main, list(map(str, args)))
    assert (result.exit_code, result.stdout) == (7, "")
    assert "error: none of 1 tasks could be tuned; matmul: " in result.stderr and "SIGSEGV" in result.stderr


def test_the_demo_without_measuring(tmp_path, weights, monkeypatch):
    import onnxruntime

    from pretune.compile import run_program

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        main, ["tune", "--demo", "--trials", "0", "--weights", str(weights), "--json"]
    )
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert {task["chosen_by"] for task in found["tasks"]} <= {"model", "only", "default"}
    assert all(task["best"] is None and task["trials"] == 0 for task in found["tasks"])
    assert found["library"] == "pretune-demo/model.so", found["notices"]
    image = np.random.default_rng(0).random((1, 1, 32, 32), dtype=np.float32)
    (got,) = run_program(tmp_path / found["library"], [image])
    session = onnxruntime.InferenceSession(str(DEMO), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(got, session.run(None, {"image": image})[0], atol=1e-3)


# -- the rest ------------------------------------------------------------------------------------------------


def test_doctor():
    result = CliRunner().invoke(main, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == (1 if found["problems"] else 0)
    assert found["tvm"]["usable"] and found["cores"]["use"] >= 1
    result = CliRunner().invoke(main, ["doctor"])
    assert found["hardware"]["microarch"] in result.stdout and result.stderr == ""
    assert all(line == line.rstrip() for line in result.stdout.splitlines())
    assert "measured: measured" not in result.stdout and "measured, measured" not in result.stdout


def test_help_loads_nothing_heavy():
    code = """
import sys
from pretune.cli import main
for args in (["--help"], ["tune", "--help"], ["bench", "search", "--help"]):
    try:
        main(args)
    except SystemExit as end:
        assert end.code == 0
print(sorted({"tvm", "torch", "onnx", "onnxruntime", "numpy", "rich"} & set(sys.modules)))
"""
    assert python(code).splitlines()[-1] == "[]"


def test_tune_is_a_function_whatever_was_imported_before():
    code = "import pretune; pretune.load; import pretune.tuning, pretune.cli; assert callable(pretune.tune)"
    python(f"import sys; sys.modules['torch'] = None; {code}")


SUITE = """
from __future__ import annotations
from dataclasses import dataclass
import torch

@dataclass(frozen=True)
class Subgraph:
    kind: str
    size: int

    def build(self):
        module = torch.nn.Sequential(torch.nn.Linear(self.size, 32), torch.nn.ReLU())
        return module, (torch.randn(4, self.size),)

SUBGRAPHS = {"small": Subgraph("linear", 48), "other": Subgraph("linear", 64)}
"""


def test_bench_search(tmp_path, weights):
    suite = tmp_path / "suite.py"
    suite.write_text(SUITE)
    assert "no subgraph 'big'" in refuse("bench", "search", "--suite", suite, "--only", "big", status=2)
    args = ["bench", "search", "--suite", str(suite), "--only", "small", "--weights", str(weights)]
    args += ["--out", str(tmp_path / "out"), "--json", "--trials", "0,2,4", "--baseline-trials", "2,4"]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    (row,) = found["rows"]
    assert (row["name"], row["kind"], row["seed"], row["error"]) == ("small", "linear", 0, "")
    latencies = {side: {o["trials"]: o["latency"] for o in row[side]} for side in ("pretune", "metaschedule")}
    assert [list(each) for each in latencies.values()] == [[0, 2, 4], [2, 4]]
    ratios = {(o["trials"], o["baseline_trials"]): o["ratio"] for o in row["ratios"]}
    assert ratios == {
        (n, m): pytest.approx(latencies["metaschedule"][m] / latencies["pretune"][n])
        for n in (0, 2, 4)
        for m in (2, 4)
    }
    assert {(o["trials"], o["baseline_trials"]): o["geomean"] for o in found["summary"]} == pytest.approx(
        ratios
    )
    for curve in row["curves"].values():
        assert [trials for trials, _latency in curve] == [1, 2, 4]
        assert curve[0][1] >= curve[1][1] >= curve[2][1] > 0
    (task,) = row["tasks"]
    assert [o["measured"] for o in task["pretune"]] == [0, 2, 4] and task["pretune"][0][
        "chosen_by"
    ] == "model"
    assert [o["measured"] for o in task["metaschedule"]] == [2, 4]
    assert all(o["seconds"] > 0 for o in row["pretune"] + row["metaschedule"])
    assert len(row["calibration"]) == 2
    assert result.stderr.splitlines()[-1].startswith("[1/1] small #0: MetaSchedule 2: ")

    # The row is there already.
    again = CliRunner().invoke(main, args)
    assert json.loads(again.stdout)["rows"] == found["rows"]
    # With other budgets, what either side found with those that it had before is.
    kept = {name: (tmp_path / "out" / name).read_text() for name in ("metaschedule.jsonl", "pretune.jsonl")}
    args[args.index("--trials") + 1] = "0,2,3"
    found = json.loads(CliRunner().invoke(main, args).stdout)
    assert [o["trials"] for o in found["rows"][0]["pretune"]] == [0, 2, 3]
    assert (tmp_path / "out" / "metaschedule.jsonl").read_text() == kept["metaschedule.jsonl"]
    added = (tmp_path / "out" / "pretune.jsonl").read_text().removeprefix(kept["pretune.jsonl"])
    assert len(added.splitlines()) == 1
    # A table for people, too.
    args.remove("--json")
    shown = CliRunner().invoke(main, args).stdout
    assert "pretune 3" in shown and "none: first choice" in shown
