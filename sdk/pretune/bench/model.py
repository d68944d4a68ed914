"""``pretune bench model``: a whole model, untuned, tuned, and in ONNX Runtime on the same threads."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pretune import env
from pretune.bench.common import environment, show_environment
from pretune.errors import EnvironmentFaultError, InputError
from pretune.hardware import count_cores, detect, make_target
from pretune.library import in_turns, random_inputs

if TYPE_CHECKING:
    from rich.console import Console

    from pretune.tuning import Progress


def run(
    source: str | Path,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    trials: int = 16,
    rounds: int = 15,
    out: str | Path | None = None,
    weights: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:
    """Tune an ONNX model and time it in turns with untuned TVM and ONNX Runtime.

    Parameters
    ----------
    source : str or Path
        An ``.onnx`` file.
    shapes : mapping, optional
        Shapes of inputs with dynamic dimensions.
    trials : int
        Per task.
    rounds : int
        Turns of each system; medians count.
    out : str or Path, optional
        Folder of the tuning run; an earlier run there is resumed.
    weights : str or Path, optional
        Weights folder.
    on_progress : callable, optional
        As in `pretune.tune`.

    Returns
    -------
    dict
        ``latencies`` in seconds (``untuned``, ``tuned``, ``onnxruntime``), ``difference``, the largest
        absolute difference of tuned outputs to ONNX Runtime's, and what the tuning run reports in ``tuning``.
    """
    if Path(source).suffix.lower() != ".onnx":
        raise InputError(f"{source}: pretune bench model compares with ONNX Runtime; give an .onnx file")
    threads = env.num_threads() or count_cores().cores
    # Read when TVM starts its threads. Unpinned, since TVM pins all but the one that calls, which now and
    # then shares a core with another for many calls.
    os.environ["TVM_NUM_THREADS"] = str(threads)
    os.environ["TVM_BIND_THREADS"] = "0"
    if out is None:
        with tempfile.TemporaryDirectory(prefix="pretune-bench-") as folder:
            return _run(Path(source), shapes, trials, rounds, Path(folder), weights, on_progress, threads)
    return _run(Path(source), shapes, trials, rounds, Path(out), weights, on_progress, threads)


def render(found: Mapping[str, Any], console: Console) -> None:
    """Print a table."""
    from rich.table import Table

    from pretune.progress import seconds_text

    table = Table("system")
    for name in ("latency", "fastest turn", "slowest turn", "against ONNX Runtime"):
        table.add_column(name, justify="right")
    for name, latency in found["latencies"].items():
        turns = found["turns"][name]
        ratio = found["latencies"]["onnxruntime"] / latency
        times = (seconds_text(value) for value in (latency, min(turns), max(turns)))
        table.add_row(name, *times, f"{ratio:.2f}x")
    console.print(table)
    console.print(
        f"{found['program']}: {found['tasks']} tasks at {found['trials']} trials, tuned in "
        f"{found['seconds']:.0f} s; largest difference to ONNX Runtime {found['difference']:.2g}; "
        f"{found['threads']} threads each",
        soft_wrap=True,
    )
    show_environment(dict(found), console)


def _run(
    source: Path,
    shapes: Mapping[str, Sequence[int]] | None,
    trials: int,
    rounds: int,
    out: Path,
    weights: str | Path | None,
    on_progress: Callable[[Progress], None] | None,
    threads: int,
) -> dict[str, Any]:
    import tvm
    from tvm import relax

    from pretune.compile import compile_program
    from pretune.intake import load_program
    from pretune.native_log import quiet_native
    from pretune.tuning import tune

    tuned = tune(source, shapes=shapes, trials=trials, out=out, weights=weights, on_progress=on_progress)
    if tuned.library is None:
        raise EnvironmentFaultError("; ".join(tuned.notices) or f"{out} has no model.so; run: pretune doctor")
    machine = detect()
    target = make_target("native", machine)
    program = load_program(source, target=target, shapes=shapes)
    inputs = random_inputs(program.inputs)

    device: Any = tvm.cpu()
    arguments = [tvm.runtime.tensor(array) for array in inputs.values()]
    with quiet_native():  # "Scope Loaded:", once for every weight
        untuned_vm = relax.VirtualMachine(compile_program(program, target), device)
        library: Any = tvm.runtime.load_module(str(tuned.library))
        tuned_vm = relax.VirtualMachine(library, device)
    session = _session(source, threads)
    systems: dict[str, Callable[[], Any]] = {
        "untuned": lambda: untuned_vm["main"](*arguments),
        "tuned": lambda: tuned_vm["main"](*arguments),
        "onnxruntime": lambda: session.run(None, inputs),
    }
    wanted = systems["onnxruntime"]()
    difference = _difference(_arrays(systems["tuned"]()), wanted)
    turns = in_turns(systems, rounds)
    return {
        "benchmark": "model",
        "program": program.name,
        "inputs": {spec.name: list(spec.shape) for spec in program.inputs},
        "trials": trials,
        "tasks": len(program.tasks),
        "latencies": {name: statistics.median(each) for name, each in turns.items()},
        "turns": turns,
        "difference": difference,
        "untuned_difference": _difference(_arrays(systems["untuned"]()), wanted),
        "speedup": statistics.median(turns["untuned"]) / statistics.median(turns["tuned"]),
        "seconds": tuned.seconds,
        "tuning": json.loads((out / "result.json").read_text()),
        **environment(machine),
    }


def _session(source: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def _arrays(outputs: Any) -> list[np.ndarray]:
    import tvm

    outputs = [outputs] if isinstance(outputs, tvm.runtime.Tensor) else list(outputs)
    return [output.numpy() for output in outputs]


def _difference(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Largest absolute difference over all outputs."""
    pairs = zip(got, wanted, strict=True)
    return max(float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max(initial=0.0)) for a, b in pairs)
