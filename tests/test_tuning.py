"""Deciding a task's winner: finals again until the winner is checked, with real candidates that are wrong."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import tvm
from click.testing import CliRunner
from tvm import s_tir, te

from pretune.cli import DEMO, main
from pretune.errors import MeasureError
from pretune.hardware import detect, hardware_for_target
from pretune.intake import load_program
from pretune.intake.program import TensorSpec
from pretune.intake.task import Task, make_task
from pretune.library import library_key, time_library
from pretune.measure import MeasurePool
from pretune.measure.noise import LEAST_TRIALS, busy_notice
from pretune.measure.result import Measured
from pretune.model import WorldModel, load_weights
from pretune.progress import seconds_text, show_progress
from pretune.records import Record, RunFolder, best_records, latest_finals, make_record, target_key
from pretune.space import TaskSpace, serial, trace_to_json
from pretune.tuning import FINALISTS, Progress, Run, TaskResult, build_deadline, limits, replay, tune
from programs import TARGET, matmul, softmax

pytestmark = pytest.mark.usefixtures("few_rounds")

HARDWARE = hardware_for_target(TARGET, detect())


@pytest.fixture(scope="module")
def pool():
    with MeasurePool(TARGET, workers=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def model(weights):
    return WorldModel(load_weights(weights), num_threads=1)


def trace(mod: tvm.IRModule, factor: int, *, wrong: bool = False) -> list:
    """A schedule of a block C; a wrong one adds up in whole numbers."""
    schedule = s_tir.Schedule(mod)
    block = schedule.get_sblock("C")
    schedule.split(schedule.get_loops(block)[1], [None, factor])
    if wrong:
        schedule.cache_write(block, 0, "global")
        schedule.unsafe_set_dtype(block, 0, "int32")
    return trace_to_json(schedule.trace)


def record(task: Task, trial: int, trace: list | None, seconds: float) -> Record:
    """A trial as a run would have written it."""
    return make_record(
        task,
        TARGET,
        Measured(latencies=(seconds,)),
        trial=trial,
        trace=trace,
        chosen_by="search" if trace else "default",
        hardware=HARDWARE,
    )


def test_finals_are_repeated_until_the_winner_is_checked(pool, model, tmp_path):
    task = make_task("matmul", matmul()["main"])
    key = target_key(TARGET)
    factors = (2, 3, 4, 6, 8, 12, 16)
    assert len(factors) == FINALISTS + 1
    traces = [trace(task.mod, factor, wrong=True) for factor in factors]
    good = trace(task.mod, 24)

    # The default is so slow that it is no finalist; the only right candidate comes after all wrong ones.
    trials = [record(task, i, t, 1e-6 * i) for i, t in enumerate([*traces, good], start=1)]
    trials = [record(task, 0, None, 1.0), *trials]
    with RunFolder(tmp_path) as folder:
        folder.log.append(*trials)

        def tune(records, budget=8):
            run = Run(TARGET, HARDWARE, model, pool, folder, budget, 0, None, records, 1)
            return run.task(0, task)

        result = tune(list(trials))
        assert (result.chosen_by, result.error, result.trace) == ("search", "", good)
        # The last wrong one is checked only if it happens to be faster than the right one.
        assert 6 <= len(result.notes) <= 7 and all("computes something else" in note for note in result.notes)
        records = folder.log.load()
        finals = [r for r in records if r.kind == "final"]
        assert next(r.trace for r in finals if r.ok) == good and len(finals) == 8
        # However many of them a kill leaves, none that was not checked is named.
        for end in range(len(trials), len(records) + 1):
            winner = best_records(records[:end], task.task_id, key)[0]
            assert winner.kind == "trial" or winner.trace == good
        assert winner in latest_finals(records)
        again = tune(records)
        assert (again.trace, again.best) == (good, result.best)
        assert folder.log.load() == records

        # Nothing but wrong ones: the default wins, unscheduled.
        result = tune(trials[:-1] + [r for r in finals if not r.ok], budget=7)
        assert (result.chosen_by, result.trace, result.best) == ("default", None, 1.0)


def test_a_reference_that_fails_only_when_outputs_are_compared(pool, model, tmp_path):
    """Timing draws values below 0.1, where the offset is 0; comparing draws larger ones."""
    n = 64
    a, x = te.placeholder((n * n,), name="A"), te.placeholder((1,), name="X")
    k = te.reduce_axis((0, n), name="k")

    def value(i, j):
        far = (x[0] * 10.0).astype("int64") * (1 << 40)
        return te.sum(a[i * n + k] * a[(k * n + j).astype("int64") + far], axis=k)

    task = make_task("gather", te.create_prim_func([a, x, te.compute((n, n), value, name="C")]))
    trials = [record(task, 0, None, 1.0), record(task, 1, trace(task.mod, 8), 1e-6)]
    with RunFolder(tmp_path) as folder:
        result = Run(TARGET, HARDWARE, model, pool, folder, 1, 0, None, trials, 1).task(0, task)
    assert (result.chosen_by, result.error) == ("search", "")
    assert any("outputs were not compared: the reference fails to run" in note for note in result.notes)


def test_a_linker_that_fails_is_a_notice(weights, tmp_path, monkeypatch):
    linker = tmp_path / "broken-g++"
    linker.write_text("#!/bin/sh\necho 'ld: out of order' >&2\nexit 1\n")
    linker.chmod(0o755)
    monkeypatch.setenv("CXX", str(linker))
    result = tune(DEMO, op="*matmul*", trials=0, weights=weights, out=tmp_path / "out")
    assert result.library is None and not (tmp_path / "out" / "model.so").exists()
    (notice,) = [text for text in result.notices if "linking it fails" in text]
    assert "ld: out of order" in notice and "\n" not in notice
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == result.to_dict()


# -- deadlines, noise ----------------------------------------------------------------------------------------


def test_a_deadline_is_learnt_from_what_was_built():
    assert build_deadline([0.1] * 7, 10.0) == 10.0  # too few to tell
    assert build_deadline([0.1] * 8, 10.0) == 2.0
    assert build_deadline([0.5] * 8 + [9.0], 10.0) == 4.0
    assert build_deadline([3.0] * 8, 10.0) == 10.0


def test_other_deadlines_hold_meanwhile(pool):
    usual = (pool.build_timeout, pool.run_timeout)
    with limits(pool, build=0.01):
        (measured,) = pool.measure([matmul()])
        assert (measured.error_kind, measured.error) == ("build-timeout", "took longer than 0.01 s")
    assert (pool.build_timeout, pool.run_timeout) == usual


def test_a_busy_machine_is_told_from_a_quiet_one():
    quiet, noisy = [0.02] * LEAST_TRIALS, [0.02, 0.3, 0.5] * 4
    assert busy_notice([]) == busy_notice([quiet]) == ""
    assert busy_notice([noisy[: LEAST_TRIALS - 1]]) == ""  # too few to tell
    assert busy_notice([quiet] * 60 + [noisy]) == ""  # as happens on a quiet machine
    text = busy_notice([quiet, noisy])
    assert "busy while 1 of the tasks were timed" in text and "differ by 30%" in text and "\n" not in text


# -- a whole model -------------------------------------------------------------------------------------------


def test_a_whole_model_is_timed_and_not_built_again(weights, tmp_path):
    seen: list[Progress] = []

    def run(trials: int):
        seen.clear()
        return tune(
            DEMO, op="*matmul*", trials=trials, weights=weights, out=tmp_path, on_progress=seen.append
        )

    first = run(2)
    assert first.library is not None and first.model is not None, first.notices
    assert first.model.speedup == first.model.untuned / first.model.tuned > 0
    assert all(progress.resumed is None for progress in seen)
    assert [progress.result for progress in seen if progress.result] == first.tasks
    found = json.loads((tmp_path / "result.json").read_text())
    assert found == first.to_dict() and found["model"]["speedup"] == first.model.speedup
    built = first.library.stat().st_mtime_ns

    again = run(2)
    assert (again.library, again.library_key, again.model) == (first.library, first.library_key, first.model)
    assert first.library.stat().st_mtime_ns == built
    assert {progress.resumed for progress in seen} == {len(first.tasks)}

    args = ["tune", "--demo", "--op", "*matmul*", "--trials", "2", "--weights", str(weights)]
    shown = CliRunner().invoke(main, [*args, "--out", str(tmp_path)])
    assert shown.exit_code == 0 and shown.stderr.startswith(f"resumed: {len(first.tasks)} of")
    assert f"whole model: {seconds_text(first.model.untuned)} -> " in shown.stdout

    # A run that was stopped leaves no result: its records tell which tasks were done.
    (tmp_path / "result.json").unlink()
    more = run(3)
    assert {progress.resumed for progress in seen} == {0}
    assert more.library is not None and more.library.stat().st_mtime_ns > built


def test_a_library_key_is_that_of_its_parts(tmp_path, monkeypatch):
    program = load_program(DEMO, target=TARGET)
    key = library_key(program, TARGET, tmp_path)
    assert key == library_key(load_program(DEMO, target=TARGET), TARGET, tmp_path)
    monkeypatch.setenv("PRETUNE_EXACT_MATH", "1")
    exact = library_key(program, TARGET, tmp_path)
    (tmp_path / "database_tuning_record.json").write_text("[]")
    assert len({key, exact, library_key(program, TARGET, tmp_path)}) == 3


def test_a_model_that_cannot_be_timed(tmp_path):
    program = load_program(DEMO, target=TARGET)
    (tmp_path / "model.so").write_text("not a library")
    with pytest.raises(MeasureError, match=r"model\.so"):
        time_library(program, TARGET, tmp_path / "model.so", 1)
    odd = replace(program, inputs=(TensorSpec("x", (1,), "float6_e2m3"),))
    with pytest.raises(MeasureError, match=r"inputs cannot be made: .*float6_e2m3"):
        time_library(odd, TARGET, tmp_path / "model.so", 1)


def test_progress_where_there_is_no_terminal(capsys):
    def progress(index: int, trials: int, result: TaskResult | None = None) -> Progress:
        return Progress(f"task{index}", index, 2, trials, 8, 1e-3, 2e-3, math.nan, 1, result)

    with show_progress(False) as on_progress:
        assert on_progress is not None
        for index in range(2):
            for trials in (0, 4, 8):
                on_progress(progress(index, trials))
            done = TaskResult("", f"task{index}", 1, 2e-3, 1e-3, "search", 8)
            on_progress(progress(index, 8, done))
    assert capsys.readouterr().err.splitlines() == [
        "resumed: 1 of 2 tasks were done",
        "task 1/2 task0  search, 8 trials  best 1 ms  default 2 ms",
        "task 2/2 task1  search, 8 trials  best 1 ms  default 2 ms",
    ]


# -- without parallel loops ----------------------------------------------------------------------------------


def is_parallel(trace: list) -> bool:
    return any(inst[0] == "Parallel" for inst in trace[0])


@pytest.mark.parametrize(("seconds", "also_serial"), [(5e-6, True), (1e-3, False)])
def test_finalists_of_a_tiny_task_without_parallel_loops(pool, model, tmp_path, seconds, also_serial):
    task = make_task("matmul", matmul(8, 8, 8)["main"])
    space = TaskSpace.generate(task.mod, TARGET)
    rng = np.random.default_rng(0)
    made = {c.shash: c for row in space.spaces[0].sample(32, rng) if (c := space.materialise(0, row))}
    traces = [c.trace_json for c in made.values() if is_parallel(c.trace_json)][:5]
    trials = [record(task, i, t, seconds + 1e-9 * i) for i, t in enumerate(traces, start=1)]
    trials = [record(task, 0, None, 1.0), *trials]
    with RunFolder(tmp_path) as folder:
        result = Run(TARGET, HARDWARE, model, pool, folder, 5, 0, None, list(trials), 1).task(0, task)
        finals = folder.log.load()
    assert (result.chosen_by, result.error, result.notes) == ("search", "", [])
    one_thread = [final for final in finals if not is_parallel(final.trace)]
    assert [final.ok for final in finals] == [True] * len(finals)
    assert len(finals) - len(one_thread) == 5
    # Of the best three, with the numbers of the trials that they come from.
    assert sorted(final.trial for final in one_thread) == ([1, 2, 3] if also_serial else [])
    for final in one_thread:
        assert "T.parallel" not in replay(task.mod, final.trace).script()
        assert final.trace == serial(traces[final.trial - 1])


def test_an_unmeasured_choice_is_parallel_where_that_pays(model):
    run = Run(TARGET, HARDWARE, model, None, None, 0, 0, None, [], 2)
    small, large = (make_task("softmax", softmax(*shape)["main"]) for shape in ((8, 16), (512, 512)))
    for task, parallel in ((small, False), (large, True)):
        result = run.task(0, task)
        assert result.trace is not None and is_parallel(result.trace) == parallel
        assert ("T.parallel" in replay(task.mod, result.trace).script()) == parallel
